"""What the engine tells about its cache: counts, the pool now, the top prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coppice.radix import CacheAccounts, PinRefused, PrefixNode, SharedPrefix
from coppice.radix.accounting.counts import CAUSES, Counts, Windows
from coppice.radix.accounting.near_misses import NearMiss
from coppice.runtime.metrics.pool_use import pool_use
from coppice.runtime.metrics.prompt_accounts import PromptCauses

if TYPE_CHECKING:
    from coppice.runtime.engine.core import Engine

# What the front needs to show a report comes from here: it may not reach into the tree's room.
__all__ = [
    "CAUSES",
    "CacheAccounts",
    "CacheReport",
    "Counts",
    "NearMiss",
    "PinRefused",
    "PrefixNode",
    "PromptCauses",
    "SharedPrefix",
    "Windows",
    "make_report",
]

TOP_PREFIXES = 8


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The prefix-hit report: numbers and top shared prefixes."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    evicted_tokens: int
    eviction_policy: str
    prefill_seconds: float
    decode_seconds: float
    page_size: int
    pages_total: int
    pages_free: int
    pages_cached: int  # held by nothing but the cache: evicted when pages are needed
    pages_pinned: int  # held by nothing but pins
    pages_held: int  # held by running sequences
    top_prefixes: tuple[SharedPrefix, ...]
    accounts: CacheAccounts  # why tokens missed, and what another size of cache would do
    recent: tuple[PromptCauses, ...] = ()  # the same of the last requests one by one, oldest first

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def time_saved_seconds(self) -> float:
        """An estimate: hit tokens times the measured seconds a computed prefill token took."""
        if not self.computed_tokens:
            return 0.0
        return self.hit_tokens * self.prefill_seconds / self.computed_tokens


def make_report(engine: Engine) -> CacheReport:
    """The report as of now. O(nodes of the tree)."""
    engine.pins.refresh()
    counters, tree, accounts = engine.counters, engine.tree, engine.accounts
    pages = pool_use(tree, engine.pins)
    return CacheReport(
        requests=counters.requests,
        prompt_tokens=counters.prompt_tokens,
        hit_tokens=counters.hit_tokens,
        computed_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=counters.preemptions,
        evicted_tokens=counters.evicted_tokens,
        eviction_policy=engine.config.eviction_policy,
        prefill_seconds=counters.prefill_seconds,
        decode_seconds=counters.decode_seconds,
        page_size=tree.page_size,
        pages_total=pages.total,
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_pinned=pages.pinned,
        pages_held=pages.held,
        top_prefixes=accounts.savings(tree).prefixes(TOP_PREFIXES),
        accounts=accounts.snapshot(),
        recent=accounts.recent(),
    )
