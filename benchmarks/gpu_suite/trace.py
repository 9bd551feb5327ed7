"""How busy a GPU was, from the trace that torch's profiler writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: Categories of events on a GPU, and of those that stand in for them without one.
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op",)
#: Kernels whose times a row has.
NAMED = 12


@dataclass(frozen=True, slots=True)
class Busy:
    """A stretch in which `pieces` kernels ran; times in microseconds."""

    pieces: int
    busy: float
    span: float
    gaps: tuple[float, ...]

    @property
    def median_gap(self) -> float:
        return statistics.median(self.gaps) if self.gaps else 0.0


def busy(trace: Path, categories: Iterable[str]) -> Busy:
    """Reads a Chrome trace. Raises ValueError if it has no event of these categories."""
    wanted = set(categories)
    events = json.loads(trace.read_text())["traceEvents"]
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") in wanted]
    return of_intervals([(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in found])


def longest(trace: Path, categories: Iterable[str], most: int) -> list[tuple[str, int, float]]:
    """The names of the work that takes most time, how often it ran, and its microseconds."""
    wanted = set(categories)
    found: dict[str, list[float]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in wanted:
            found.setdefault(event["name"][:80], []).append(float(event["dur"]))
    ordered = sorted(found.items(), key=lambda each: -sum(each[1]))
    return [(name, len(times), sum(times)) for name, times in ordered[:most]]


def a_step(kernels: Iterable[tuple[str, int, float]], steps: int) -> list[tuple[str, float, float]]:
    """What `longest` gives, with launches and microseconds a step."""
    return [(name, round(n / steps, 1), round(us / steps, 1)) for name, n, us in kernels]


def of_intervals(intervals: list[tuple[float, float]]) -> Busy:
    """From (begin, end) in microseconds, which may overlap, in any order."""
    if not intervals:
        raise ValueError("trace: it holds no work of the device")
    ordered = sorted(intervals)
    first, end = ordered[0]
    total, gaps = end - first, []
    for begin, stop in ordered[1:]:
        if begin > end:
            gaps.append(begin - end)
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return Busy(len(intervals), total, end - first, tuple(gaps))
