"""What a server shows of its engine's cache: counters, accounts, prefixes and pins as plain data.

It crosses from the engine's process to the server's, so texts are cut to what is shown of them.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coppice.radix import CacheAccounts, Pin, PrefixNode, SharedPrefix
from coppice.radix.accounting.near_misses import SHOWN_TOKENS
from coppice.runtime.metrics.prompt_accounts import PromptCauses
from coppice.runtime.report.engine_stats import EngineStats, engine_stats

if TYPE_CHECKING:
    from coppice.runtime.engine.core import Engine

TOP_PREFIXES = 10
TOP_NODES = 160


@dataclass(frozen=True, slots=True)
class PinState:
    """A pin as it is now."""

    name: str
    namespace: Hashable
    num_tokens: int
    cached_tokens: int  # of them, kept now; the rest is kept once a request has computed it
    ttl: float | None  # seconds without use after which it ends
    seconds_left: float | None  # of them; None without a TTL


@dataclass(frozen=True, slots=True)
class PrefixEnds:
    """A shared prefix, of which only the first and the last tokens are kept.

    Attributes:
        first, last: up to `SHOWN_TOKENS` tokens of either end; `last` is empty if `first` is all.
        hits, tokens_saved, resident_pages, idle_seconds: as in `SharedPrefix`.
    """

    num_tokens: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    hits: int
    tokens_saved: int
    resident_pages: int
    idle_seconds: float | None


@dataclass(frozen=True, slots=True)
class LiveReport:
    """The state of an engine's cache, but for what is in its tree."""

    stats: EngineStats
    accounts: CacheAccounts
    recent: tuple[PromptCauses, ...]  # of the last requests, oldest first
    eviction_policy: str
    pins: tuple[PinState, ...]


@dataclass(frozen=True, slots=True)
class TreePicture:
    """What the tree holds that saved the most. `seconds` is what it took the engine to look."""

    prefixes: tuple[PrefixEnds, ...]  # that saved the most, most first
    nodes: tuple[PrefixNode, ...]  # the heaviest, parents first
    seconds: float


def live_report(engine: Engine) -> LiveReport:
    """The report as of now: a few milliseconds, whatever the size of the tree."""
    return LiveReport(
        stats=engine_stats(engine),
        accounts=engine.accounts.snapshot(),
        recent=engine.accounts.recent(),
        eviction_policy=engine.config.eviction_policy,
        pins=tuple(pin_state(pin, engine.pins.clock()) for pin in engine.pins),
    )


def tree_picture(engine: Engine) -> TreePicture:
    """The picture as of now. O(n log n) for n nodes that were hit, and their children."""
    begun = time.perf_counter()
    savings = engine.accounts.savings(engine.tree)
    prefixes = tuple(map(_ends, savings.prefixes(TOP_PREFIXES)))
    nodes = savings.nodes(TOP_NODES)
    return TreePicture(prefixes, nodes, time.perf_counter() - begun)


def pin_state(pin: Pin, now: float) -> PinState:
    """A pin as of `now`, by the clock that gives its deadline."""
    left = None if pin.deadline is None else max(0.0, pin.deadline - now)
    return PinState(pin.name, pin.namespace, pin.num_tokens, pin.cached_tokens, pin.ttl, left)


def _ends(prefix: SharedPrefix) -> PrefixEnds:
    ids = prefix.token_ids
    return PrefixEnds(
        len(ids),
        ids[:SHOWN_TOKENS],
        ids[max(SHOWN_TOKENS, len(ids) - SHOWN_TOKENS) :],
        prefix.hits,
        prefix.tokens_saved,
        prefix.resident_pages,
        prefix.idle_seconds,
    )
