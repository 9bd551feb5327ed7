"""The same requests in four stages: static, continuous, chunked with pages, and with prefix hits.

The last two run the engine's own scheduler and tree; the first two are models (see `reserved`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.radix import POLICIES
from coppice.radix.pages.pool import MAX_PAGES
from coppice.runtime.config import EngineConfig
from coppice.runtime.offline.machine import Machine
from coppice.runtime.offline.reserved import Reserved
from coppice.runtime.offline.simulation import Arrival, Outcome, Simulation
from coppice.runtime.offline.usage import Usage, counted, quantile

STAGES = ("static", "continuous", "chunked", "prefix")
"""The names of the stages, each of which adds something to the one before it."""

_ENGINE = EngineConfig(model="none")  # for its defaults


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The options of all stages. Raises ValueError for one that is out of range.

    Attributes:
        pool_tokens: memory for the KV of requests, in tokens.
        page_size: tokens of a page; without pages, memory is counted in them all the same.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of a step, where prompts are computed in chunks.
        max_model_len: tokens that a place reserves where there are no pages; None: those of the
            longest request.
        eviction_policy: of the cache of prefixes.
    """

    pool_tokens: int = 100_000
    page_size: int = _ENGINE.page_size
    max_num_seqs: int = 64
    max_num_batched_tokens: int = _ENGINE.most_tokens
    max_model_len: int | None = None
    eviction_policy: str = _ENGINE.eviction_policy

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "page_size", "max_num_seqs", "max_num_batched_tokens",
                     "max_model_len"):  # fmt: skip
            value = getattr(self, name)
            if name == "max_model_len" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )
        if self.eviction_policy not in POLICIES:
            raise ValueError(
                f"eviction_policy must be one of {', '.join(POLICIES)}, "
                f"got {self.eviction_policy!r}"
            )
        if self.pages > MAX_PAGES:
            raise ValueError(
                f"pool_tokens must be at most {MAX_PAGES} pages of {self.page_size}, "
                f"got {self.pool_tokens}"
            )

    @property
    def pages(self) -> int:
        """Pages of the pool, the last one filled partly if need be."""
        return -(-self.pool_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage did with all requests.

    Attributes:
        name: one of `STAGES`.
        places: most requests that could run at once.
        outcomes: of each request, in order of arrival.
        usage: what the steps used.
        gaps: how often each time between two tokens of a request occurred, in seconds.
        preemptions: how often a request lost its pages to another.
        pages: of the pool.
        page_size: in tokens.
    """

    name: str
    places: int
    outcomes: list[Outcome]
    usage: Usage
    gaps: Counter[float]
    preemptions: int
    pages: int
    page_size: int

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        first = min(outcome.arrival.time for outcome in self.outcomes)
        return max(outcome.end for outcome in self.outcomes) - first

    @property
    def prompt_tokens(self) -> int:
        return sum(len(outcome.arrival.prompt) for outcome in self.outcomes)

    @property
    def output_tokens(self) -> int:
        return sum(outcome.arrival.output for outcome in self.outcomes)

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed, since an earlier request had computed them."""
        return sum(outcome.hit_tokens for outcome in self.outcomes)

    @property
    def utilisation(self) -> float:
        """Slots that gave a token of a request, over all slots of the steps."""
        return self.usage.useful / self.usage.slots

    @property
    def mean_pages(self) -> float:
        """Pages held or reserved by running requests, on average over the time of all steps."""
        return self.usage.page_seconds / self.usage.busy

    @property
    def waste(self) -> float:
        """The share of these pages' room that stored no token."""
        return 1 - self.usage.token_seconds / (self.usage.page_seconds * self.page_size)

    def quantiles(self, of: str) -> dict[str, float | None]:
        """p50 and p99 in seconds: `of` is "ttft", "itl" or "latency"; None without a value."""
        values: Counter[float] = (
            self.gaps if of == "itl" else counted(getattr(each, of) for each in self.outcomes)
        )
        return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}


def check(arrivals: Sequence[Arrival], options: StageOptions) -> int:
    """The tokens that a place reserves. Raises ValueError for requests that can't be served."""
    if not arrivals:
        raise ValueError("requests: there is none")
    longest = 0
    for number, arrival in enumerate(arrivals, 1):
        # The last token's KV is not stored, but the engine wants room for it.
        length = len(arrival.prompt) + arrival.output
        if not len(arrival.prompt) or arrival.output < 1:
            raise ValueError(
                f"requests: each needs a prompt and an output of at least 1 token; number {number} "
                f"has {len(arrival.prompt)} + {arrival.output}"
            )
        if length > options.pages * options.page_size:
            raise ValueError(
                f"pool must have at least {length:,} tokens, for request {number}, "
                f"got {options.pool_tokens:,}"
            )
        longest = max(longest, length - 1)
    reserved = options.max_model_len or longest
    if reserved < longest:
        raise ValueError(f"max_model_len must be at least {longest}, the longest, got {reserved}")
    return reserved


def simulate(
    name: str, arrivals: Sequence[Arrival], machine: Machine, options: StageOptions
) -> Stage:
    """Serves all requests in one stage. Raises ValueError if one can't be served."""
    reserved = check(arrivals, options)
    pages, size = options.pages, options.page_size
    if name in ("static", "continuous"):
        batch = Reserved(
            machine, pages=pages, page_size=size, reserved=reserved,
            max_num_seqs=options.max_num_seqs,
        )  # fmt: skip
        outcomes = (batch.static if name == "static" else batch.continuous)(arrivals)
        return Stage(name, batch.places, outcomes, batch.usage, batch.gaps, 0, pages, size)
    engine = Simulation(
        machine,
        pool_tokens=options.pool_tokens,
        page_size=size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        eviction_policy=options.eviction_policy,
        enable_prefix_caching=name == "prefix",
    )
    outcomes = engine.run(arrivals)
    gaps: Counter[float] = Counter()
    for (_, seconds), count in engine.gaps.items():
        gaps[seconds] += count
    preemptions = engine.scheduler.counters.preemptions
    return Stage(name, options.max_num_seqs, outcomes, engine.usage, gaps, preemptions, pages, size)
