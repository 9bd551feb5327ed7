"""Pages that cross the bus on a GPU's second stream, as test_tier_streams.py simulates it."""

from __future__ import annotations

import random

import pytest
import torch
from mixed_requests import joined, run
from tiered_engine import GREEDY, engine, loading_pays

from coppice.runtime.report.gather import make_stats

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def served(made, prompts):
    for number, prompt in enumerate(prompts):
        made.add_request(str(number), prompt, GREEDY)
    return {key: joined(outputs) for key, outputs in run(made).items()}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_no_page_is_read_or_overwritten_too_early(
    tiny_checkpoint, monkeypatch, page_size, overlap, eager
):
    """A pool of few pages, so that all are evicted and come back while others compute."""
    loading_pays(monkeypatch)
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 250) for _ in range(100 + 8 * n)] for n in range(8)]
    options = {"device": "cuda", "dtype": "float32", "page_size": page_size, "max_num_seqs": 3}
    options |= {"enforce_eager": eager, "async_scheduling": overlap}
    path = tiny_checkpoint("llama")
    expected = served(engine(path, kv_cache_tokens=4096, **options), prompts)
    made = engine(path, kv_cache_tokens=640, host_cache="64MiB", **options)
    for _ in range(4):
        rng.shuffle(prompts_now := list(enumerate(prompts)))
        for number, prompt in prompts_now:
            made.add_request(str(number), prompt, GREEDY)
        assert {key: joined(outputs) for key, outputs in run(made).items()} == expected
    assert made.tiers.told.tiers["host"].loaded_tokens > 500
    if not eager:
        assert make_stats(made).decode_steps["graph"] > 10
    made.close()
