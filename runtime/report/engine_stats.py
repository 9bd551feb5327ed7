"""What the engine counts about its requests and steps, for metrics: cumulative, never reset.

A gauge that the next batch overwrites says nothing about the batches between two looks at it. So
everything that happens is counted since the start, and times go into histograms; rates and
quantiles are the reader's differences between two snapshots.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coppice.radix.accounting.counts import Counts
from coppice.runtime.metrics.counters import FINISH_REASONS, REFUSALS
from coppice.runtime.metrics.histogram import Histogram
from coppice.runtime.metrics.pool_use import pool_use

if TYPE_CHECKING:
    from coppice.runtime.engine.core import Engine


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


def _resident_bytes() -> int | None:
    """Memory of this process that is in use, as Linux tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def engine_stats(engine: Engine) -> EngineStats:
    """The engine's counters as of now. Settles the cache's accounts; O(running) besides."""
    engine.pins.refresh()
    counters, pages, graphs = (
        engine.counters,
        pool_use(engine.tree, engine.pins),
        engine.runner.graphs,
    )
    running = len({sequence.request.request_id for sequence in engine.scheduler.running})
    return EngineStats(
        requests_running=running,
        requests_waiting=engine.num_unfinished - running,
        finished={reason: counters.finished[reason] for reason in FINISH_REASONS},
        refused={limit: counters.refused[limit] for limit in REFUSALS},
        queue=counters.queue.snapshot(),
        ttft=counters.ttft.snapshot(),
        itl=counters.itl.snapshot(),
        request=counters.request.snapshot(),
        step=counters.step.snapshot(),
        step_tokens=counters.step_tokens.snapshot(),
        step_sequences=counters.step_sequences.snapshot(),
        failed_steps=counters.failed_steps,
        preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        prefill_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        prefill_seconds=counters.prefill_seconds,
        decode_seconds=counters.decode_seconds,
        counts=engine.accounts.counts(),
        page_size=engine.tree.page_size,
        pages_total=pages.total,
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_pinned=pages.pinned,
        pages_held=pages.held,
        evicted_tokens=counters.evicted_tokens,
        eviction_age=counters.eviction_age.snapshot(),
        rounded_off_tokens=counters.rounded_off_tokens,
        pins=len(engine.pins),
        late_rows=counters.late_rows,
        cuda_graphs=0 if graphs is None else len(graphs.sizes),
        cuda_graph_seconds=0.0 if graphs is None else graphs.seconds,
        cuda_graph_bytes=0 if graphs is None else graphs.bytes,
        decode_steps={} if graphs is None else dict(graphs.steps),
        resident_bytes=_resident_bytes(),
    )
