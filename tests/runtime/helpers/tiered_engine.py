"""Engines of tiny models with tiers, and prompts that they serve."""

from __future__ import annotations

import random

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.step_times import StepTimes
from coppice.runtime.tiers.loading import rates

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def loading_pays(monkeypatch):
    """The models are so small that computing is often faster, and machines may be busy."""
    monkeypatch.setattr(StepTimes, "prefill_seconds", lambda self, tokens, context: 10.0 * tokens)
    monkeypatch.setattr(rates, "_LEAST_PATIENCE", 20.0)


def engine(checkpoint, folder=None, **options) -> Engine:
    options = {"kv_cache_tokens": 512, "page_size": 4, "max_num_batched_tokens": 64} | options
    if folder is not None:
        options.setdefault("disk_cache_size", "64MiB")
    disk = None if folder is None else str(folder)
    return Engine(EngineConfig(model=str(checkpoint), disk_cache=disk, **options))


def serve(made: Engine, prompts, params=GREEDY, **options):
    """(Generated tokens, cached tokens) of each prompt; everything is recounted at each step."""
    for index, prompt in enumerate(prompts):
        made.add_request(str(index), prompt, params, **options)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    cached = {}
    while made.has_unfinished():
        for output in made.step():
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
            cached[output.request_id] = output.cached_tokens
        made.check()
    return list(tokens.values()), [cached[str(index)] for index in range(len(prompts))]


def prompts_of(seed: int, lengths=(150, 90, 61, 17)):
    rng = random.Random(seed)
    stem = [rng.randrange(3, 250) for _ in range(40)]
    return [stem + [rng.randrange(3, 250) for _ in range(length - 30)] for length in lengths]
