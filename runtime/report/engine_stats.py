"""What the engine counts about its requests and steps, for metrics: cumulative, never reset.

A gauge that the next batch overwrites says nothing about the batches between two looks at it. So
everything that happens is counted since the start, and times go into histograms; rates and
quantiles are the reader's differences between two snapshots.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coppice.radix.accounting.counts import Counts
from coppice.runtime.engine.histogram import COUNTS, LONG_SECONDS, SHORT_SECONDS, Buckets, Histogram

if TYPE_CHECKING:
    from coppice.runtime.engine.core import Engine
    from coppice.runtime.requests.request import Sequence
    from coppice.runtime.schedule.scheduler import Schedule

FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("max_queued_requests", "max_queued_tokens")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters, plain data that can be pickled. Times are in seconds.

    Attributes:
        requests_running, requests_waiting: now; one of which any sequence runs is running.
        finished: requests by the reason their last sequence ended for.
        refused: requests by the limit of the queue that was full.
        queue: from arrival to the step with a request's first chunk.
        ttft: from arrival to the first token; searches, which have none before their end, are out.
        itl: between tokens of a sequence, preemptions included.
        request: from arrival to the end, aborted ones included.
        step, step_tokens, step_sequences: of each step that ran.
        counts: prompt tokens by hit and cause.
        evicted_tokens: that had to make room.
        eviction_age: how long each of them had been unused; those of a step count as its last one.
        rounded_off_tokens: that were cached behind a hit, went on as the prompt does, and were
            computed all the same. The tree matches token by token, so this must stay 0.
        cuda_graphs: how many were captured at start, which took cuda_graph_seconds and memory.
        late_rows: decoded for sequences that had ended, as was known only then (async_scheduling).
        decode_steps: those of an engine with graphs, by how they ran: one of `DECODE_STEPS`.
    """

    requests_running: int
    requests_waiting: int
    finished: dict[str, int]
    refused: dict[str, int]
    queue: Histogram
    ttft: Histogram
    itl: Histogram
    request: Histogram
    step: Histogram
    step_tokens: Histogram
    step_sequences: Histogram
    failed_steps: int
    preemptions: int
    prompt_tokens: int
    prefill_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    counts: Counts
    page_size: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_pinned: int
    pages_held: int
    evicted_tokens: int
    eviction_age: Histogram
    rounded_off_tokens: int
    pins: int
    late_rows: int
    cuda_graphs: int
    cuda_graph_seconds: float
    cuda_graph_bytes: int
    decode_steps: dict[str, int]
    resident_bytes: int | None  # of the process's memory; None where the system does not tell


class StatsRecorder:
    """Counts as things happen. `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrivals: dict[str, float] = {}  # of the unfinished requests
        self.finished: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.queue = Buckets(LONG_SECONDS)
        self.ttft = Buckets(LONG_SECONDS)
        self.itl = Buckets(SHORT_SECONDS)
        self.request = Buckets(LONG_SECONDS)
        self.step = Buckets(SHORT_SECONDS)
        self.step_tokens = Buckets(COUNTS)
        self.step_sequences = Buckets(COUNTS)

    def arrived(self, request_id: str) -> None:
        self._arrivals[request_id] = self._clock()

    def scheduled(self, request_id: str, seconds: float) -> None:
        """The first chunk of a request was in a step that took so long and has just ended."""
        self.queue.add(max(0.0, self._clock() - seconds - self._arrivals[request_id]))

    def stepped(self, schedule: Schedule, seconds: float) -> None:
        """A step ran."""
        self.step.add(seconds)
        self.step_tokens.add(schedule.rows())
        self.step_sequences.add(len(schedule.chunks))

    def sampled(self, sequences: Iterable[Sequence]) -> None:
        """Each of these got a token.

        O(sequences). Most got their last ones in the same step, so there are few times to count.
        """
        now = self._clock()
        gaps: dict[float, int] = {}
        for sequence in sequences:
            last, sequence.token_at = sequence.token_at, now
            if last:
                gaps[last] = gaps.get(last, 0) + 1
            elif not sequence.index:
                self.ttft.add(now - self._arrivals[sequence.request.request_id])
        for last, times in gaps.items():
            self.itl.add(now - last, times)

    def ended(self, request_id: str, reason: str) -> None:
        """The last sequence of a request has ended."""
        self.request.add(self._clock() - self._arrivals.pop(request_id))
        self.finished[reason] += 1


def _resident_bytes() -> int | None:
    """Memory of this process that is in use, as Linux tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def engine_stats(engine: Engine) -> EngineStats:
    """The engine's counters as of now. Settles the cache's accounts; O(running) besides."""
    recorder, counters, tree, pins = engine.recorder, engine.counters, engine.tree, engine.pins
    accounts, scheduler, graphs = engine.accounts, engine.scheduler, engine.runner.graphs
    free, cached, pinned = tree.pool.free_pages, tree.evictable_pages, pins.locked_pages()
    running = len({sequence.request.request_id for sequence in scheduler.running})
    return EngineStats(
        requests_running=running,
        requests_waiting=engine.num_unfinished - running,
        finished={reason: recorder.finished[reason] for reason in FINISH_REASONS},
        refused={limit: recorder.refused[limit] for limit in REFUSALS},
        queue=recorder.queue.snapshot(),
        ttft=recorder.ttft.snapshot(),
        itl=recorder.itl.snapshot(),
        request=recorder.request.snapshot(),
        step=recorder.step.snapshot(),
        step_tokens=recorder.step_tokens.snapshot(),
        step_sequences=recorder.step_sequences.snapshot(),
        failed_steps=counters.failed_steps,
        preemptions=scheduler.preemptions,
        prompt_tokens=counters.prompt_tokens,
        prefill_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        prefill_seconds=counters.prefill_seconds,
        decode_seconds=counters.decode_seconds,
        counts=accounts.counts(),
        page_size=tree.page_size,
        pages_total=engine.num_pages,
        pages_free=free,
        pages_cached=cached,
        pages_pinned=pinned,
        pages_held=engine.num_pages - free - cached - pinned,
        evicted_tokens=tree.evicted_tokens,
        eviction_age=accounts.eviction_ages.snapshot(),
        rounded_off_tokens=accounts.rounded_off_tokens,
        pins=len(pins),
        late_rows=counters.late_rows,
        cuda_graphs=0 if graphs is None else len(graphs.sizes),
        cuda_graph_seconds=0.0 if graphs is None else graphs.seconds,
        cuda_graph_bytes=0 if graphs is None else graphs.bytes,
        decode_steps={} if graphs is None else dict(graphs.steps),
        resident_bytes=_resident_bytes(),
    )
