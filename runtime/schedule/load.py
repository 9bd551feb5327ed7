"""Measures how busy an engine is, and how fast it works."""

from __future__ import annotations

from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.schedule.scheduler import Scheduler

# Of an older measurement, when a new one comes.
_KEPT = 0.7


class LoadMeter:
    """Measures the load of one engine."""

    def __init__(self, scheduler: Scheduler, counters: EngineCounters) -> None:
        self._scheduler, self._counters = scheduler, counters
        self._seen = (0, 0.0, 0, 0.0)
        self._prefill = self._decode = 0.0

    def measure(self) -> Load:
        """The load as of now. O(sequences that wait or run)."""
        counters, waiting = self._counters, list(self._scheduler.waiting)
        running = self._scheduler.running
        now = (
            counters.computed_tokens, counters.prefill_seconds,
            counters.steps, counters.decode_seconds,
        )  # fmt: skip
        tokens, prefill, steps, decode = (a - b for a, b in zip(now, self._seen, strict=True))
        if tokens and prefill > 0:
            self._prefill = _mixed(self._prefill, tokens / prefill)
        if steps and decode > 0:
            self._decode = _mixed(self._decode, decode / steps)
        self._seen = now
        return Load(
            len(waiting),
            sum(len(each.tokens) for each in waiting),
            len(running),
            sum(max(0, len(each.tokens) - each.computed) for each in running),
            self._prefill,
            self._decode,
        )


def _mixed(before: float, now: float) -> float:
    return now if not before else _KEPT * before + (1 - _KEPT) * now
