"""Histograms: buckets, quantiles, and what came between two snapshots."""

from __future__ import annotations

import pytest

from coppice.runtime.metrics.histogram import LONG_SECONDS, Buckets, Histogram


def test_values_fall_into_the_bucket_that_ends_at_or_above_them() -> None:
    buckets = Buckets((1.0, 2.0, 5.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (5.0, 1), (9.0, 3)):
        buckets.add(value, times)
    made = buckets.snapshot()
    assert made.counts == (3, 1, 1, 3)
    assert made.cumulative() == (3, 4, 5, 8)
    assert (made.count, made.total) == (8, 36.0)
    assert made.mean == 36.0 / 8


def test_quantiles_lie_in_their_bucket() -> None:
    made = Histogram((1.0, 2.0, 4.0), (2, 2, 4, 0), 16.0)
    assert made.quantile(0.25) == 1.0
    assert made.quantile(0.5) == 2.0
    assert made.quantile(0.75) == 3.0
    assert made.quantile(1.0) == 4.0
    assert made.quantile(0.0) == 0.0
    assert Histogram((1.0,), (0, 5), 50.0).quantile(0.5) == 1.0, "above all: the last bound"
    nothing = Histogram((1.0,), (0, 0), 0.0)
    assert nothing.quantile(0.5) is None
    assert nothing.mean is None
    with pytest.raises(ValueError, match="share must be from 0 to 1"):
        made.quantile(1.5)


def test_what_came_between_two_snapshots() -> None:
    earlier, later = Histogram((1.0,), (2, 1), 4.0), Histogram((1.0,), (3, 5), 9.0)
    assert later.since(earlier) == Histogram((1.0,), (1, 4), 5.0)
    assert earlier.since(later) == earlier, "the engine was started again in between"
    with pytest.raises(ValueError, match="other buckets"):
        later.since(Histogram((2.0,), (0, 0), 0.0))


def test_bounds_grow() -> None:
    assert list(LONG_SECONDS) == sorted(set(LONG_SECONDS))
    assert LONG_SECONDS[0] == 0.001
    assert LONG_SECONDS[-1] == 2000.0
