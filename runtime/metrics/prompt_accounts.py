"""Accounts for prompts: why their tokens were hit or computed, from admission to the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np

from coppice.radix import (
    Accounting,
    CacheAccounts,
    FromTiers,
    Match,
    PrefixSavings,
    RadixTree,
    RequestAccount,
)
from coppice.radix.accounting.counts import Counts
from coppice.radix.accounting.log.account import Kind
from coppice.radix.accounting.near_misses import Difference, difference
from coppice.radix.accounting.timeline import Timeline
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.requests.request import Sequence

RECENT_REQUESTS = 64
"""The number of last requests whose causes of misses are kept one by one."""


@dataclass(frozen=True, slots=True)
class PromptCauses:
    """Why those tokens of one request's prompt were computed that were not hit.

    Attributes:
        request_id: as the engine knows it.
        namespace: in which the tree matched it.
        seconds_ago: since it was admitted.
        prompt_tokens: the hit ones and those of all causes.
        hit_tokens: whose KV was reused, those from tiers beyond the pool included.
        loaded: of these, those from each tier; only tiers from which some came.
        causes: the computed ones by cause; only causes that occurred.
        evicted_idle_seconds: how long before the request its evicted tokens had been used last.
        evicted_seconds: how long before it they were evicted, if that is known.
        divergence: after how many tokens the tree differed from it; None: nowhere, or evicted.
        before: the last tokens before that place.
        difference: what follows in the prompt and in the tree, up to where they agree again.
    """

    request_id: str
    namespace: Hashable
    seconds_ago: float
    prompt_tokens: int
    hit_tokens: int
    loaded: dict[str, int]
    causes: dict[str, int]
    evicted_idle_seconds: float | None
    evicted_seconds: float | None
    divergence: int | None
    before: tuple[int, ...]
    difference: Difference | None


class PromptAccounts:
    """The accounts of one engine's prompts, kept beside its tree by `Paging`.

    `clock` gives seconds and never goes back. A prompt is accounted for when its sequence is
    admitted, and again after each preemption; generated tokens are added when it leaves. Evicted
    and rounded-off tokens are counted in `counters`. With `exact` every request is settled, however
    fast they come.
    """

    def __init__(
        self,
        pool_tokens: int,
        counters: EngineCounters,
        clock: Callable[[], float] = time.monotonic,
        *,
        exact: bool = False,
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._accounting = Accounting(pool_tokens, now=clock(), exact=exact)
        self._uses = Timeline()  # the tree's logical clock in seconds
        self._evicted_tokens = 0  # those recorded so far
        self._recent: deque[_Recent] = deque(maxlen=RECENT_REQUESTS)

    def admitted(
        self,
        sequence: Sequence,
        tree: RadixTree,
        match: Match,
        in_flight: int,
        tiers: FromTiers | None = None,
    ) -> None:
        """Accounts for a sequence that holds `match` and is computed from its end on.

        But for what comes from `tiers`: call `loaded` when no more will.
        """
        now = self._clock()
        self.evictions(tree, now)
        self._uses.record(tree.clock, now)
        tokens = sequence.keys()
        assert sequence.hold is not None and sequence.hold.node is not None
        reader = sequence.reader
        node, here = sequence.hold.node, match.length * TOKEN_BYTES
        following = node.children.get(tokens[here : here + TOKEN_BYTES])
        if following is not None and not sequence.private:
            rest = tokens[here : sequence.hit_limit * TOKEN_BYTES]
            same = common_prefix(rest, 0, following.edge) // TOKEN_BYTES
            self._counters.rounded_off_tokens += min(same, following.length)
        kind = _kind(sequence)
        sequence.account = self._accounting.request(
            tokens,
            sequence.request.namespace,
            match.length,
            in_flight_tokens=in_flight,
            held_elsewhere=sequence.request.held_elsewhere if kind == "cross" else 0,
            hit_limit=sequence.hit_limit if reader is not None and reader.limits_hits else None,
            kind=kind,
            node=node,
            tiers=tiers,
            now=now,
        )
        if kind == "cross" and not sequence.account.skipped:
            self._recent.append(_Recent(sequence.request.request_id, sequence.account))

    def loaded(self, sequence: Sequence, now: float | None = None) -> None:
        """Nothing more of an admitted sequence will come from tiers."""
        account = sequence.account
        if account is not None and account.tiers is not None and account.tiers.open:
            self._accounting.loaded(account, now=self._clock() if now is None else now)

    def uncached(self, sequence: Sequence) -> None:
        """Accounts for a sequence that is admitted while prefix caching is off."""
        if _kind(sequence) == "cross":
            request, now = sequence.request, self._clock()
            tokens = len(request.prompt_token_ids)
            self._accounting.uncached(tokens, request.namespace, now=now)

    def preview(
        self,
        tokens: bytes,
        namespace: Hashable,
        hit: int,
        in_flight: int,
        hit_limit: int | None,
        held_elsewhere: int = 0,
    ) -> tuple[dict[str, int], float | None]:
        """Why a prompt would miss after its hit; see `Accounting.preview`. Counts nothing."""
        return self._accounting.preview(
            tokens,
            namespace,
            hit,
            in_flight_tokens=in_flight,
            hit_limit=hit_limit,
            held_elsewhere=held_elsewhere,
            now=self._clock(),
        )

    def forked(self, sequence: Sequence) -> None:
        """Accounts for a fork: it continues from what another sequence of its request computed."""
        tokens = sequence.keys(0, sequence.computed)
        sequence.account = self._accounting.request(
            tokens, sequence.request.namespace, sequence.computed, kind="same", now=self._clock()
        )

    def left(self, sequence: Sequence, tree: RadixTree, computed: int) -> None:
        """Accounts for a sequence that leaves; its first `computed` tokens are in the tree."""
        now = self._clock()
        self.evictions(tree, now)
        self._uses.record(tree.clock, now)
        account = sequence.account
        if account is None or account.finished:
            return
        self.loaded(sequence, now)
        if computed < account.prompt_tokens:
            prompt = sequence.keys(0, account.prompt_tokens)
            self._accounting.abandoned(account, prompt, computed, now=now)
        else:
            added = sequence.tokens[account.prompt_tokens : computed].tobytes()
            self._accounting.finish(account, added, now=now)

    def cleared(self, tree: RadixTree) -> None:
        """Notes that the tree was emptied on purpose, or replaced by this empty one."""
        self._evicted_tokens = tree.evicted_tokens
        self._accounting.reset()

    def settle_batch(self) -> bool:
        """Processes a part of what was recorded, if there is enough (see `Accounting`)."""
        return self._accounting.settle_batch()

    def snapshot(self) -> CacheAccounts:
        """The accounts as of now. Settles what is pending."""
        return self._accounting.snapshot(now=self._clock())

    def recent(self) -> tuple[PromptCauses, ...]:
        """The last requests that were admitted and not skipped, oldest first.

        Settles what is pending.
        """
        now = self._clock()
        return tuple(each.causes(now) for each in self._recent)

    def counts(self) -> Counts:
        """Tokens by hit and cause since the start. Settles what is pending."""
        return self._accounting.counts(now=self._clock())

    def savings(self, tree: RadixTree) -> PrefixSavings:
        """What the cached prefixes have saved so far, and when they were used last."""
        now = self._clock()
        self._uses.record(tree.clock, now)
        return PrefixSavings(tree, uses=self._uses, now=now)

    def evictions(self, tree: RadixTree, now: float | None = None) -> None:
        """Records what was evicted since the last call; to be called at least once a step. O(1).

        All tokens that were evicted between two calls get the age of the last of them.
        """
        count = tree.evicted_tokens - self._evicted_tokens
        if not count:
            return
        self._evicted_tokens = tree.evicted_tokens
        used = self._uses.time_of(tree.last_evicted)
        now = self._clock() if now is None else now
        self._counters.evicted(count, None if used is None else max(0.0, now - used))
        if used is not None:
            self._accounting.evicted(used, now=now)


def _kind(sequence: Sequence) -> Kind:
    if sequence.admitted >= 0:
        return "preempted"
    # A fork has its parent's number of hit tokens before it is first admitted. Its index does not
    # distinguish it: the beams of a search have that of their parent.
    return "cross" if sequence.cached_tokens < 0 else "same"


class _Recent:
    """One of the last requests. Its causes are found at the first call, and kept."""

    __slots__ = ("_account", "_causes", "_request_id")

    def __init__(self, request_id: str, account: RequestAccount) -> None:
        self._request_id = request_id
        self._account = account
        self._causes: PromptCauses | None = None

    def causes(self, now: float) -> PromptCauses:
        account, ago = self._account, now - self._account.time
        if self._causes is not None:
            return replace(self._causes, seconds_ago=ago)
        evicted, parted = account.evicted_at, account.divergence
        causes = PromptCauses(
            self._request_id,
            account.namespace,
            ago,
            account.prompt_tokens,
            account.prompt_tokens - account.computed_tokens,
            account.loaded,
            {cause: tokens for cause, tokens in account.causes.items() if tokens},
            account.evicted_idle_seconds,
            None if evicted is None else account.time - evicted,
            None if parted is None else parted.position,
            () if parted is None else _ids(parted.before),
            None if parted is None else difference(_ids(parted.ours), _ids(parted.theirs)),
        )
        if account.tiers is None or not account.tiers.open:
            self._causes = causes
        return causes


def _ids(tokens: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(tokens, np.int32).tolist())
