"""The ledger of why tokens missed: each request's computed tokens by cause, and the sums.

The caller reports each admission with the prompt and its hit, and each end with the tokens that
were added. The accounting remembers, in fixed memory, hashes of all that was seen: of prefixes at
the borders of blocks, and of content at any offset.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Final, get_args

from coppice.radix.accounting.accounts import CacheAccounts
from coppice.radix.accounting.counts import Counts
from coppice.radix.accounting.log.account import Kind, RequestAccount
from coppice.radix.accounting.log.items import Abandonment, Growth
from coppice.radix.accounting.log.loaded import FromTiers
from coppice.radix.accounting.log.pace import Pace
from coppice.radix.accounting.miss_ratio import FACTORS
from coppice.radix.accounting.sample import Sample
from coppice.radix.accounting.settle import Settler
from coppice.radix.node import Node
from coppice.radix.tokens import TOKEN_BYTES

# A batch has at most this many requests, and about this many tokens: it takes a few milliseconds.
# Of skipped requests it has more, since each takes little.
_BATCH_REQUESTS = 256
_WORK: Final = 4
_BATCH_WORK = _WORK * _BATCH_REQUESTS
_BATCH_TOKENS = 1 << 19
_LEAST_BATCH_TOKENS = 1 << 16
# When this many batches wait, by tokens or requests, the call that adds a request processes one.
_MOST_BATCHES = 4
MOST_WAITING = _MOST_BATCHES * _BATCH_REQUESTS
_MOST_WORK = _WORK * MOST_WAITING
_NEAR_MISSES = 10
_KINDS = get_args(Kind)


class Accounting:
    """The accounts of one tree over a pool of `pool_tokens` tokens.

    The causes of a prompt's computed tokens, from the end of the hit on; each token has one:

    - `last_token`: the only token left, which is computed for its logits.
    - `in_flight`: those that another request was computing, as the caller reports.
    - `other_replica`: up to the end of what another replica holds, as the caller reports.
    - `evicted`: up to the longest prefix of the prompt that was seen in its namespace.
    - `prompt_logprobs`: those of both that no hit can save, since their logprobs were asked for.
    - `namespace`: up to the longest prefix that was seen in any other.
    - `diverged`: content that was seen in the namespace, after another prefix.
    - `cold`: all else.
    - `not_loaded`: what a tier had, as the caller reports, and what would be of the last three
      causes or `evicted` otherwise.
    - `no_cache`: those of requests that are reported as `uncached`, and no others.

    What comes back from other tiers is a hit; until that is over, its request is not counted.

    Prefixes are known at the first 32 multiples of `block_tokens`, at one of 8 after these, and at
    the ends of prompts and sequences. Where a seen prefix ends between, the tokens after the last
    border count as evicted as far as their content was seen; else as cold. Content is known by its
    anchors, one of about 25 tokens, so that some 25 tokens next to each difference count as cold,
    and known text of less than about 100 may not be found. The memory holds 16 times the pool's
    tokens, with 2.3 bytes a token of a large pool; what was seen before counts as never seen.

    Settling takes many times what the tree takes for a request. When requests come faster than
    settling them may cost (`Pace`), those beyond are *skipped*: their hits, and the causes above
    `evicted`, are still exact, and the other causes of all requests are counted by a `Sample`, with
    a standard error. That stays so until what the skipped ones computed would be forgotten anyway.
    Curve and near misses then are of those that were settled. From the first request on of which
    other tiers are asked, all are settled: these take milliseconds to answer in any case.

    Reports are logged, and processed in order, many requests together: by `settle_batch`, which the
    caller calls when it would otherwise wait, when the log is full, and when a result is read.
    """

    def __init__(
        self, pool_tokens: int, *, now: float, exact: bool = False, seed: int | None = None
    ) -> None:
        """`now` and all later times are seconds of one clock that never runs backwards.

        With `exact` all requests are settled, however fast they come. `seed` is for the choice of
        the sample; without one it differs each time. Raises ValueError for a pool without tokens,
        and a `now` that is not finite.
        """
        if pool_tokens < 1:
            raise ValueError(f"pool_tokens must be at least 1, got {pool_tokens}")
        if not math.isfinite(now):
            raise ValueError(f"now must be a finite number of seconds, got {now}")
        self.pool_tokens = pool_tokens
        self._settler = Settler(pool_tokens, now)
        self._sample = None if exact else Sample(pool_tokens, self._settler.counts, now, seed)
        self._pace = Pace(now)
        # Since a request was skipped, what it computed is unknown to the settler, until it would
        # have forgotten it anyway: after as many tokens as it remembers.
        self._remembered = round(FACTORS[-1]) * pool_tokens
        self._until_exact = 0
        self.block_tokens = self._settler.block_tokens
        self._start = self._now = now
        self._settle_all = self.settle  # made once, not for each account
        self._waiting: list[RequestAccount | Growth | Abandonment] = []
        self._sizes: list[int] = []  # tokens to be hashed of each
        self._waiting_tokens = 0
        self._loaded: deque[tuple[RequestAccount, float]] = deque()  # settled, and not counted
        self._waiting_work = 0
        # The curve's ages are those of a batch, which should not be many times the pool.
        self._batch_tokens = max(_LEAST_BATCH_TOKENS, min(pool_tokens, _BATCH_TOKENS))
        self._most_tokens = _MOST_BATCHES * self._batch_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of what was seen."""
        return self._settler.nbytes + (0 if self._sample is None else self._sample.nbytes)

    # -- recording ---------------------------------------------------------------------------

    def request(
        self,
        tokens: bytes,
        namespace: Hashable,
        hit_tokens: int,
        *,
        in_flight_tokens: int = 0,
        hit_limit: int | None = None,
        held_elsewhere: int = 0,
        kind: Kind = "cross",
        theirs: bytes = b"",
        node: Node | None = None,
        tiers: FromTiers | None = None,
        now: float,
    ) -> RequestAccount:
        """A sequence was admitted. O(1); its share of the processing, O(tokens), comes later.

        Args:
            tokens: its prompt as int32 bytes; with `kind` "preempted" all its tokens.
            namespace: the one it was matched in.
            hit_tokens: tokens whose KV is reused; all of them only with `kind` "same".
            in_flight_tokens: tokens after the hit that another request was computing.
            hit_limit: position from which on tokens are computed in any case, for logprobs of the
                prompt; None if no such logprobs were asked for.
            held_elsewhere: tokens of the prompt, from its beginning, that another replica holds;
                more than it has count as all of it.
            kind: "cross" for a request's first admission; "same" for a further sequence of it,
                "preempted" for one that was admitted before. Only the first counts in rates.
            theirs: some tokens that the tree has after the hit's end (int32 bytes), to show where
                the prompt diverged; not needed with `node`.
            node: the one that ends with the hit, if the caller has locked it. Then what hit is not
                hashed again: its hashes are kept there.
            tiers: what other tiers had of it; None: none was asked. While that is open, call
                `loaded` when no more will come.
            now: seconds.

        Raises ValueError for an unknown `kind`, and for a number out of its range.
        """
        prompt = len(tokens) // TOKEN_BYTES
        if hit_limit is None:
            hit_limit = prompt
        if not (
            len(tokens) == prompt * TOKEN_BYTES
            and 0 <= hit_tokens < prompt
            and 0 <= in_flight_tokens <= prompt - hit_tokens
            and hit_tokens <= hit_limit <= prompt
            and held_elsewhere >= 0
            and kind == "cross"
        ):
            _check(len(tokens), hit_tokens, in_flight_tokens, hit_limit, held_elsewhere, kind)
        if not self._now <= now < math.inf:
            self._pass(now)
        self._now = now
        fresh = prompt if node is None else prompt - hit_tokens
        work, skipped = _WORK, False
        if tiers is not None:
            self._sample, self._until_exact = None, 0
        if self._sample is not None:
            if not self._pace.allows(fresh, now):
                self._until_exact = self._remembered
                work, skipped, node = 1, True, None
            elif self._until_exact > 0:
                self._until_exact -= prompt
        account = RequestAccount(
            namespace, kind, prompt, hit_tokens, in_flight_tokens, hit_limit,
            held_elsewhere, theirs, now, tokens, node, 0, self._settle_all, tiers,
            self._until_exact > 0, skipped,
        )  # fmt: skip
        self._log(account, fresh, work)
        return account

    def loaded(self, account: RequestAccount, *, now: float) -> None:
        """No more of a request's tokens will come from other tiers: it is counted now. O(1).

        Raises ValueError if no more was expected.
        """
        if account.tiers is None or not account.tiers.open:
            raise ValueError("account: nothing was expected from tiers")
        self._pass(now)
        account.tiers.open = False
        if account.place < 0:  # else it is counted when it is settled
            self._loaded.append((account, now))

    def uncached(self, tokens: int, namespace: Hashable, *, now: float) -> None:
        """A request with a prompt of `tokens` tokens was admitted where there is no cache. O(1).

        All its tokens have the cause `no_cache`; nothing of it is remembered.
        """
        self._pass(now)
        self._settler.add_uncached(tokens, namespace, now)

    def finish(self, account: RequestAccount, added: bytes, *, now: float) -> None:
        """The request has ended, and the tree holds these tokens (int32 bytes) after its prompt.

        Raises ValueError if it was finished before. O(1), and the processing later.
        """
        if len(added) % TOKEN_BYTES:
            raise ValueError(f"added: {len(added)} bytes are no whole number of int32 tokens")
        if account.finished:
            raise ValueError("account: its request was finished already")
        self._pass(now)
        account.finished = True
        if not added:
            if account.place < 0:
                account.prompt = b""
        else:
            self._log(Growth(account, added, now), len(added) // TOKEN_BYTES, _work_of(account))
            account.prompt = b""

    def abandoned(
        self, account: RequestAccount, tokens: bytes, computed: int, *, now: float
    ) -> None:
        """The request has ended with only the first `computed` tokens of its prompt in the tree.

        What it alone would have computed after these counts as never seen again, but its causes
        stay as they were settled. `tokens` is the prompt as int32 bytes, as at its admission.
        Raises ValueError if it was finished before, or if a size does not fit. O(1), and O(tokens)
        later.
        """
        if len(tokens) != account.prompt_tokens * TOKEN_BYTES:
            raise ValueError(
                f"tokens: the prompt had {account.prompt_tokens} tokens, got {len(tokens)} bytes"
            )
        if not 0 <= computed < account.prompt_tokens:
            raise ValueError(
                f"computed must be in 0 .. {account.prompt_tokens - 1}, got {computed}"
            )
        if account.finished:
            raise ValueError("account: its request was finished already")
        self._pass(now)
        account.finished = True
        account.prompt = b""
        self._log(Abandonment(account, tokens, computed), account.prompt_tokens, _WORK)

    def evicted(self, last_used: float, *, now: float) -> None:
        """Tokens that were last used at `last_used` have been evicted.

        An account's `evicted_at` is the first time at which something used as recently as its own
        tokens was evicted: exact if eviction follows the last use, else an estimate. O(1).
        """
        self._pass(now)
        self._settler.evictions.record(last_used, now)

    def reset(self) -> None:
        """The tree was emptied on purpose: what was seen is forgotten, so none of it is evicted.

        Sums, curve and near misses stay.
        """
        self.settle()
        self._settler.forget()
        if self._sample is not None:
            self._sample.forget()
        self._until_exact = 0  # nothing was seen, so all of it is known

    def _pass(self, now: float) -> None:
        if not self._now <= now < math.inf:
            raise ValueError(f"now must not go backwards, got {now} after {self._now}")
        self._now = now

    def _log(self, item: RequestAccount | Growth | Abandonment, tokens: int, work: int) -> None:
        self._waiting.append(item)
        self._sizes.append(tokens)
        self._waiting_tokens += tokens
        self._waiting_work += work
        # Memory is bounded: without calls of `settle`, one that fills the log processes a batch.
        if self._waiting_tokens >= self._most_tokens or self._waiting_work >= _MOST_WORK:
            self._settle_batch()

    # -- reading -----------------------------------------------------------------------------

    def snapshot(self, *, now: float) -> CacheAccounts:
        """The accounts as of `now`. Settles what is pending; otherwise O(namespaces)."""
        self._pass(now)
        self.settle()
        second = int(now - self._start)
        namespaces, others = self._settler.counts.by_namespace(second)
        return CacheAccounts(
            now - self._start,
            self.pool_tokens,
            self._settler.counts.overall(second),
            namespaces,
            others,
            self._settler.uses.points(),
            self._settler.near_misses.top(_NEAR_MISSES),
        )

    def counts(self, *, now: float) -> Counts:
        """Tokens by hit and cause since the start. Settles what is pending."""
        self._pass(now)
        self.settle()
        return self._settler.counts.overall(int(now - self._start)).since_start

    def preview(
        self,
        tokens: bytes,
        namespace: Hashable,
        hit_tokens: int,
        *,
        in_flight_tokens: int = 0,
        hit_limit: int | None = None,
        held_elsewhere: int = 0,
        now: float,
    ) -> tuple[dict[str, int], float | None]:
        """The causes of a request that is not made, as `Settler.preview` returns them.

        The arguments are those of `request`. Settles what is pending; counts nothing. O(tokens).
        """
        self._pass(now)
        prompt = len(tokens) // TOKEN_BYTES
        limit = prompt if hit_limit is None else hit_limit
        _check(len(tokens), hit_tokens, in_flight_tokens, limit, held_elsewhere, "cross")
        self.settle()
        account = RequestAccount(
            namespace, "cross", prompt, hit_tokens, in_flight_tokens, limit,
            held_elsewhere, b"", now, tokens, None, 0, self.settle,
        )  # fmt: skip
        return self._settler.preview(account)

    # -- processing --------------------------------------------------------------------------

    def settle(self) -> None:
        """Processes all that was reported. O(tokens of it)."""
        while self._waiting or self._loaded:
            self._settle_batch()

    def settle_batch(self) -> bool:
        """Processes a batch, in a few milliseconds, if a whole one waits; returns whether it did.

        To be called when it delays no request: while a device computes, or after a request ended.
        """
        whole = self._waiting_tokens >= self._batch_tokens or self._waiting_work >= _BATCH_WORK
        if whole:
            self._settle_batch()
        return whole

    def _settle_batch(self) -> None:
        waiting = self._waiting
        items: list[RequestAccount | Growth] = []
        tokens = work = taken = 0
        for item in waiting:
            if isinstance(item, Abandonment):
                if not items:
                    tokens, work, taken = self._sizes[0], _WORK, 1
                    self._undo(item)
                break
            items.append(item)
            tokens += self._sizes[taken]
            work += _work(item)
            taken += 1
            if tokens >= self._batch_tokens or work >= _BATCH_WORK:
                break
        del waiting[:taken]
        del self._sizes[:taken]
        self._waiting_tokens -= tokens
        self._waiting_work -= work
        # They are counted in the order of their times, as all others.
        loaded: list[tuple[RequestAccount, float]] = []
        until = math.inf if not waiting else items[-1].time if items else -math.inf
        while self._loaded and self._loaded[0][1] <= until:
            loaded.append(self._loaded.popleft())
        if items or loaded:
            self._process(items, loaded)

    def _process(
        self,
        items: list[RequestAccount | Growth],
        loaded: list[tuple[RequestAccount, float]],
    ) -> None:
        # First, since the settler lets go of what the sample reads.
        if items and self._sample is not None:
            self._sample.process(items)
        settled = [item for item in items if not _account(item).skipped]
        if settled or loaded:
            for place, item in enumerate(settled):
                if isinstance(item, RequestAccount):
                    item.place = place
            self._settler.process(settled, loaded)

    def _undo(self, item: Abandonment) -> None:
        if self._sample is not None:
            self._sample.undo(item)
        if not item.account.skipped:
            self._settler.undo(item)


def _account(item: RequestAccount | Growth) -> RequestAccount:
    return item if isinstance(item, RequestAccount) else item.account


def _work(item: RequestAccount | Growth) -> int:
    """How much of the room of a batch an item takes."""
    return _work_of(_account(item))


def _work_of(account: RequestAccount) -> int:
    return 1 if account.skipped else _WORK


def _check(
    size: int, hit: int, in_flight: int, hit_limit: int, held_elsewhere: int, kind: str
) -> None:
    """Raises ValueError for the first argument of a request that is out of its range."""
    prompt = size // TOKEN_BYTES
    if not prompt or size % TOKEN_BYTES:
        raise ValueError(f"tokens: at least one int32 token is needed, got {size} bytes")
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    most = prompt if kind == "same" else prompt - 1
    if not 0 <= hit <= most:
        raise ValueError(f"hit_tokens must be in 0 .. {most}, got {hit}")
    if not 0 <= in_flight <= prompt - hit:
        raise ValueError(f"in_flight_tokens must be in 0 .. {prompt - hit}, got {in_flight}")
    if not hit <= hit_limit <= prompt:
        raise ValueError(f"hit_limit must be in {hit} .. {prompt}, got {hit_limit}")
    if held_elsewhere < 0:
        raise ValueError(f"held_elsewhere must be at least 0, got {held_elsewhere}")
