"""Replays requests through the real tree and the real scheduler, without a model."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any, cast

from coppice.radix import POLICIES, PagePool, RadixTree
from coppice.radix.pages.pool import MAX_PAGES
from coppice.runtime.config import EngineConfig
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.metrics.prompt_accounts import PromptAccounts
from coppice.runtime.offline.tiers import SimulatedTiers, TierRates, TierSize
from coppice.runtime.report.gather import counted, tree_report
from coppice.runtime.report.snapshot import CacheReport, Counts
from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.schedule.scheduler import Scheduler

STRETCHES = 60
"""Most stretches of a replay, each of about equally many requests and counted by itself."""

STRETCH_REQUESTS = 10
"""Fewest requests of a stretch, except for the last one."""

SHOWN_NODES = 200
"""Most nodes of the tree in a report."""

MAX_POOL_TOKENS = 1 << 36
"""The largest pool that can be replayed, given memory for the record of its pages."""

POLICY_NAMES = tuple(POLICIES)
"""The eviction policies that can be compared."""

_ENGINE = EngineConfig(model="none")  # for its defaults
_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of a replay. Raises ValueError for one that is out of range."""

    pool_tokens: int = 1_000_000
    page_size: int = _ENGINE.page_size
    eviction_policy: str = _ENGINE.eviction_policy
    concurrency: int = 1  # most requests that run at once
    accounted_tokens: int | None = None
    """The size around which the hit-rate curve is estimated: from a quarter to 16 times it.

    None: `pool_tokens`. For a pool without limit a sixteenth of it is better: the further the curve
    reaches, the more thinly it is sampled.
    """

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "page_size", "concurrency", "accounted_tokens"):
            value = getattr(self, name)
            if name == "accounted_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.eviction_policy not in POLICIES:
            raise ValueError(
                f"eviction_policy must be one of {', '.join(POLICIES)}, "
                f"got {self.eviction_policy!r}"
            )
        for name, tokens in (("page_size", self.page_size), ("pool_tokens", self.pool_tokens)):
            if tokens > MAX_POOL_TOKENS:
                raise ValueError(f"{name} must be at most {MAX_POOL_TOKENS}, got {tokens}")
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
class ReplayRequest:
    """A request of a trace, with the tokens that were generated for it."""

    prompt: array[int]  # at least one token
    output: array[int]
    namespace: str | None
    time: float  # seconds since the trace's start; never less than the request before it


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some successive requests of a replay."""

    seconds: float  # its end, since the trace's start
    requests: int  # finished at its end, since the trace's start
    counts: Counts  # of this stretch alone
    evicted_tokens: int  # in this stretch


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReplayReport(CacheReport):
    """The report of a replay's cache at its end, and the counts of each stretch until then."""

    options: ReplayOptions
    stretches: tuple[Stretch, ...]


class Replay:
    """One replay over a fresh tree and pool.

    Requests arrive in the order of the trace. At most `concurrency` of them run, and up to the same
    number wait in the scheduler's queue, as in an engine under load: the scheduler admits the
    longest hit first, lets a request wait for a prefix that another is computing, mixes chunks and
    preempts. A step computes its chunks at once, and samples the tokens of the trace.

    Without a model no step takes time: the clock of the accounts is the trace's time of the last
    request that has arrived.
    """

    def __init__(
        self,
        options: ReplayOptions,
        tiers: Seq[TierSize] = (),
        rates: TierRates | None = None,
        *,
        account: bool = True,
    ) -> None:
        """Begins with nothing cached.

        Args:
            options: of the pool and of the requests.
            tiers: beyond the pool, the fastest first.
            rates: of these; None: unknown, and all that they have is loaded.
            account: whether causes are found, for `report`; without, only `hit_rate` is known, and
                what tiers did.
        """
        self.options = options
        self._time = 0.0
        self.tree = RadixTree(PagePool(options.pages, options.page_size), options.eviction_policy)
        accounted = options.accounted_tokens or options.pages * options.page_size
        self._counters = EngineCounters(lambda: self._time)
        self._accounts = PromptAccounts(accounted, self._counters, lambda: self._time, exact=True)
        self._paging = Paging(
            self.tree, enable_prefix_caching=True, accounts=self._accounts if account else None
        )
        self._scheduler = Scheduler(
            self._paging,
            max_num_seqs=options.concurrency,
            max_num_batched_tokens=max(_ENGINE.most_tokens, options.concurrency),
            counters=self._counters,
        )
        self.tiers: SimulatedTiers | None = None
        if tiers:
            rates = rates or TierRates(None, None, {})
            self.tiers = SimulatedTiers(tiers, rates, self.tree, self._has_place)
            self._scheduler.tiers = cast(Any, self.tiers)
            self._paging.allocated = self.tiers.flush
        self._outputs: dict[str, array[int]] = {}  # of unfinished requests, by request id
        self._arrivals = 0
        self._finished = 0
        self._decoding_only = False  # whether the last step admitted, prefilled and ended nothing
        self._stretches: list[Stretch] = []
        self._counted = Counts()  # the sum of the stretches so far
        self._evicted = 0

    def _has_place(self) -> bool:
        return len(self._scheduler.running) < self.options.concurrency

    # -- running -----------------------------------------------------------------------------

    def run(self, requests: Iterable[ReplayRequest], total: int) -> Iterator[int]:
        """Replays `requests`, about `total` of them; yields the number finished when it has grown.

        Raises ValueError for one that is longer than the pool, or earlier than the one before it.
        """
        arrivals = iter(requests)
        stretch = max(STRETCH_REQUESTS, total / STRETCHES)
        border = stretch
        while True:
            self._receive(arrivals)
            if not self._outputs:
                break
            before = self._finished
            self._step()
            if self._finished > before:
                left = total - self._arrivals + len(self._scheduler.waiting)
                if self._finished >= border and left >= stretch / 2:
                    self._end_stretch()
                    border = self._finished + stretch
                yield self._finished
        self._end_stretch()

    def _receive(self, arrivals: Iterator[ReplayRequest]) -> None:
        """Queues the next requests, until `concurrency` of them wait."""
        waiting = self._scheduler.waiting
        while len(waiting) < self.options.concurrency:
            arrival = next(arrivals, None)
            if arrival is None:
                return
            length = len(arrival.prompt) + len(arrival.output)
            pool = self.options.pages * self.options.page_size
            if not len(arrival.prompt) or length > pool:
                raise ValueError(
                    f"requests: each must have a prompt, and at most the pool's {pool} tokens; "
                    f"number {self._arrivals + 1} has {len(arrival.prompt)} + {len(arrival.output)}"
                )
            if not arrival.time >= self._time:
                raise ValueError(
                    f"requests: times must not decrease, got {arrival.time} after {self._time}"
                )
            self._time = arrival.time
            number = self._arrivals
            self._arrivals += 1
            request = Request(
                str(number), arrival.prompt, _PARAMS, arrival.namespace, number, 0, length
            )
            self._outputs[request.request_id] = arrival.output
            self._decoding_only = False
            self._scheduler.add(Sequence(request))

    def _step(self) -> None:
        ahead = self._sample_ahead()
        schedule = self._scheduler.schedule()
        assert schedule.chunks, "nothing is scheduled, but requests are unfinished"
        self._decoding_only = True
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            ends = chunk.count == sequence.remaining
            if id(sequence) in ahead:
                # As if decoded one by one: these tokens enter the tree when the sequence leaves.
                sequence.computed += chunk.count - 1
                self._paging.commit(sequence, 1)
            else:
                self._decoding_only &= chunk.decode
                self._scheduler.computed(chunk)
            if ends:
                self._sample(sequence)

    def _sample(self, sequence: Sequence) -> None:
        """Appends the trace's next token to a sequence whose tokens are all computed."""
        output = self._outputs[sequence.request.request_id]
        sampled = sequence.num_generated
        if sampled < len(output):
            sequence.tokens.append(output[sampled])
            sampled += 1
        if sampled == len(output):
            self._scheduler.finish(sequence)
            del self._outputs[sequence.request.request_id]
            self._counters.generated_tokens += len(output)
            self._counters.finished["length"] += 1
            self._finished += 1
            self._decoding_only = False

    def _sample_ahead(self) -> set[int]:
        """Merges the following steps that only decode; returns the ids of their sequences.

        While every running sequence decodes, and no waiting one can be admitted, the following
        steps are alike until a sequence ends, and are made as one: this changes no hit, no
        admission and no preemption. The tokens that they would sample are appended first.
        """
        running, waiting = self._scheduler.running, self._scheduler.waiting
        if not running or any(sequence.remaining != 1 for sequence in running):
            return set()
        pages = self.tree.pool.free_pages
        if len(running) == self.options.concurrency or not len(waiting):
            pages += self.tree.evictable_pages
        elif not self._decoding_only:
            return set()  # the next step may admit one
        # Otherwise no waiting sequence fitted, and none will unless an eviction changes their
        # order, so only free pages may be taken.
        left = [
            len(self._outputs[sequence.request.request_id]) - sequence.num_generated
            for sequence in running
        ]
        steps = min(*left, self._scheduler.max_num_batched_tokens // len(running))
        if steps < 2 or self._pages_for(steps) > pages:
            return set()
        for sequence in running:
            output, sampled = self._outputs[sequence.request.request_id], sequence.num_generated
            sequence.tokens += output[sampled : sampled + steps - 1]
        return {id(sequence) for sequence in running}

    def _pages_for(self, steps: int) -> int:
        """Further pages that the running sequences need for `steps` more tokens each."""
        size = self.options.page_size
        return sum(
            max(0, -(-(sequence.computed + steps) // size) - len(sequence.table))
            for sequence in self._scheduler.running
        )

    # -- reporting ---------------------------------------------------------------------------

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens so far; 0 before the first request."""
        counters = self._counters
        return counters.hit_tokens / counters.prompt_tokens if counters.prompt_tokens else 0.0

    def _end_stretch(self) -> None:
        """Records the counts since the last stretch ended, if a request was admitted."""
        counts = self._accounts.snapshot().overall.since_start
        if counts.requests == self._counted.requests:
            return
        grown = Counts(
            *(
                getattr(counts, each.name) - getattr(self._counted, each.name)
                for each in fields(Counts)
            )
        )
        evicted = self.tree.evicted_tokens
        self._stretches.append(Stretch(self._time, self._finished, grown, evicted - self._evicted))
        self._counted, self._evicted = counts, evicted

    def report(self) -> ReplayReport:
        """The report so far. O(n log n) for n nodes of the tree that were hit."""
        self._accounts.evictions(self.tree)
        accounts = self._accounts.snapshot()
        counts = accounts.overall.since_start
        return ReplayReport(
            **counted(self._counters, self._accounts, self.tree)
            | {
                "requests": counts.requests,
                "prompt_tokens": counts.prompt_tokens,
                "hit_tokens": counts.hit_tokens,
                "computed_tokens": counts.computed_tokens,
                "tiers": None if self.tiers is None else self.tiers.report(),
            },
            eviction_policy=self.options.eviction_policy,
            accounts=accounts,
            recent=self._accounts.recent(),
            tree=tree_report(self._accounts, self.tree, SHOWN_NODES),
            options=self.options,
            stretches=tuple(self._stretches),
        )
