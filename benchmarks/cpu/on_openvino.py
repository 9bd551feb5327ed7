"""The worker of `cpu_peers.py` for OpenVINO GenAI, with continuous batching and prefix caching."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipe import Peer, serve
from workloads import Job


class OpenVino(Peer):
    """Adds all requests to a pipeline and runs its steps until none is left."""

    @staticmethod
    def prepare(options: dict[str, Any]) -> None:
        target = Path(options["folder"]) / options["precision"]
        if target.exists():
            return
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        weights = {"float32": "fp32", "int8": "int8"}[options["precision"]]
        subprocess.run(
            [
                str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino",
                "--model", options["checkpoint"], "--task", "text-generation-with-past",
                "--weight-format", weights, str(partial),
            ],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        partial.rename(target)

    def __init__(self, options: dict[str, Any]) -> None:
        import openvino_genai as genai

        self.version = genai.__version__
        self._genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = options["lines"]
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = math.ceil(options["tokens_shared"] * 1.2 * _token_gib(options))
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"]}
        if options["precision"] == "float32":
            properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        folder = Path(options["folder"]) / options["precision"]
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._next = 0

    def run(self, jobs: list[Job], fresh: bool) -> dict[str, Any]:
        import numpy as np
        import openvino

        start = time.perf_counter()
        handles = []
        for job in jobs:
            ids = openvino.Tensor(np.array([job.prompt], np.int64))
            handles.append(self._pipeline.add_request(self._next, ids, self._config(job)))
            self._next += 1
        first: dict[int, float] = {}
        streamed: list[list[int]] = [[] for _ in jobs]
        lines: list[list[list[int]]] = [[] for _ in jobs]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, (job, handle) in enumerate(zip(jobs, handles, strict=True)):
                while handle.can_read():
                    first.setdefault(index, time.perf_counter() - start)
                    found = [list(each.generated_ids) for each in handle.read().values()]
                    if job.n > 1 or job.beams:
                        lines[index] = found
                    else:
                        streamed[index] += found[0]
        seconds = time.perf_counter() - start
        for index, job in enumerate(jobs):
            if not (job.n > 1 or job.beams):
                lines[index] = [streamed[index]]
        known = len(first) == len(jobs) and not any(job.n > 1 or job.beams for job in jobs)
        return {
            "seconds": seconds,
            "first": [first[index] for index in range(len(jobs))] if known else None,
            "tokens": lines,
        }

    def _config(self, job: Job) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = job.out
        config.ignore_eos = True
        if job.beams:
            config.num_beams = job.beams
            config.num_return_sequences = job.beams
        elif job.n > 1:
            config.num_return_sequences = job.n
            config.do_sample, config.temperature = True, 1.0
        return config


def _token_gib(options: dict[str, Any]) -> float:
    """GiB of one token's KV in float32."""
    config = json.loads((Path(options["checkpoint"]) / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    return 2 * 4 * width * config["num_hidden_layers"] / 2**30


if __name__ == "__main__":
    serve(OpenVino)
