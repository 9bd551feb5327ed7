"""What ranks may take of a machine's memory: all have pages for the one that has least."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from coppice.runtime.config import CPU_FRACTION
from coppice.runtime.runner import loaded
from coppice.runtime.runner.cache import size
from tests.runtime.engine.test_families import run
from tests.runtime.runner.ranks.conftest import StartRanks

KIB = 2**10
# Keys and values of 16 tokens in 2 layers, of one head of 16 float32 numbers.
PAGE = 2 * 16 * 2 * 16 * 4


@pytest.mark.parametrize("poor", [0, 2], ids=["the first", "another"])
def test_all_ranks_have_as_many_pages_as_the_one_with_the_fewest(
    tiny_checkpoint: Callable[..., Path],
    start_threads: StartRanks,
    monkeypatch: pytest.MonkeyPatch,
    poor: int,
) -> None:
    """Else the one table of pages would name some that this rank does not have."""
    ranks, planned = threading.local(), {}
    plan, available = loaded.plan_cache, {True: 600 * KIB, False: 1200 * KIB}

    def plan_cache(*args: object) -> tuple[int, str]:
        group = next(each for each in args if hasattr(each, "rank"))
        ranks.own = group.rank
        planned[group.rank] = plan(*args)
        return planned[group.rank]

    monkeypatch.setattr(loaded, "plan_cache", plan_cache)
    monkeypatch.setattr(size, "available_memory", lambda _: available[ranks.own == poor])
    # Each rank has one of four heads, and so one of the two of keys and values.
    path = tiny_checkpoint("llama")
    engine = start_threads(path, 4, kv_cache_tokens=None, page_size=16)
    fewest = int(available[True] // 4 * CPU_FRACTION) // PAGE
    assert [planned[rank][0] for rank in range(4)] == [fewest] * 4
    assert engine.runner.num_pages == fewest
    said = f"all ranks have as many as the one with the fewest, {fewest} pages"
    assert [said in planned[rank][1] for rank in range(4)] == [rank != poor for rank in range(4)]
    assert run(engine) == run(start_threads(path, 1))
