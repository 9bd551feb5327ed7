"""Histograms with fixed buckets: cheap to count into, and read as quantiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def _scale(first: float, last: float, steps: Sequence[float]) -> tuple[float, ...]:
    """`steps` times each power of ten, from `first` to `last`."""
    powers = [10.0**power for power in range(-4, 7)]
    bounds = [float(f"{step * power:.6g}") for power in powers for step in steps]
    return tuple(bound for bound in bounds if first <= bound <= last)


SHORT_SECONDS = _scale(0.0005, 20.0, (1, 1.5, 2, 3, 5, 7))
"""Bounds for times of about a step."""

LONG_SECONDS = _scale(0.001, 2000.0, (1, 2, 3, 5, 7))
"""Bounds for times of whole requests."""

AGES = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, 7200.0, 14400.0,
        43200.0, 86400.0, 259200.0, 604800.0)  # fmt: skip
"""Bounds, in seconds, for how long a cached token is unused."""

COUNTS = tuple(float(1 << power) for power in range(17))
"""Bounds for tokens or sequences in a step."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values fell into each bucket.

    Attributes:
        bounds: the buckets' upper bounds, inclusive, growing.
        counts: values in each bucket, and last those above all bounds.
        total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None without values."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value that `share` (0 to 1) of all values do not exceed.

        Assumes that values are spread evenly over their bucket, those above all bounds at the last.
        None without values. Raises ValueError for a share outside of 0 .. 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, got {share}")
        count = self.count
        if not count:
            return None
        wanted = share * count
        below = 0
        edges = (0.0, *self.bounds)
        for (low, high), here in zip(pairwise(edges), self.counts, strict=False):
            if here and below + here >= wanted:
                return low + (high - low) * max(0.0, wanted - below) / here
            below += here
        return self.bounds[-1]

    def since(self, earlier: Histogram) -> Histogram:
        """What was added after `earlier`, a state of the same histogram; all if it has restarted.

        Raises ValueError if the buckets differ.
        """
        if earlier.bounds != self.bounds:
            raise ValueError("earlier: it has other buckets")
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        if min(counts) < 0:
            return self
        return Histogram(self.bounds, counts, self.total - earlier.total)

    def plus(self, other: Histogram) -> Histogram:
        """The values of both; a histogram without buckets has none.

        Raises ValueError if both have buckets, and different ones.
        """
        if not (self.bounds and other.bounds):
            return self if self.bounds else other
        if other.bounds != self.bounds:
            raise ValueError("other: it has other buckets")
        counts = tuple(
            ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)
        )
        return Histogram(self.bounds, counts, self.total + other.total)

    def cumulative(self) -> tuple[int, ...]:
        """Values up to each bound, and last all of them, as Prometheus expects."""
        return tuple(accumulate(self.counts))


class Buckets:
    """Counts values into a histogram. O(log buckets) a value."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def snapshot(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.total)
