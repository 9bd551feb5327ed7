"""The worker of `cpu_peers.py` for Coppice."""

from __future__ import annotations

import time
from typing import Any

from pipe import Peer, serve
from workloads import Job

import coppice
from coppice import BeamSearchParams, Engine, EngineConfig, SamplingParams


class Coppice(Peer):
    """Adds all requests to an engine and runs its steps until none is left."""

    version = coppice.__version__

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(options["threads"])
        self._engine = Engine(
            EngineConfig(
                model=options["checkpoint"],
                dtype="bfloat16" if options["precision"] == "bfloat16" else "float32",
                quantization=options["precision"]
                if options["precision"].startswith("int")
                else None,
                kv_cache_tokens=options["tokens_shared"],
                max_num_seqs=options["lines"],
                speculation="auto" if options["variant"].get("drafts") else "off",
            )
        )
        self._engine.warm_up()  # as a server does before it is ready

    def run(self, jobs: list[Job], fresh: bool) -> dict[str, Any]:
        engine = self._engine
        if fresh:
            engine.reset_cache()
        start = time.perf_counter()
        for index, job in enumerate(jobs):
            if job.beams:
                search = BeamSearchParams(job.beams, job.out, ignore_eos=True)
                engine.add_beam_search(str(index), job.prompt, search)
            else:
                params = SamplingParams(
                    n=job.n,
                    temperature=1.0 if job.n > 1 else 0.0,
                    max_tokens=job.out,
                    ignore_eos=True,
                )
                engine.add_request(str(index), job.prompt, params)
        lines: dict[tuple[str, int], list[int]] = {}
        first: dict[str, float] = {}
        steps = 0
        while engine.has_unfinished():
            steps += bool(first)
            for output in engine.step():
                if output.error:
                    raise RuntimeError(output.error)
                first.setdefault(output.request_id, time.perf_counter() - start)
                line = lines.setdefault((output.request_id, output.index), [])
                line.extend(output.new_token_ids)
        seconds = time.perf_counter() - start
        tokens = [
            [lines[str(index), line] for line in range(max(job.n, job.beams, 1))]
            for index, job in enumerate(jobs)
        ]
        return {
            "seconds": seconds,
            "first": [first[str(index)] for index in range(len(jobs))],
            "tokens": tokens,
            "steps": steps,
        }


if __name__ == "__main__":
    serve(Coppice)
