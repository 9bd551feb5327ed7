"""The worker of `cpu_peers.py` for llama.cpp's server, on a GGUF file that this module writes.

`variant["slots"]` is the number of the server's slots. The program `llama-server` lies beside the
Python interpreter.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from pipe import Peer, Unsupported, serve
from workloads import Job

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class LlamaCpp(Peer):
    """A server process; one thread for each request asks it over loopback."""

    @staticmethod
    def prepare(options: dict[str, Any]) -> None:
        target = gguf_file(options)
        if not target.exists():
            partial = target.with_suffix(".partial")
            _write_gguf(Path(options["checkpoint"]), partial, options["precision"])
            partial.rename(target)

    def __init__(self, options: dict[str, Any]) -> None:
        slots = options["variant"]["slots"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        kv = "f32" if options["precision"] == "float32" else "f16"  # f16 is its default
        # One slot serves the sequences in turn, and keeps what a sequence shares with the next one.
        context = options["length"] + 64 if slots == 1 else options["tokens_separate"] + 64 * slots
        self._server = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("llama-server")),
                "--model", str(gguf_file(options)), "--port", str(self._port), "--no-webui",
                "--threads", str(options["threads"]), "--threads-batch", str(options["threads"]),
                "--parallel", str(slots), "--kv-unified", "--ctx-size", str(context),
                "--batch-size", "2048", "--cache-type-k", kv, "--cache-type-v", kv,
            ],
            stdout=sys.stderr,
        )  # fmt: skip
        while not self._healthy():
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._server.returncode}")
            time.sleep(0.02)
        self.version = json.loads(self._get("/props")).get("build_info", "")

    def _get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}")
        return answer.read().decode()

    def _healthy(self) -> bool:
        try:
            self._get("/health")
        except (OSError, RuntimeError):
            return False
        return True

    def run(self, jobs: list[Job], fresh: bool) -> dict[str, Any]:
        if jobs[0].beams:
            raise Unsupported("the server has no beam search")
        lines = [(index, line) for index, job in enumerate(jobs) for line in range(job.n)]
        tokens: list[list[list[int]]] = [[[] for _ in range(job.n)] for job in jobs]
        first: dict[int, float] = {}
        errors: list[str] = []
        self._steps = self._computed = 0
        start = time.perf_counter()

        def ask(index: int, line: int) -> None:
            try:
                for found in self._complete(jobs[index], seed=index * 1000 + line):
                    first.setdefault(index, time.perf_counter() - start)
                    tokens[index][line].extend(found)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=ask, args=each) for each in lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if errors:
            raise RuntimeError(errors[0])
        return {
            "seconds": seconds,
            "first": [first[index] for index in range(len(jobs))],
            "tokens": tokens,
            "steps": self._steps,
            "computed": self._computed,
        }

    def _complete(self, job: Job, seed: int) -> Any:
        """Yields lists of new token ids as they come."""
        body: dict[str, Any] = {
            "prompt": job.prompt,
            "n_predict": job.out,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
            "temperature": 0.0,
        }
        if job.n > 1:
            body |= {"temperature": 1.0, "samplers": ["temperature"], "seed": seed}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=3600)
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read().decode()[:300])
        for line in answer:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if event.get("tokens"):  # the last event may have some, too
                    yield event["tokens"]
                if event.get("stop"):
                    told = event["timings"]
                    self._computed += told["predicted_n"]  # it does not tell all of them
                    self._steps += told["predicted_n"] - 1 - told.get("draft_n_accepted", 0)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


def gguf_file(options: dict[str, Any]) -> Path:
    return Path(options["folder"]) / f"{options['precision']}.gguf"


def _write_gguf(checkpoint: Path, target: Path, precision: str) -> None:
    import gguf
    from safetensors import safe_open

    config = json.loads((checkpoint / "config.json").read_text())
    llama = config["model_type"] == "llama"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama" if llama else "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if llama:
        writer.add_rope_dimension_count(config["hidden_size"] // heads)
    _add_tokenizer(writer, config["vocab_size"])

    def rotated(name: str, tensor: np.ndarray) -> np.ndarray:
        # llama.cpp's `llama` rotates pairs of neighbouring elements, a checkpoint the two halves.
        count = {"attn_q": heads, "attn_k": kv_heads}.get(name)
        if not llama or count is None:
            return tensor
        shape = tensor.shape
        return (
            tensor.reshape(count, 2, shape[0] // count // 2, *shape[1:])
            .swapaxes(1, 2)
            .reshape(shape)
        )

    def add(name: str, tensor: np.ndarray) -> None:
        if precision in ("int8", "int4") and tensor.ndim == 2:
            # As `llama-quantize` does it for Q4_0, the embedding, which is the head, has 8 bits.
            small = precision == "int4" and not name.startswith("token_embd")
            kind = gguf.GGMLQuantizationType.Q4_0 if small else gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))

    with safe_open(checkpoint / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            tensor = tensors.get_tensor(name)
            if name == "model.embed_tokens.weight":
                add("token_embd.weight", tensor)
            elif name == "model.norm.weight":
                add("output_norm.weight", tensor)
            elif name.startswith("model.layers."):
                _, _, layer, rest = name.split(".", 3)
                part, kind = rest.rsplit(".", 1)
                add(f"blk.{layer}.{_NAMES[part]}.{kind}", rotated(_NAMES[part], tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, size: int) -> None:
    """A SentencePiece vocabulary: three special tokens, the bytes, and numbered words."""
    import gguf

    kinds = gguf.TokenType
    words = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    words += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    words += [(f"\u2581w{index}", kinds.NORMAL) for index in range(len(words), size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([kind for _, kind in words])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


if __name__ == "__main__":
    os.environ.setdefault("LLAMA_LOG_COLORS", "off")
    serve(LlamaCpp)
