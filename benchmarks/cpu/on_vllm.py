"""The worker of `cpu_peers.py` for vLLM's CPU build, compiled or (`variant["eager"]`) eager.

Its int8 is W8A8: weights with a scale for each row, activations with one for each token. The
checkpoint for it, in the format of compressed-tensors, is written by this module.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from pipe import Peer, serve
from workloads import Job


class Vllm(Peer):
    """Adds all requests to an engine in this process and runs its steps until none is left."""

    @staticmethod
    def prepare(options: dict[str, Any]) -> None:
        if options["precision"] == "int8":
            target = Path(options["folder"]) / "int8"
            if not target.exists():
                partial = target.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                _write_int8(Path(options["checkpoint"]), partial)
                partial.rename(target)

    def __init__(self, options: dict[str, Any]) -> None:
        checkpoint = Path(options["checkpoint"])
        config = json.loads((checkpoint / "config.json").read_text())
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        token = 8 * config["hidden_size"] // heads * kv_heads * config["num_hidden_layers"]
        space = math.ceil(options["tokens_shared"] * 1.2 * token / 2**30)
        cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(space),  # GiB
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
            # By default it leaves one core to a server.
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        )
        import vllm

        self.version = vllm.__version__
        self._vllm = vllm
        if options["precision"] == "int8":
            checkpoint = Path(options["folder"]) / "int8"
        self._llm = vllm.LLM(
            str(checkpoint),
            dtype="bfloat16" if options["precision"] == "bfloat16" else "float32",
            max_model_len=options["length"] + 64,
            max_num_seqs=max(options["lines"], 32),
            max_num_batched_tokens=2048 if options["length"] + 64 <= 2048 else 4096,
            enable_prefix_caching=True,
            enforce_eager=options["variant"].get("eager", False),
            disable_log_stats=True,
            speculative_config=options["variant"].get("drafts"),
        )
        self._next = 0

    def run(self, jobs: list[Job], fresh: bool) -> dict[str, Any]:
        if fresh:
            self._llm.reset_prefix_cache()
        if jobs[0].beams:
            return self._search(jobs)
        engine = self._llm.llm_engine
        names = []
        start = time.perf_counter()
        for job in jobs:
            params = self._vllm.SamplingParams(
                n=job.n,
                temperature=1.0 if job.n > 1 else 0.0,
                max_tokens=job.out,
                ignore_eos=True,
                detokenize=False,
            )
            names.append(str(self._next))
            self._next += 1
            engine.add_request(names[-1], {"prompt_token_ids": job.prompt}, params)
        first: dict[str, float] = {}
        found: dict[str, dict[int, list[int]]] = {name: {} for name in names}
        steps = 0
        while engine.has_unfinished_requests():
            steps += bool(first)
            for output in engine.step():
                if any(each.token_ids for each in output.outputs):
                    first.setdefault(output.request_id, time.perf_counter() - start)
                # Samples of one prompt are reported as each ends, not all in the last output.
                lines = {each.index: list(each.token_ids) for each in output.outputs}
                found[output.request_id] |= lines
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "first": [first[name] for name in names],
            "tokens": [[found[name][index] for index in sorted(found[name])] for name in names],
            "steps": steps,
        }

    def _search(self, jobs: list[Job]) -> dict[str, Any]:
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(jobs[0].beams, jobs[0].out, ignore_eos=True)
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        start = time.perf_counter()
        outputs = self._llm.beam_search(prompts, params)
        seconds = time.perf_counter() - start
        tokens = [
            [list(each.tokens[len(job.prompt) :]) for each in output.sequences]
            for job, output in zip(jobs, outputs, strict=True)
        ]
        return {"seconds": seconds, "first": None, "tokens": tokens}


def _write_int8(checkpoint: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (checkpoint / name).exists():
            shutil.copy(checkpoint / name, target / name)
    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensor = tensor.float()
            scale = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
            tensors[name] = (tensor / scale).round().to(torch.int8)
            tensors[name + "_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))


def _preload() -> None:
    """Starts this program again with the libraries that vLLM asks to have loaded before others."""
    names = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    folders = (Path("/usr/lib/x86_64-linux-gnu"), Path(sys.prefix) / "lib")
    found = [str(each) for name in names for folder in folders if (each := folder / name).exists()]
    if found and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = ":".join(found)
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    _preload()
    serve(Vllm)
