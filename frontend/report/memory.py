"""What other sizes of the cache would hit: one curve, and all that is said of it.

Table, chart, sentence and advice take their figures from `Memory`, so none contradicts another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from coppice.runtime.report.snapshot import CacheReport, CurvePoint

_GAIN = 0.01  # of hit rate, from which more memory is advised


@dataclass(frozen=True, slots=True)
class Memory:
    """The hit rate by size of the cache.

    Attributes:
        policy: the pool's eviction policy; the curve is LRU's.
        hit_rate: that was achieved since the start, by the pool alone.
        evicted: whether anything was evicted.
        span: of the figures, as words that follow "the hit rate"; "" where there is but one span.
        points: the curve, empty before the first prompt; it never falls.
        here: the index of the point with the pool's own size.
        measured: whether LRU's hit rate at that size is known; the curve then passes through it.
        tiers: whether tiers beyond the pool brought more, which the figures leave out.
    """

    policy: str
    hit_rate: float
    evicted: bool
    span: str
    points: tuple[CurvePoint, ...]
    here: int
    measured: bool
    tiers: bool = False

    @property
    def _whose(self) -> str:
        if self.policy != "lru":
            return "the hit rate of lru"
        return "the hit rate without tiers" if self.tiers else "your hit rate"

    def rate(self, times: float = 1.0) -> float | None:
        """LRU's hit rate with `times` the pool's memory; None if the curve does not reach it."""
        if not self.points:
            return None
        wanted = self.points[self.here].factor * times
        for point in self.points:
            if math.isclose(point.factor, wanted, rel_tol=1e-6):
                return point.hit_rate
        return None

    @property
    def sentence(self) -> str:
        """What twice the memory would bring; "" before there is a curve."""
        now, more = self.rate(), self.rate(2.0)
        if now is None:
            return ""
        if not self.evicted:
            return "Nothing was evicted, so more memory would not raise the hit rate."
        if more is None:
            return ""
        whose, end = self._whose, "."
        if self.policy != "lru":
            end = f": the curve is that of lru, not of {self.policy}."
        if f"{more:.1%}" == f"{now:.1%}":
            return f"With twice the memory {whose}{self.span} would still be {now:.1%}{end}"
        return f"With twice the memory {whose}{self.span} would be {more:.1%}, not {now:.1%}{end}"

    @property
    def note(self) -> str:
        """How the curve was made, and where the achieved hit rate lies; "" without a curve."""
        now = self.rate()
        if now is None:
            return ""
        if self.measured and (self.policy == "lru" or not self.evicted):
            return (
                f"The curve is an estimate for lru, moved so that it passes through the "
                f"{self.hit_rate:.1%} that {'the pool alone' if self.tiers else 'were'} achieved."
            )
        side = "at"
        if f"{now:.1%}" != f"{self.hit_rate:.1%}":
            side = "above" if self.hit_rate > now else "below"
        how = "moved so that it passes through what lru hits" if self.measured else "not measured"
        return (
            f"The curve is an estimate for lru, {how}. {self.policy} achieved "
            f"{self.hit_rate:.1%}, {side} the {now:.1%} of the curve at this size."
        )

    def advice(self) -> tuple[str, str]:
        """A title, and what more memory would bring to tokens that were evicted."""
        now, twice = self.rate(), self.rate(2.0)
        if now is None or twice is None:
            return "The cache was too small for what came back", "Give it more memory."
        if twice - now >= _GAIN:
            return "Give the cache more memory", self.sentence
        whose = self._whose
        for point in self.points[self.here :]:
            times = point.factor / self.points[self.here].factor
            if times > 2 and point.hit_rate - now >= _GAIN:
                return (
                    "Much more memory would help, a little would not",
                    f"It takes {times:.3g} times the memory to raise {whose}{self.span} "
                    f"to {point.hit_rate:.1%}, from {now:.1%}.",
                )
        last = self.points[-1]
        return (
            "More memory would hardly help",
            f"Even with {last.factor / self.points[self.here].factor:.3g} times the memory "
            f"{whose}{self.span} would be {last.hit_rate:.1%}, not {now:.1%}.",
        )


def memory(report: CacheReport, *, span: str = "", lru_rate: float | None = None) -> Memory:
    """The curve of a report.

    The curve of the accounts is sampled, so at the pool's size it misses the hit rate that LRU has
    there by a fraction of a percent. Where that rate is known, the curve is moved to pass through
    it: in proportion, so that no memory still hits nothing, and an unlimited one the ideal.

    Args:
        report: the snapshot.
        span: see `Memory`.
        lru_rate: what LRU hits with this pool, if the policy is another and that was measured.
    """
    counts, points = report.accounts.overall.since_start, report.accounts.curve
    evicted = report.evicted_tokens > 0
    # Without evictions all policies hit the same, and larger pools hit no more.
    # What tiers brought back, the pool would have missed.
    own = counts.hit_tokens - counts.loaded_tokens
    achieved = own / counts.prompt_tokens if counts.prompt_tokens else 0.0
    known = achieved if report.eviction_policy == "lru" or not evicted else lru_rate
    pool = max(1, report.pages_total * report.page_size)
    here = 0
    if points:
        distances = [abs(math.log(max(1, point.pool_tokens) / pool)) for point in points]
        here = distances.index(min(distances))
    if points and known is not None:
        ideal = max(known, counts.ideal_hit_rate)
        estimated = points[here].hit_rate
        moved = [
            known
            if number == here or (number > here and not evicted)
            else _moved(point.hit_rate, estimated, known, ideal)
            for number, point in enumerate(points)
        ]
        points = tuple(
            replace(point, hit_rate=rate) for point, rate in zip(points, moved, strict=True)
        )
    return Memory(
        report.eviction_policy,
        achieved,
        evicted,
        span,
        points,
        here,
        known is not None,
        counts.loaded_tokens > 0,
    )


def _moved(rate: float, estimated: float, known: float, ideal: float) -> float:
    """Maps 0 to 0, `estimated` to `known` and `ideal` to `ideal`, and what is between, linearly."""
    if rate <= estimated:
        return known * rate / estimated if estimated > 0 else 0.0
    if estimated >= ideal:
        return known
    return known + (min(rate, ideal) - estimated) * (ideal - known) / (ideal - estimated)
