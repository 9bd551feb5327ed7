"""The clock that counts tokens: stamps, and the times they were given at."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.radix.accounting.seen.use_clock import LAST, PER_POOL, UseClock


def stamp(clock: UseClock, tokens: list[int], times: list[float]) -> list[int]:
    return clock.stamp(np.array(tokens), np.array(times))[1].tolist()


def test_a_pool_of_tokens_takes_65_536_stamps() -> None:
    clock = UseClock(PER_POOL * 10)
    begins, ends = clock.stamp(np.array([5, 5, 5, 25]), np.array([0.0, 1.0, 2.0, 3.0]))
    assert begins.tolist() == [1, 1, 2, 2]
    assert ends.tolist() == [1, 2, 2, 5]
    assert stamp(clock, [1], [4.0]) == [5]
    assert stamp(clock, [PER_POOL * 10, 9], [5.0, 6.0]) == [5 + PER_POOL, 6 + PER_POOL]
    stamps = np.array([1, 2, 5, 5 + PER_POOL, 6 + PER_POOL], np.uint64)
    assert clock.time_of(stamps).tolist() == [0, 1, 3, 5, 6]


def test_stamps_of_tiny_pools_count_tokens() -> None:
    clock = UseClock(3)
    assert stamp(clock, [2, 1, 7], [0.0, 0.5, 0.75]) == [3, 4, 11]


def test_old_times_get_coarser_but_stay_near() -> None:
    clock = UseClock(PER_POOL)
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.integers(1, 5, 50_000)).astype(float)
    for first in range(0, len(times), 100):
        part = times[first : first + 100]
        clock.stamp(np.ones(len(part), np.int64), part)
    assert len(clock._stamps) <= 8192 + 100
    found = clock.time_of(np.arange(2, 50_002, dtype=np.uint64))
    assert (found[-4000:] == times[-4000:]).all()
    assert np.abs(found - times).max() < 300
    assert (np.diff(found) > 0).all()


def test_stamps_run_out_and_begin_anew() -> None:
    clock = UseClock(1)
    stamp(clock, [LAST - 2], [1.0])
    with pytest.raises(OverflowError):
        stamp(clock, [1, 1], [2.0, 2.0])
    assert stamp(clock, [1], [3.0]) == [LAST]
    clock.restart()
    assert stamp(clock, [7, 1], [4.0, 5.0]) == [8, 9]
    assert clock.time_of(np.array([8, 9], np.uint64)).tolist() == [4.0, 5.0]


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="pool_tokens must be at least 1, got 0"):
        UseClock(0)
