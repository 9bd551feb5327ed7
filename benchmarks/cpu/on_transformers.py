"""The worker of `cpu_peers.py` for transformers: `generate`, or its continuous batching."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from pipe import Peer, Unsupported, serve
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria
from workloads import Job


class _FirstToken(StoppingCriteria):
    """Records when the first token came, and never stops."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._start = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.seconds is None:
            self.seconds = time.perf_counter() - self._start
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers(Peer):
    """Continuous batching if `variant["continuous"]` is set, else one batch without padding."""

    version = transformers.__version__

    def __init__(self, options: dict[str, Any]) -> None:
        if options["precision"] == "int8":
            raise Unsupported("transformers has no int8 for a CPU")
        torch.set_num_threads(options["threads"])
        self._continuous = options["variant"].get("continuous", False)
        self._options = options
        self._manager: Any = None
        self._model = AutoModelForCausalLM.from_pretrained(
            options["checkpoint"],
            dtype=getattr(torch, options["precision"]),
            attn_implementation="sdpa",  # continuous batching takes its paged variant
        ).eval()
        self._passes = 0
        self._model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._passes += 1

    def run(self, jobs: list[Job], fresh: bool) -> dict[str, Any]:
        return self._run_continuous(jobs) if self._continuous else self._run_batch(jobs)

    @torch.inference_mode()
    def _run_batch(self, jobs: list[Job]) -> dict[str, Any]:
        job = jobs[0]
        ids = torch.tensor([each.prompt for each in jobs])
        lines = max(job.n, job.beams, 1)
        first, passes = _FirstToken(), self._passes
        drafts = self._options["variant"].get("drafts") or {}
        start = time.perf_counter()
        result = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=_config(job),
            num_return_sequences=lines,
            stopping_criteria=[first],
            **drafts,
        )
        seconds = time.perf_counter() - start
        made = result[:, ids.shape[1] :].tolist()
        return {
            "seconds": seconds,
            "first": [first.seconds] * len(jobs),
            "tokens": [made[at : at + lines] for at in range(0, len(made), lines)],
            "steps": self._passes - passes - 1,
        }

    def _run_continuous(self, jobs: list[Job]) -> dict[str, Any]:
        job = jobs[0]
        if job.beams:
            raise Unsupported("continuous batching has no beam search")
        from transformers import ContinuousBatchingConfig

        # Each sample is a separate request; they share their prompt's blocks.
        prompts = [each.prompt for each in jobs for _ in range(each.n)]
        page = 32  # smaller than the default of 256, since only whole pages hit
        start = time.perf_counter()
        if self._manager is None or self._sampled != (job.n > 1):
            if self._manager is not None:
                self._manager.stop(block=True)
                self._manager.destroy()
            self._sampled = job.n > 1
            config = ContinuousBatchingConfig(
                page_size=page,
                num_blocks=self._options["tokens_separate"] // page + 64,
                max_batch_tokens=2048,
                use_async_batching=False,
                use_cuda_graph=False,
            )
            self._manager = self._model.init_continuous_batching(_config(job), config)
            self._manager.start()
            start = time.perf_counter()  # making the manager counts as start-up
        names = self._manager.add_requests(
            inputs=prompts, max_new_tokens=job.out, record_timestamps=True
        )
        results: dict[str, Any] = {}
        while len(results) < len(prompts):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread ended")
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                results[result.request_id] = result
        seconds = time.perf_counter() - start
        found = [results[name] for name in names]
        made = [result.generated_tokens for result in found]
        first = [result.timestamps[0] - start if result.timestamps else None for result in found]
        return {
            "seconds": seconds,
            "first": first[:: job.n],
            "tokens": [made[at : at + job.n] for at in range(0, len(made), job.n)],
        }

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)


def _config(job: Job) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=job.out,
        min_new_tokens=None,
        do_sample=job.n > 1,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if job.n > 1 else {}),
        num_beams=max(job.beams, 1),
        pad_token_id=0,
        eos_token_id=None,
    )


if __name__ == "__main__":
    serve(Transformers)
