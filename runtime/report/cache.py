"""What the engine tells about its cache: counts, the pool now, the top prefixes."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.radix import CacheAccounts, PinRefused, Pins, PrefixNode, SharedPrefix
from coppice.radix.accounting.counts import CAUSES, Counts, Windows
from coppice.radix.accounting.near_misses import NearMiss
from coppice.runtime.schedule.accounts import PromptAccounts, PromptCauses
from coppice.runtime.schedule.scheduler import Schedule, Scheduler

# What the front needs to show a report comes from here: it may not reach into the tree's room.
__all__ = [
    "CAUSES",
    "CacheAccounts",
    "CacheReport",
    "Counters",
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


@dataclass(slots=True)
class Counters:
    """Counted since the engine's start."""

    requests: int = 0  # admitted at least once
    prompt_tokens: int = 0  # of those requests
    hit_tokens: int = 0  # prompt tokens whose KV was reused, at a request's first admission
    computed_tokens: int = 0  # tokens of prefill chunks, resumptions included
    generated_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    prefill_seconds: float = 0.0  # of step time, by each step's share of rows
    decode_seconds: float = 0.0
    late_rows: int = 0  # rows of sequences that had ended, as was known after they were computed

    def ran(self, schedule: Schedule) -> list[str]:
        """Books a step that ran; returns the requests whose first chunk was in it."""
        self.steps += 1
        first = []
        for chunk in schedule.prefills():  # who decodes was counted with its first chunk
            sequence = chunk.sequence
            self.computed_tokens += chunk.count
            if not sequence.counted:
                sequence.counted = True
                self.requests += 1
                self.prompt_tokens += len(sequence.request.prompt_token_ids)
                self.hit_tokens += sequence.cached_tokens
                first.append(sequence.request.request_id)
        return first

    def took(self, schedule: Schedule, seconds: float) -> None:
        """Books the time of a step that ran."""
        rows = schedule.rows()
        decodes = len(schedule.chunks) - len(schedule.prefills())
        self.prefill_seconds += seconds * (rows - decodes) / rows
        self.decode_seconds += seconds * decodes / rows


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


def make_report(
    counters: Counters, scheduler: Scheduler, pins: Pins, accounts: PromptAccounts, policy: str
) -> CacheReport:
    """The report as of now; `policy` is that of eviction. O(nodes of the tree)."""
    tree = scheduler.paging.tree
    total, free, cached = tree.pool.num_pages, tree.pool.free_pages, tree.evictable_pages
    pinned = pins.locked_pages()
    return CacheReport(
        requests=counters.requests,
        prompt_tokens=counters.prompt_tokens,
        hit_tokens=counters.hit_tokens,
        computed_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=scheduler.preemptions,
        evicted_tokens=tree.evicted_tokens,
        eviction_policy=policy,
        prefill_seconds=counters.prefill_seconds,
        decode_seconds=counters.decode_seconds,
        page_size=tree.page_size,
        pages_total=total,
        pages_free=free,
        pages_cached=cached,
        pages_pinned=pinned,
        pages_held=total - free - cached - pinned,
        top_prefixes=accounts.savings(tree).prefixes(TOP_PREFIXES),
        accounts=accounts.snapshot(),
        recent=accounts.recent(),
    )
