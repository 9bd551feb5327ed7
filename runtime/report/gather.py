"""Makes the snapshots of an engine; the engine itself does not import them."""

from __future__ import annotations

import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from coppice.radix import Pin, Pins, RadixTree
from coppice.runtime.engine.core import Engine
from coppice.runtime.metrics.counters import FINISH_REASONS, REFUSALS, EngineCounters
from coppice.runtime.metrics.histogram import Buckets
from coppice.runtime.metrics.prompt_accounts import PromptAccounts
from coppice.runtime.report.snapshot import (
    TOP_NODES,
    TOP_PREFIXES,
    CacheReport,
    EngineStats,
    PinState,
    TreeReport,
)

_FIELDS = tuple(each.name for each in fields(EngineStats))


def make_stats(engine: Engine) -> EngineStats:
    """The counts as of now. Settles the cache's accounts; O(running sequences) besides."""
    engine.pins.refresh()
    return EngineStats(**_stats(engine))


def make_report(engine: Engine, *, tree: bool = True) -> CacheReport:
    """The report as of now: a few milliseconds, and with `tree` O(n log n) for n nodes hit."""
    engine.pins.refresh()
    keys = engine.runner.window_keys
    return CacheReport(
        **_stats(engine),
        eviction_policy=engine.config.eviction_policy,
        accounts=engine.accounts.snapshot(),
        recent=engine.accounts.recent(),
        pins=tuple(pin_state(pin, engine.pins.clock()) for pin in engine.pins),
        windows=None if keys is None else keys.report(engine.scheduler.running, engine.num_pages),
        tree=tree_report(engine.accounts, engine.tree) if tree else None,
    )


def tree_report(accounts: PromptAccounts, tree: RadixTree, nodes: int = TOP_NODES) -> TreeReport:
    """The prefixes and up to `nodes` nodes that saved most. O(n log n) for n nodes hit."""
    begun = time.perf_counter()
    savings = accounts.savings(tree)
    prefixes, shown = savings.prefixes(TOP_PREFIXES), savings.nodes(nodes)
    return TreeReport(prefixes, shown, time.perf_counter() - begun)


def pin_state(pin: Pin, now: float) -> PinState:
    """A pin as of `now`, by the clock that gives its deadline."""
    left = None if pin.deadline is None else max(0.0, pin.deadline - now)
    return PinState(pin.name, pin.namespace, pin.num_tokens, pin.cached_tokens, pin.ttl, left)


def counted(
    counters: EngineCounters, accounts: PromptAccounts, tree: RadixTree, pins: Pins | None = None
) -> dict[str, Any]:
    """Those fields of `EngineStats` that need no model: a replay has them, too.

    O(nodes on the paths of pins). Settles the cache's accounts.
    """
    values = vars(counters)
    total, free, cached = tree.pool.num_pages, tree.pool.free_pages, tree.evictable_pages
    pinned = 0 if pins is None else pins.locked_pages()
    return {name: _plain(values[name]) for name in _FIELDS if name in values} | {
        "counts": accounts.counts(),
        "finished": {reason: counters.finished[reason] for reason in FINISH_REASONS},
        "refused": {limit: counters.refused[limit] for limit in REFUSALS},
        "page_size": tree.page_size,
        "pages_total": total,
        "pages_free": free,
        "pages_cached": cached,
        "pages_pinned": pinned,
        "pages_held": total - free - cached - pinned,
    }


def _stats(engine: Engine) -> dict[str, Any]:
    running = len({sequence.request.request_id for sequence in engine.scheduler.running})
    graphs = engine.runner.graphs
    stats = counted(engine.counters, engine.accounts, engine.tree, engine.pins) | {
        "num_pins": len(engine.pins),
        "requests_running": running,
        "requests_waiting": engine.num_unfinished - running,
        "resident_bytes": _resident_bytes(),
        "adapters": engine.adapters.report(),
    }
    if (keys := engine.runner.window_keys) is not None:
        stats["window_keys"] = {"read": keys.read, "skipped": keys.skipped}
    if engine.tiers is not None:
        stats["tiers"] = engine.tiers.report()
    if engine.drafts is not None:
        told = engine.drafts.counts
        stats |= {
            "drafted_tokens": {name: each.drafted for name, each in told.sources.items()},
            "accepted_tokens": {name: each.accepted for name, each in told.sources.items()},
            "draft_seconds_saved": {
                name: each.seconds_saved for name, each in told.sources.items()
            },
            "draft_rows": told.rows,
        }
    if engine.drafting.model is not None:
        own = engine.drafting.model.counts
        stats |= {
            "draft_model_tokens": {"hit": own.hit_tokens, "computed": own.computed_tokens},
            "draft_model_seconds": own.seconds,
        }
    if graphs is not None:
        stats |= {
            "cuda_graphs": len(graphs.sizes),
            "cuda_graph_seconds": graphs.seconds,
            "cuda_graph_bytes": graphs.bytes,
            "decode_steps": dict(graphs.steps),
            "mixed_steps": dict(graphs.mixed),
        }
    return stats


def _plain(value: Any) -> Any:
    return value.snapshot() if isinstance(value, Buckets) else value


def _resident_bytes() -> int | None:
    """Memory of this process that is in use, as Linux reports it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
