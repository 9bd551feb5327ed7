"""Random schedules of other families in a small pool: each request's tokens as alone, recounted.

    COPPICE_SCHEDULES=100 pytest tests/runtime/engine/test_random_families.py -m "" --timeout 0

runs 300 schedules of each family and page size instead of three. A third of them have drafts.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_drafts import ScriptedDrafts

from coppice.radix import POLICIES, PinRefused
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.request import Sequence, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.conftest import OTHER_FAMILIES

_SCHEDULES = int(os.environ.get("COPPICE_SCHEDULES", "1"))
MOST = 20  # tokens of a request
_TIE = 1e-3  # a difference of log-probabilities that batches of other shapes may turn round
PAGES = (1, 7, 16)
DEFAULT = {("gpt_oss", 7), ("gemma3_text", 1), ("qwen3_moe", 16)}
CASES = [
    pytest.param(family, size, marks=[] if (family, size) in DEFAULT else [pytest.mark.slow])
    for family in OTHER_FAMILIES
    for size in PAGES
]


def start(path: Path, **options: Any) -> Engine:
    """An engine without drafts, whose outputs have a token each."""
    return Engine(EngineConfig(model=str(path), dtype="float32", speculation="off", **options))


class Schedule:
    """Greedy requests that begin alike, aborts and pins in a pool with room for about three.

    With `known`, an engine that serves each request alone, there are drafts, most of them right.
    """

    def __init__(self, seed: int, path: Path, size: int, known: Engine | None = None) -> None:
        self.rng = rng = random.Random(seed)
        longest = 64
        seqs = rng.randint(2, 5)
        self.engine = start(
            path,
            page_size=size,
            kv_cache_tokens=size * int(-(-longest // size) * rng.choice([1, 1.2, 1.6, 2.5])),
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + rng.choice([1, 5, 20, 60]),
            async_scheduling=rng.random() < 0.5,
            eviction_policy=rng.choice(sorted(POLICIES)),
            pin_budget=rng.choice([0.0, 0.4]),
        )
        stem = [rng.randrange(3, 320) for _ in range(40)]
        other = [rng.randrange(3, 320) for _ in range(20)]
        self.stems = [stem, stem[:26] + other, stem[:9], other]
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.got: dict[tuple[str, int], list[StepOutput]] = {}
        self.aborted: set[str] = set()
        self.drafts: ScriptedDrafts | None = None
        if known is not None:
            texts: dict[str, list[int]] = {}

            def following(sequence: Sequence) -> list[int]:
                name = sequence.request.request_id
                if name not in texts:
                    texts[name] = tokens(served(known, self.asked[name][0], MOST))
                return texts[name][sequence.num_generated :]

            self.drafts = ScriptedDrafts(random.Random(f"drafts {seed}"), following, vocabulary=320)
            self.engine.speculate(self.drafts)

    def ask(self) -> None:
        rng = self.rng
        prompt = list(rng.choice(self.stems))
        prompt = prompt[: rng.randint(1, len(prompt))]
        if self.got and rng.random() < 0.3:  # it continues another one
            name, index = rng.choice(sorted(self.got))
            prompt = self.asked[name][0] + tokens(self.got[name, index])
        prompt += [rng.randrange(3, 320) for _ in range(rng.randint(0, 6))]
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(1, MOST), n=rng.choice([1, 1, 1, 2]),
            ignore_eos=True, logprobs=2, prompt_logprobs=rng.choice([None, None, None, 0]),
        )  # fmt: skip
        name = str(len(self.asked))
        try:
            self.engine.add_request(name, prompt, params)
        except ValueError as error:
            if "prompt must be shorter than" not in str(error):
                raise
            return
        self.asked[name] = prompt, params

    def run(self) -> None:
        rng, engine = self.rng, self.engine
        for _ in range(40):
            chance = rng.random()
            if chance < 0.4 and len(self.asked) < 14:
                self.ask()
            elif chance < 0.44 and self.asked:
                name = rng.choice(sorted(self.asked))
                self.aborted |= {name} if engine.abort(name) else set()
            elif chance < 0.5:
                try:
                    engine.pin("pin", self.stems[2])
                except PinRefused:
                    engine.unpin("pin")
            else:
                self.step()
        while engine.has_unfinished():
            self.step()
        engine.pins.clear()
        engine.reset_cache()
        assert engine.tree.pool.free_pages == engine.num_pages

    def step(self) -> None:
        for output in self.engine.step():
            self.got.setdefault((output.request_id, output.index), []).append(output)
        self.engine.check()

    def compare(self, alone: Engine) -> int:
        """Serves each request again, alone; returns how many tokens were compared."""
        compared = 0
        for name, (prompt, params) in self.asked.items():
            most = max((len(tokens(o)) for key, o in self.got.items() if key[0] == name), default=0)
            if not most:
                continue
            steps = served(alone, prompt, most)
            for index in range(params.n):
                mine = self.got.get((name, index), [])
                if name not in self.aborted:
                    assert mine[-1].finish_reason == "length"
                assert not any(output.error for output in mine)
                for place, (ours, theirs) in enumerate(zip(tokens(mine), steps, strict=False)):
                    if theirs.new_token_ids != (ours,):
                        assert theirs.logprobs is not None
                        first, second = theirs.logprobs.top_logprobs[0][:2]
                        where = f"request {name}.{index}, token {place} after {prompt}"
                        assert first - second < _TIE, where
                        break
                    compared += 1
        return compared


def served(alone: Engine, prompt: list[int], most: int) -> list[StepOutput]:
    """What an engine gives for a request alone, a token in each output."""
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, logprobs=2)
    alone.add_request("alone", prompt, params)
    steps = [output for _ in range(most + 2) for output in alone.step()]
    assert not alone.has_unfinished()
    return steps


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize(("family", "size"), CASES)
def test_each_request_gets_what_it_gets_alone(
    tiny_checkpoint: Callable[..., Path], family: str, size: int
) -> None:
    path = tiny_checkpoint(family)
    alone = start(
        path, page_size=16, kv_cache_tokens=1024, max_num_seqs=1, enable_prefix_caching=False
    )
    evicted = preempted = compared = accepted = rejected = 0
    for seed in range(3 * _SCHEDULES):
        schedule = Schedule(seed, path, size, alone if seed % 3 == 2 else None)
        try:
            schedule.run()
            compared += schedule.compare(alone)
        except Exception as error:
            error.add_note(f"Schedule({seed}, tiny_checkpoint({family!r}), {size})")
            raise
        evicted += schedule.engine.tree.evicted_tokens
        preempted += schedule.engine.counters.preemptions
        if (drafts := schedule.drafts) is not None:
            accepted += drafts.accepted
            rejected += drafts.drafted - drafts.accepted
    assert compared > 50 and evicted and preempted, "the schedules were too easy"
    assert accepted and rejected, "the schedules were too easy"
