"""Counts over rolling windows, with a clock that the tests move."""

from __future__ import annotations

import random
from collections.abc import Hashable

import numpy as np
import pytest

from coppice.radix.accounting.counts import CAUSES, FIELDS, MAX_NAMESPACES, Counts, RollingCounts


def row(prompt: int, hit: int = 0) -> np.ndarray:
    cells = dict.fromkeys(FIELDS, 0) | {
        "requests": 1,
        "prompt_tokens": prompt,
        "hit_tokens": hit,
        "cold": prompt - hit,
        "ideal_tokens": hit,
    }
    return np.array([list(cells.values())])


def sums(counts: RollingCounts, second: int) -> tuple[int, int, int]:
    windows = counts.overall(second)
    return (
        windows.last_minute.prompt_tokens,
        windows.last_ten_minutes.prompt_tokens,
        windows.since_start.prompt_tokens,
    )


def test_windows_expire() -> None:
    counts = RollingCounts()
    counts.add(row(100), [None], [5])
    assert sums(counts, 5) == (100, 100, 100)
    assert sums(counts, 64) == (100, 100, 100)
    assert sums(counts, 65) == (0, 100, 100)
    assert sums(counts, 599) == (0, 100, 100)
    assert sums(counts, 600) == (0, 0, 100)
    counts.add(row(7), [None], [605])
    assert sums(counts, 605) == (7, 7, 107)
    # The same bucket of the ring, much later.
    counts.add(row(1), [None], [605 + 6000])
    assert sums(counts, 6605) == (1, 1, 108)


def test_one_call_may_span_more_than_a_window() -> None:
    counts = RollingCounts()
    seconds = list(range(0, 2000, 3))
    counts.add(np.concatenate([row(1)] * len(seconds)), [None] * len(seconds), seconds)
    last = seconds[-1]
    minute = sum(second > last - 60 for second in seconds)
    ten = sum(second // 10 > last // 10 - 60 for second in seconds)
    assert sums(counts, last) == (minute, ten, len(seconds))


def test_against_a_plain_list() -> None:
    rng = random.Random(0)
    counts, kept, second = RollingCounts(), [], 0
    for _ in range(60):
        batch = []
        for _ in range(rng.randint(1, 20)):
            second += rng.choice([0, 0, 1, 5, 40])
            batch.append((rng.choice(["a", "b", None]), second, rng.randint(1, 99)))
        kept += batch
        rows = np.concatenate([row(tokens) for _, _, tokens in batch])
        counts.add(rows, [name for name, _, _ in batch], [at for _, at, _ in batch])
        names, others = counts.by_namespace(second)
        assert others.since_start == Counts()
        for name, windows in names.items():
            mine = [(at, tokens) for other, at, tokens in kept if other == name]
            assert windows.since_start.prompt_tokens == sum(tokens for _, tokens in mine)
            assert windows.last_minute.prompt_tokens == sum(
                tokens for at, tokens in mine if at > second - 60
            )
            assert windows.last_ten_minutes.requests == sum(
                at // 10 > second // 10 - 60 for at, _ in mine
            )


def test_rates() -> None:
    counts = Counts(prompt_tokens=200, hit_tokens=50, ideal_tokens=80, evicted=4, evicted_idle=10)
    assert counts.computed_tokens == 150
    assert (counts.hit_rate, counts.ideal_hit_rate) == (0.25, 0.4)
    assert counts.evicted_idle_seconds == 2.5
    assert tuple(counts.causes) == CAUSES
    assert (Counts().hit_rate, Counts().ideal_hit_rate, Counts().evicted_idle_seconds) == (0, 0, 0)


def test_namespaces_beyond_the_limit_are_counted_together() -> None:
    counts = RollingCounts()
    for name in range(MAX_NAMESPACES + 10):
        counts.add(row(10), [name], [name])
    names, others = counts.by_namespace(100)
    assert list(names) == list(range(MAX_NAMESPACES))
    assert others.since_start.prompt_tokens == 100
    assert sums(counts, 73)[2] == 10 * (MAX_NAMESPACES + 10)


def test_a_namespace_takes_the_place_of_one_long_idle() -> None:
    counts = RollingCounts()
    for name in range(MAX_NAMESPACES):
        counts.add(row(10), [name], [0 if name == 3 else 500])
    counts.add(row(1), ["new"], [659])
    assert "new" not in counts.by_namespace(659)[0]
    counts.add(row(1), ["new"], [660])
    names, others = counts.by_namespace(660)
    assert 3 not in names
    assert names["new"].since_start.prompt_tokens == 1
    assert others.since_start.prompt_tokens == 11
    assert sums(counts, 660) == (2, 10 * (MAX_NAMESPACES - 1) + 2, 10 * MAX_NAMESPACES + 2)


@pytest.mark.parametrize("names", [["a"], ["a", "b", "a"]])
def test_no_row_changes_nothing(names: list[Hashable]) -> None:
    counts = RollingCounts()
    counts.add(np.zeros((0, len(FIELDS)), np.int64), [], [])
    assert sums(counts, 0) == (0, 0, 0)
    rows = np.concatenate([row(5)] * len(names))
    counts.add(rows, names, [1] * len(names))
    assert sums(counts, 1) == (5 * len(names),) * 3
