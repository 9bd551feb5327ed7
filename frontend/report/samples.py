"""The history of a server's engine: samples of its counts at three intervals."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coppice.runtime.report.snapshot import CAUSES, EngineStats, Histogram

SAMPLE_SECONDS = 5.0

SPANS = {"ten_minutes": (1, 121), "hour": (6, 121), "day": (120, 145)}
"""For each span: n, of which every n-th sample is kept, and the most samples that are kept."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LATENCIES = ("queue", "ttft", "itl", "request")

_COUNTED = ("requests", "prompt_tokens", "hit_tokens", "ideal_tokens", *CAUSES)
_COLUMNS = (
    "at", "seconds", *_COUNTED, "generated_tokens", "requests_running", "requests_waiting",
    "ttft_p50", "ttft_p99", "itl_p50", "itl_p99",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine's counts at a time, in seconds since the epoch."""

    at: float
    stats: EngineStats


class History:
    """Keeps samples, added every `SAMPLE_SECONDS`, in memory that does not grow.

    A restarted engine counts from 0, so all that it has counted came after the last sample.
    """

    def __init__(self) -> None:
        self._spans = {name: deque[Sample](maxlen=most) for name, (_, most) in SPANS.items()}
        self._count = 0

    def add(self, sample: Sample) -> None:
        for name, (every, _) in SPANS.items():
            if self._count % every == 0:
                self._spans[name].append(sample)
        self._count += 1

    def over_time(self, span: str, now: Sample) -> dict[str, list[Any]]:
        """What happened between each two samples of a span, and up to now, as columns of a table.

        A row is a stretch of time: `at` is its end in seconds since the epoch, `seconds` its
        length. Counts are those of the stretch, `requests_running` and `requests_waiting` those at
        its end; latencies are quantiles in seconds, None without a value. An engine with tiers has
        a column `loaded_<tier>` for each: the hit tokens that came from it. The last stretch is at
        least half as long as the others: in a very short one a few requests would look like a peak.
        """
        samples: list[Sample] = list(self._spans[span])
        if len(samples) > 1 and now.at - samples[-1].at < SAMPLE_SECONDS * SPANS[span][0] / 2:
            samples.pop()
        samples.append(now)
        tiers = now.stats.tiers
        loaded = [] if tiers is None else [f"loaded_{each.name}" for each in tiers.stores]
        pairs = [pair for pair in pairwise(samples) if pair[1].at > pair[0].at]
        rows = [_stretch(*pair, (*_COUNTED, *loaded)) for pair in pairs]
        return {name: [row[name] for row in rows] for name in (*_COLUMNS, *loaded)}

    def latencies(self, now: Sample) -> dict[str, dict[str, Any]]:
        """For each latency, its quantiles over the last ten minutes and since the start."""
        recent = self._spans["ten_minutes"]
        found = {}
        for name in LATENCIES:
            histogram: Histogram = getattr(now.stats, name)
            before = getattr(recent[0].stats, name) if recent else None
            last = histogram if before is None else histogram.since(before)
            found[name] = {
                "last_ten_minutes": _quantiles(last),
                "since_start": _quantiles(histogram),
            }
        return found


def _quantiles(histogram: Histogram) -> dict[str, Any]:
    shares = {name: histogram.quantile(share) for name, share in QUANTILES.items()}
    return {"count": histogram.count, "mean": histogram.mean, **shares}


def _stretch(before: Sample, after: Sample, counted: Iterable[str]) -> dict[str, Any]:
    """A row; `counted` are the fields of `Counts` that it has."""
    first, last = before.stats, after.stats
    anew = last.step.count < first.step.count or last.counts.requests < first.counts.requests
    row: dict[str, Any] = {"at": round(after.at, 1), "seconds": round(after.at - before.at, 1)}
    for name in counted:
        count = getattr(last.counts, name)
        row[name] = count if anew else count - getattr(first.counts, name)
    row["generated_tokens"] = last.generated_tokens - (0 if anew else first.generated_tokens)
    row["requests_running"] = last.requests_running
    row["requests_waiting"] = last.requests_waiting
    for name in ("ttft", "itl"):
        histogram: Histogram = getattr(last, name)
        between = histogram if anew else histogram.since(getattr(first, name))
        for quantile in ("p50", "p99"):
            row[f"{name}_{quantile}"] = between.quantile(QUANTILES[quantile])
    return row
