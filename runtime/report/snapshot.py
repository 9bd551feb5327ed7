"""The snapshot of an engine's cache and steps: plain data, which can be pickled.

`EngineStats` is the part that costs next to nothing, for metrics and samples over time.
`CacheReport` is all of it. Times are in seconds. Every count begins at the engine's start and never
decreases, so that the difference of two snapshots is what happened between them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from coppice.radix import CacheAccounts, PinRefused, PrefixNode, SharedPrefix
from coppice.radix.accounting.counts import CAUSES, Counts, Windows
from coppice.radix.accounting.miss_ratio import CurvePoint
from coppice.radix.accounting.near_misses import NearMiss
from coppice.runtime.engine.peek import Peek
from coppice.runtime.metrics.adapter_counts import AdapterReport
from coppice.runtime.metrics.histogram import Histogram
from coppice.runtime.metrics.prompt_accounts import PromptCauses
from coppice.runtime.metrics.window_keys import WindowReport
from coppice.runtime.tiers.told import TierReport, TiersReport

# The frontend may not import from the tree's room: it takes what a report needs from here.
__all__ = [
    "CAUSES",
    "AdapterReport",
    "CacheAccounts",
    "CacheReport",
    "Counts",
    "CurvePoint",
    "EngineStats",
    "Histogram",
    "NearMiss",
    "Peek",
    "PinRefused",
    "PinState",
    "PrefixNode",
    "PromptCauses",
    "ReplicaReport",
    "SharedPrefix",
    "TierReport",
    "TiersReport",
    "TreeReport",
    "WindowReport",
    "Windows",
]

NOTHING = Histogram((), (), 0.0)
"""A histogram without values, of what was not measured."""

TOP_PREFIXES = 10
"""Prefixes of a report."""

TOP_NODES = 160
"""Nodes of a report."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one of several replicas did, and its state now; the fields mean what `EngineStats`' do.

    Attributes:
        name: of the replica.
        other_replica: prompt tokens that it computed though another replica held them.
    """

    name: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    other_replica: int
    generated_tokens: int
    requests_running: int
    requests_waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_pinned: int
    pages_held: int
    resident_bytes: int | None

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts, histograms and states of one engine. A replay does not measure fields with a default.

    Attributes:
        requests: those that were admitted.
        prompt_tokens: of these requests.
        hit_tokens: prompt tokens whose KV was reused, at a request's first admission.
        computed_tokens: of prefill chunks, those of resumed sequences included.
        counts: prompt tokens by hit and cause, from the cache's accounts.
        rounded_off_tokens: cached after a hit, equal to the prompt's next tokens, and computed
            all the same. The tree matches token by token, so this stays 0.
        eviction_age: how long evicted tokens had been unused; those of a step count as its last.
        pages_cached: held by the cache alone; they are evicted when pages are needed.
        pages_pinned: held by pins alone.
        pages_held: held by running sequences.
        num_pins: prefixes that are pinned now.
        requests_running, requests_waiting: now; a request runs if one of its sequences does.
        finished: requests by the reason for which their last sequence ended.
        refused: requests by the limit of the queue that was full.
        queue: from arrival to the step with a request's first chunk.
        ttft: from arrival to the first token; beam searches, which have none early, are left out.
        itl: between tokens of a sequence, preemptions included.
        request: from arrival to the end, aborted requests included.
        step, step_tokens, step_sequences: of each step that ran.
        prefill_seconds, decode_seconds: time of steps, divided by each step's share of rows.
        late_rows: decoded for sequences that had ended, which was known only afterwards
            (async_scheduling).
        cuda_graphs: how many were captured at start, which took cuda_graph_seconds and
            cuda_graph_bytes of the GPU's memory.
        decode_steps: steps of an engine with graphs by how they ran, one of `DECODE_STEPS`.
        mixed_steps: its steps with rows of prompts likewise, one of `MIXED_STEPS`.
        resident_bytes: memory of the engine's process; None where the system does not report it.
        adapters: what the requests of each loaded adapter took from the cache.
        window_keys: keys, each of a token in a layer, that layers with a sliding window have
            "read" and "skipped"; empty for a model without windows.
        tiers: what was kept beyond the pool, and came back; None for an engine without tiers.
        drafted_tokens, accepted_tokens: of drafts that were computed, and of those the ones that a
            text went on with, by what proposed them; empty without speculation.
        draft_seconds_saved: an estimate, by what proposed them: the time of the steps that accepted
            tokens would have taken, less what drafted ones added to steps.
        draft_rows: tokens of sequences, one a step, that could have had a draft.
        draft_model_tokens: of the draft model, "hit" those of texts that its own tree had, and
            "computed" those that it computed, drafted ones included; empty without one.
        draft_model_seconds: that its passes took.
        replicas: those whose counts these are together, by name; none for one engine's own.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    generated_tokens: int
    counts: Counts
    preemptions: int
    rounded_off_tokens: int
    evicted_tokens: int
    eviction_age: Histogram
    page_size: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_pinned: int
    pages_held: int
    num_pins: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    queue: Histogram = NOTHING
    ttft: Histogram = NOTHING
    itl: Histogram = NOTHING
    request: Histogram = NOTHING
    step: Histogram = NOTHING
    step_tokens: Histogram = NOTHING
    step_sequences: Histogram = NOTHING
    failed_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    late_rows: int = 0
    cuda_graphs: int = 0
    cuda_graph_seconds: float = 0.0
    cuda_graph_bytes: int = 0
    decode_steps: dict[str, int] = field(default_factory=dict)
    mixed_steps: dict[str, int] = field(default_factory=dict)
    resident_bytes: int | None = None
    adapters: tuple[AdapterReport, ...] = ()
    window_keys: dict[str, int] = field(default_factory=dict)
    tiers: TiersReport | None = None
    drafted_tokens: dict[str, int] = field(default_factory=dict)
    accepted_tokens: dict[str, int] = field(default_factory=dict)
    draft_seconds_saved: dict[str, float] = field(default_factory=dict)
    draft_rows: int = 0
    draft_model_tokens: dict[str, int] = field(default_factory=dict)
    draft_model_seconds: float = 0.0
    replicas: tuple[ReplicaReport, ...] = ()

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a sequence got in a step that could have had a draft; 0 before the first."""
        if not self.draft_rows:
            return 0.0
        return 1 + sum(self.accepted_tokens.values()) / self.draft_rows

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def prefill_seconds_a_token(self) -> float:
        """Measured step time of a computed prefill token; 0 before the first."""
        return self.prefill_seconds / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def time_saved_seconds(self) -> float:
        """An estimate: hit tokens times the measured seconds that a computed prefill token took."""
        return self.hit_tokens * self.prefill_seconds_a_token


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
class TreeReport:
    """The parts of the tree that saved the most tokens."""

    prefixes: tuple[SharedPrefix, ...]  # most saved tokens first
    nodes: tuple[PrefixNode, ...]  # those whose subtrees saved the most, parents first
    seconds: float = 0.0  # that the engine took to find them


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheReport(EngineStats):
    """What the cache saved, why tokens missed, and what another size of cache would do.

    Attributes:
        eviction_policy: that of the pool; of replicas that differ, all of theirs: "lfu and lru".
        accounts: tokens by cause over three windows, near misses, hit rate by size of the cache.
        recent: the causes of the last requests one by one, oldest first.
        pins: the prefixes that are kept on purpose.
        windows: what sliding windows saved; None for a model without any.
        tree: None if it was left out, since finding it takes O(n log n) for n nodes that were hit.
    """

    eviction_policy: str
    accounts: CacheAccounts
    recent: tuple[PromptCauses, ...] = ()
    pins: tuple[PinState, ...] = ()
    windows: WindowReport | None = None
    tree: TreeReport | None = None

    @property
    def top_prefixes(self) -> tuple[SharedPrefix, ...]:
        """The prefixes that saved the most tokens, most first; none if the tree was left out."""
        return self.tree.prefixes if self.tree is not None else ()

    def __repr__(self) -> str:
        return (
            f"<CacheReport: {self.requests} requests, {self.hit_tokens} of {self.prompt_tokens} "
            f"prompt tokens hit ({self.hit_rate:.1%})>"
        )
