"""Makes one snapshot of those of several replicas, each an engine with its own tree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any, TypeVar

from coppice.radix.accounting.counts import Counts
from coppice.radix.accounting.merged import merged_accounts, merged_nodes, merged_prefixes
from coppice.runtime.metrics.adapter_counts import AdapterReport
from coppice.runtime.metrics.histogram import Histogram
from coppice.runtime.metrics.prompt_accounts import RECENT_REQUESTS
from coppice.runtime.metrics.window_keys import WindowReport
from coppice.runtime.report.snapshot import (
    TOP_NODES,
    TOP_PREFIXES,
    CacheReport,
    EngineStats,
    PinState,
    ReplicaReport,
    TiersReport,
    TreeReport,
)

_Stats = TypeVar("_Stats", bound=EngineStats)

_PAGES = ("pages_total", "pages_free", "pages_cached", "pages_pinned", "pages_held")
# Those that say how an engine is now, not what it has done since its start.
_NOW = (*_PAGES, "requests_running", "requests_waiting", "cuda_graphs", "cuda_graph_seconds",
        "cuda_graph_bytes")  # fmt: skip
_NO_SUMS = ("page_size", "num_pins", "resident_bytes", "adapters", "tiers", "replicas")


def merged_stats(parts: Mapping[str, EngineStats], left: Sequence[EngineStats] = ()) -> EngineStats:
    """The counts of several replicas together. O(replicas).

    Counts, histograms and pages are sums; `resident_bytes` too, if all replicas know theirs. A pin
    is on every replica, and counts once. Where the sizes of the replicas' pages differ, as while an
    update changes them, each page counts as several of the greatest size that divides all.

    Args:
        parts: the replicas that there are, by name; each gets a `ReplicaReport`.
        left: the last counts of those that are gone, which are added so that no count falls. What
            they had at the end, such as pages and running requests, is not. Several of them may be
            merged before, without parts.

    Raises ValueError if there are neither.
    """
    return EngineStats(**_stats(parts, left))


def merged_report(
    parts: Mapping[str, CacheReport], left: Sequence[EngineStats] = ()
) -> CacheReport:
    """The report of several replicas together. O(n log n) for n entries of all reports.

    The last requests are those of all replicas. Prefixes and nodes of the same tokens are one, with
    their savings added; see `merged_accounts` for causes and curve. A pin is on every replica: it
    is listed once, with the most tokens that a replica keeps of it and the longest time left.

    Args:
        parts: the replicas that there are, by name, at least one.
        left: as in `merged_stats`; their counts join those since the start.

    Raises ValueError if there is no replica, and if the replicas differ in the model's windows.
    """
    if not parts:
        raise ValueError("parts: at least one replica is needed, got none")
    parts = _with_equal_pages(parts)
    reports = [parts[name] for name in sorted(parts)]
    gone = sum((each.counts for each in left), Counts())
    recent = [each for report in reports for each in report.recent]
    recent.sort(key=lambda each: -each.seconds_ago)
    pins = merged_pins(pin for report in reports for pin in report.pins)
    trees = [report.tree for report in reports if report.tree is not None]
    return CacheReport(
        **_stats(parts, left) | {"num_pins": len(pins)},
        eviction_policy=" and ".join(sorted({each.eviction_policy for each in reports})),
        accounts=merged_accounts([report.accounts for report in reports], gone),
        recent=tuple(recent[-RECENT_REQUESTS:]),
        pins=pins,
        windows=_windows([each.windows for each in reports if each.windows is not None]),
        tree=_tree(trees) if trees else None,
    )


def _stats(parts: Mapping[str, EngineStats], left: Sequence[EngineStats]) -> dict[str, Any]:
    """The fields of the merged `EngineStats`."""
    parts = _with_equal_pages(parts)
    names = sorted(parts)
    present = [parts[name] for name in names]
    everyone = [*present, *left]
    if not everyone:
        raise ValueError("parts: at least one replica is needed, got none")
    sums = [each.name for each in fields(EngineStats) if each.name not in _NO_SUMS]
    merged = {
        name: _sum([getattr(each, name) for each in (present if name in _NOW else everyone)])
        for name in sums
    }
    tiers = [each.tiers for each in present if each.tiers is not None]
    tiers += [each.tiers.ended() for each in left if each.tiers is not None]
    known = [each.resident_bytes for each in present if each.resident_bytes is not None]
    return merged | {
        "page_size": (present or left)[0].page_size,
        "num_pins": max((each.num_pins for each in present), default=0),
        "resident_bytes": sum(known) if known and len(known) == len(present) else None,
        "adapters": _adapters(present, left),
        "tiers": reduce(TiersReport.plus, tiers) if tiers else None,
        "replicas": tuple(_replica(name, parts[name]) for name in names),
    }


def _with_equal_pages(parts: Mapping[str, _Stats]) -> dict[str, _Stats]:
    """The same, with pages of one size."""
    size = math.gcd(*(each.page_size for each in parts.values()))
    return {name: _in_pages_of(size, each) for name, each in parts.items()}


def _in_pages_of(size: int, stats: _Stats) -> _Stats:
    """The same, counted in pages of `size` tokens, which divides the size of its own."""
    times = stats.page_size // size
    if times == 1:
        return stats
    changed: dict[str, Any] = {name: getattr(stats, name) * times for name in _PAGES}
    if isinstance(stats, CacheReport) and stats.windows is not None:
        changed["windows"] = replace(stats.windows, pages_old=stats.windows.pages_old * times)
    if isinstance(stats, CacheReport) and stats.tree is not None:
        prefixes = tuple(
            replace(each, resident_pages=each.resident_pages * times)
            for each in stats.tree.prefixes
        )
        changed["tree"] = replace(stats.tree, prefixes=prefixes)
    return replace(stats, page_size=size, **changed)


def _replica(name: str, stats: EngineStats) -> ReplicaReport:
    own: dict[str, Any] = {"name": name, "other_replica": stats.counts.other_replica}
    shared = (each.name for each in fields(ReplicaReport) if each.name not in own)
    return ReplicaReport(**own, **{field: getattr(stats, field) for field in shared})


def _same(name: str, values: Sequence[Any]) -> Any:
    """The one value that all have."""
    if any(value != values[0] for value in values):
        found = ", ".join(sorted({str(value) for value in values}))
        raise ValueError(f"parts: all replicas must have the same {name}, got {found}")
    return values[0]


def _sum(values: Sequence[Any]) -> Any:
    """Numbers, counts, histograms, or numbers by name, added."""
    first = values[0] if values else 0
    if isinstance(first, Histogram):
        return reduce(Histogram.plus, values)
    if isinstance(first, dict):
        added: Counter[str] = Counter()
        for value in values:
            added.update(value)  # keys with 0 stay
        return dict(added)
    return sum(values, Counts()) if isinstance(first, Counts) else sum(values)


def _adapters(
    present: Sequence[EngineStats], left: Sequence[EngineStats]
) -> tuple[AdapterReport, ...]:
    """Those that a replica has loaded, by identity, with the counts of all that had them.

    Where no replica is left, all that they had.
    """
    found: dict[str, AdapterReport] = {}
    for number, stats in enumerate((*present, *left)):
        for each in stats.adapters:
            other = found.get(each.identity)
            if other is None:
                if number < len(present) or not present:
                    found[each.identity] = each
                continue
            found[each.identity] = replace(
                other,
                unloading=other.unloading and (each.unloading or number >= len(present)),
                requests=other.requests + each.requests,
                prompt_tokens=other.prompt_tokens + each.prompt_tokens,
                hit_tokens=other.hit_tokens + each.hit_tokens,
                base_tokens=other.base_tokens + each.base_tokens,
                base_hit_tokens=other.base_hit_tokens + each.base_hit_tokens,
            )
    return tuple(found.values())


def merged_pins(pins: Iterable[PinState]) -> tuple[PinState, ...]:
    """Each pin of several replicas once: the most tokens that one keeps, the longest time left."""
    found: dict[str, PinState] = {}
    for pin in pins:
        if (other := found.get(pin.name)) is not None:
            pin = replace(
                other,
                cached_tokens=max(pin.cached_tokens, other.cached_tokens),
                ttl=_longest(pin.ttl, other.ttl),  # one that joined has what was left of it then
                seconds_left=_longest(pin.seconds_left, other.seconds_left),
            )
        found[pin.name] = pin
    return tuple(found.values())


def _longest(one: float | None, other: float | None) -> float | None:
    """Of two times, None if one of them has no end."""
    return None if one is None or other is None else max(one, other)


def _windows(reports: Sequence[WindowReport]) -> WindowReport | None:
    if not reports:
        return None
    layers, windows = _same("windows", [(each.layers, each.windows) for each in reports])
    added = ("keys_read", "keys_skipped", "bytes_skipped", "pages_old", "bytes_old")
    sums = {name: sum(getattr(each, name) for each in reports) for name in added}
    return WindowReport(layers=layers, windows=windows, **sums)


def _tree(trees: Sequence[TreeReport]) -> TreeReport:
    """The prefixes and nodes of all trees; engines search theirs at the same time."""
    return TreeReport(
        merged_prefixes([tree.prefixes for tree in trees], TOP_PREFIXES),
        merged_nodes([tree.nodes for tree in trees], TOP_NODES),
        max(tree.seconds for tree in trees),
    )
