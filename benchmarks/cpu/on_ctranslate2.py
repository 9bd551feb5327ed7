"""The worker of `cpu_peers.py` for CTranslate2."""

from __future__ import annotations

import shutil
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from pipe import Peer, serve
from workloads import Job

# The least length of a shared prefix that is passed as the static prompt, whose KV is reused.
_STATIC_FROM = 64


class CTranslate2(Peer):
    """Runs all requests as one batch, with their shared prefix as its static prompt."""

    @staticmethod
    def prepare(options: dict[str, Any]) -> None:
        from ctranslate2.converters import TransformersConverter

        target = Path(options["folder"]) / options["precision"]
        if target.exists():
            return
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        TransformersConverter(options["checkpoint"]).convert(
            str(partial), quantization=options["precision"]
        )
        partial.rename(target)

    def __init__(self, options: dict[str, Any]) -> None:
        import ctranslate2

        self.version = ctranslate2.__version__
        folder = Path(options["folder"]) / options["precision"]
        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=options["precision"],
            intra_threads=options["threads"],
        )  # fmt: skip

    def run(self, jobs: list[Job], fresh: bool) -> dict[str, Any]:
        job = jobs[0]
        prompts = [[_word(token) for token in each.prompt] for each in jobs]
        shared = 0
        if len(jobs) > 1:
            # The last token stays in the request: a batch needs at least one.
            columns = zip(*(each.prompt[:-1] for each in jobs), strict=False)
            shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        static = prompts[0][:shared] if shared >= _STATIC_FROM else None
        if static is not None:
            prompts = [prompt[shared:] for prompt in prompts]
        first: dict[int, float] = {}
        start = time.perf_counter()

        def came(result: Any) -> bool:
            first.setdefault(result.batch_id, time.perf_counter() - start)
            return False

        simple = job.n == 1 and not job.beams
        results = self._generator.generate_batch(
            prompts,
            max_length=job.out,
            min_length=job.out,
            include_prompt_in_result=False,
            static_prompt=static,
            end_token=[],
            beam_size=max(job.beams, 1),
            num_hypotheses=max(job.n, job.beams, 1),
            sampling_topk=0 if job.n > 1 else 1,
            callback=came if simple else None,
        )
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "first": [first[index] for index in range(len(jobs))] if simple else None,
            "tokens": [result.sequences_ids for result in results],
        }


def _word(token: int) -> str:
    """The token's word in the checkpoint's tokenizer."""
    return ("<unk>", "<s>", "</s>")[token] if token < 3 else f"w{token}"


if __name__ == "__main__":
    serve(CTranslate2)
