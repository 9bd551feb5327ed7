"""Tells why tokens missed: each request's computed tokens by cause, and the sums of them all.

The accounting stands beside the tree. Whoever admits a request tells it the prompt and the hit;
whoever ends one tells it the tokens that were added. It remembers, in fixed memory, hashes of what
was ever seen: of prefixes at the borders of blocks, and of stretches of content wherever they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NoReturn

import numpy as np

from coppice.radix.accounts import (
    CacheAccounts,
    Divergence,
    Kind,
    RequestAccount,
    refuse_impossible,
)  # fmt: skip
from coppice.radix.batches import Batch, BatchHasher, Growth
from coppice.radix.causes import Causes, split
from coppice.radix.curve import FACTORS, MissRatioCurve
from coppice.radix.hashes import Hashes, keys, namespace_salt
from coppice.radix.memory import SeenTable
from coppice.radix.near_misses import SHOWN_TOKENS, SKETCH, NearMisses, Sighting
from coppice.radix.pieces import LONG
from coppice.radix.stamps import StampClock
from coppice.radix.timeline import Timeline
from coppice.radix.tokens import TOKEN_BYTES
from coppice.radix.windows import CAUSES, FIELDS, RollingCounts

# Requests wait to be processed together until there are so many, or so many tokens of them, four of
# a hit for one: these cost less.
BATCH_REQUESTS = 256
_BATCH_TOKENS = 3 << 19
_LEAST_BATCH_TOKENS = 1 << 16
_LEAST_ENTRIES = 1 << 14
_NEAR_MISSES = 10
_COLUMN = {name: column for column, name in enumerate(FIELDS)}
# The salt of prefixes that any namespace but the first has seen.
_ELSEWHERE = np.uint64(0xA0761D6478BD642F)


class Accounting:
    """The accounts of one tree over a pool of `pool_tokens` tokens.

    The causes of a prompt's computed tokens, from the end of the hit on; each token has one:

    - `last_token`: the only token left. It is computed for its logits (rule 9).
    - `in_flight`: as many as the caller says that another request was computing.
    - `evicted`: up to the longest prefix of the prompt that was seen in its namespace.
    - `namespace`: up to the longest prefix that was seen in any other.
    - `diverged`: content that was seen in the namespace, behind another prefix.
    - `cold`: all else.

    Prefixes are known at multiples of `block_tokens` (16 to 512, growing with the pool) and at the
    ends of prompts and sequences. Where a seen prefix ends between, the tokens behind the last
    border count as evicted if their content was seen, up to where content was cut last; else as
    cold. Content is known in chunks of about `block_tokens` tokens, so that about one chunk next to
    each difference counts as cold. So sums are exact, and the parts of prompts of fewer than a few
    blocks are rough. The memory holds 16 times the pool's tokens, with half a byte a token of a
    large pool; what was seen before counts as never seen.

    Requests are processed in batches of `BATCH_REQUESTS` or of the pool's tokens (of 1.5 million at
    most), or when anything is asked, or by `settle`, for which a caller may choose a moment at
    which nobody waits.
    """

    def __init__(self, pool_tokens: int, *, now: float) -> None:
        """`now` and all later times are seconds of one clock that never goes back."""
        if pool_tokens < 1:
            raise ValueError(f"pool_tokens must be at least 1, got {pool_tokens}")
        if not math.isfinite(now):
            raise ValueError(f"now must be a finite number of seconds, got {now}")
        self.pool_tokens = pool_tokens
        self.block_tokens = _block_tokens(pool_tokens)
        entries = 2 * round(FACTORS[-1]) * pool_tokens // self.block_tokens
        self._memory = SeenTable(max(_LEAST_ENTRIES, entries))
        self._hasher = BatchHasher(self.block_tokens, pool_tokens)
        self._curve = MissRatioCurve(pool_tokens, self.block_tokens)
        self._stamps = StampClock(pool_tokens)
        self._counts = RollingCounts()
        self._near_misses = NearMisses()
        self._gone = Timeline()  # marks: last uses of what was evicted
        self._start = self._now = now
        self._pending: list[RequestAccount | Growth] = []
        self._pending_tokens = 0
        # The curve's ages are those of a batch, which should not be many times the pool.
        self._batch_tokens = max(_LEAST_BATCH_TOKENS, min(pool_tokens, _BATCH_TOKENS))
        # The first namespace's keys have no salt. While it is the only one, none else is looked up.
        self._home: tuple[Hashable] | None = None
        self._salted = False

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of what was seen."""
        return self._memory.nbytes

    # -- telling -----------------------------------------------------------------------------

    def request(
        self,
        tokens: bytes,
        namespace: Hashable,
        hit_tokens: int,
        *,
        in_flight_tokens: int = 0,
        kind: Kind = "cross",
        divergence: Divergence | None = None,
        now: float,
    ) -> RequestAccount:
        """A sequence was admitted. O(1), but for a long hit, which is read once; its share of the
        processing, O(tokens), comes later.

        Args:
            tokens: its prompt as int32 bytes; with `kind` "preempted" all its tokens.
            namespace: the one it was matched in.
            hit_tokens: tokens whose KV is reused; less than all, but with `kind` "same".
            in_flight_tokens: tokens behind the hit that another request was computing.
            kind: "cross" for a request's first admission; "same" for a further sequence of it,
                "preempted" for one that was admitted before. Only the first counts in rates.
            divergence: if the hit ended where the tree has another continuation.
            now: seconds.

        Raises ValueError if a number is impossible.
        """
        prompt = len(tokens) // TOKEN_BYTES
        if not (
            len(tokens) == prompt * TOKEN_BYTES
            and 0 <= hit_tokens < prompt
            and 0 <= in_flight_tokens <= prompt - hit_tokens
            and kind == "cross"
            and divergence is None
        ):
            refuse_impossible(len(tokens), hit_tokens, in_flight_tokens, kind, divergence)
        if not self._now <= now < math.inf:
            self._refuse(now)
        self._now = now
        pending = self._pending
        account = RequestAccount(
            namespace,
            kind,
            (prompt, hit_tokens, in_flight_tokens, kind == "cross", hit_tokens, 0, -1),
            divergence,
            now,
            self.settle,
            tokens,
            self._hasher.name(tokens, hit_tokens) if hit_tokens >= LONG else 0,
            len(pending),
        )
        pending.append(account)
        self._pending_tokens += prompt - hit_tokens * 3 // 4
        if len(pending) >= BATCH_REQUESTS or self._pending_tokens >= self._batch_tokens:
            self.settle()
        return account

    def finish(self, account: RequestAccount, added: bytes, *, now: float) -> None:
        """The request has ended, and the tree holds these tokens (int32 bytes) behind its prompt.

        Raises ValueError if it was finished before. O(1), and the processing later.
        """
        if len(added) % TOKEN_BYTES:
            raise ValueError(f"added: {len(added)} bytes are no whole number of int32 tokens")
        if account.finished:
            raise ValueError("account: its request was finished already")
        if not self._now <= now < math.inf:
            self._refuse(now)
        self._now = now
        account.finished = True
        if not added:
            return
        prompt, parent, tail = account.numbers[0], account.place, account.tokens
        whole = prompt // self.block_tokens
        if parent >= 0:
            chain, tail = 0, tail[whole * self.block_tokens * TOKEN_BYTES :]
        else:
            chain = account.chain
        numbers = (0, 0, 0, False, prompt, whole, parent)
        growth = Growth(account.namespace, tail + added, chain, now, numbers)
        self._pending.append(growth)
        self._pending_tokens += len(added) // TOKEN_BYTES
        if len(self._pending) >= BATCH_REQUESTS or self._pending_tokens >= self._batch_tokens:
            self.settle()

    def evicted(self, last_used: float, *, now: float) -> None:
        """Tokens that were last used at `last_used` have been evicted.

        From this an account tells when its evicted tokens went: when something as recently used
        did, which is exact if eviction follows the last use, and an estimate if it does not. O(1).
        """
        self._pass(now)
        self._gone.record(last_used, now)

    def reset(self) -> None:
        """The tree was emptied on purpose: what was seen is forgotten, so none of it is evicted.

        Sums, curve and near misses stay.
        """
        self.settle()
        self._forget()

    def _pass(self, now: float) -> None:
        if not self._now <= now < math.inf:
            self._refuse(now)
        self._now = now

    def _refuse(self, now: float) -> NoReturn:
        raise ValueError(f"now must not go backwards, got {now} after {self._now}")

    # -- asking ------------------------------------------------------------------------------

    def snapshot(self, *, now: float) -> CacheAccounts:
        """The accounts as of `now`. Settles what is pending; O(namespaces) besides."""
        self._pass(now)
        self.settle()
        second = int(now - self._start)
        namespaces, others = self._counts.by_namespace(second)
        return CacheAccounts(
            now - self._start,
            self.pool_tokens,
            self._counts.overall(second),
            namespaces,
            others,
            self._curve.points(),
            self._near_misses.top(_NEAR_MISSES),
        )

    # -- processing --------------------------------------------------------------------------

    def settle(self) -> None:
        """Processes what is pending. O(tokens of it)."""
        if not self._pending:
            return
        batch = self._hasher.hash(self._pending, self._salts(), self._start)
        self._pending, self._pending_tokens = [], 0
        try:
            begins, stamps = self._stamps.stamp(batch.lengths, batch.times)
        except OverflowError:  # after 16 million pools' worth of tokens
            self._forget()
            self._stamps.restart()
            begins, stamps = self._stamps.stamp(batch.lengths, batch.times)
        seen, elsewhere, seen_chunks = self._see(batch, stamps)
        causes = split(
            batch.prompts, batch.blocks, batch.chunks, seen, elsewhere, seen_chunks,
            self.block_tokens,
        )  # fmt: skip
        self._close(batch, causes)
        self._refer(batch, begins, stamps, seen, causes)
        missed = batch.cross & (causes.diverged >= 2 * self.block_tokens)
        for piece in np.flatnonzero(missed).tolist():
            request = batch.requests[int(np.searchsorted(batch.request_pieces, piece))]
            self._near_miss(batch, piece, request, causes)

    def _salts(self) -> Hashes:
        """Of the namespaces of what is pending."""
        names = [item.namespace for item in self._pending]
        if self._home is None:
            self._home = (names[0],)
        (home,) = self._home
        if names.count(home) == len(names):
            return np.zeros(len(names), np.uint64)
        self._salted = True
        salts = {name: 0 if name == home else namespace_salt(name) for name in set(names)}
        return np.array([salts[name] for name in names], np.uint64)

    def _forget(self) -> None:
        """What was seen was never seen."""
        self._memory.clear()
        self._curve.clear()

    def _see(self, batch: Batch, stamps: Hashes) -> tuple[Hashes, Hashes | None, Hashes]:
        """The stamps that prefixes were seen with in their own and in others, and chunks were."""
        blocks, chunks = batch.blocks, batch.chunks
        rows = len(blocks.hashes)
        piece = np.concatenate((blocks.piece, chunks.piece))
        own = np.concatenate((batch.prefix_keys, batch.chunk_keys))
        if not self._salted:
            seen = self._memory.see(own, piece, stamps[piece])
            return seen[:rows], None, seen[rows:]
        # All others than the first namespace enter their prefixes a second time, under one salt
        # for them all; so those and the first's tell what any namespace has seen.
        shared, first = keys(blocks.hashes, _ELSEWHERE), keys(blocks.hashes, np.uint64(0))
        salted = batch.salts[blocks.piece] != 0
        writes = np.concatenate((np.ones(len(own), np.bool_), salted, np.zeros(rows, np.bool_)))
        piece = np.concatenate((piece, blocks.piece, blocks.piece))
        order = np.argsort(piece, kind="stable")
        piece = piece[order]
        both = np.concatenate((own, shared, first))[order]
        seen = np.empty(len(both), np.uint64)
        seen[order] = self._memory.see(both, piece, stamps[piece], writes[order])
        elsewhere = np.maximum(seen[len(own) : len(own) + rows], seen[len(own) + rows :])
        return seen[:rows], elsewhere, seen[rows : len(own)]

    def _close(self, batch: Batch, causes: Causes) -> None:
        """Fills in the accounts of the batch, and adds them to the sums."""
        pieces, requests = batch.request_pieces, batch.requests
        known = causes.last_seen > 0
        idle = np.where(known, batch.times - self._stamps.time_of(causes.last_seen), 0.0)[pieces]
        rows = np.zeros((len(requests), len(FIELDS)), np.int64)
        rows[:, _COLUMN["requests"]] = 1
        rows[:, _COLUMN["prompt_tokens"]] = batch.prompts.tokens[pieces]
        rows[:, _COLUMN["hit_tokens"]] = batch.prompts.hit[pieces]
        for name in (*CAUSES, "ideal_tokens"):
            rows[:, _COLUMN[name]] = getattr(causes, name)[pieces]
        evicted = rows[:, _COLUMN["evicted"]]
        rows[:, _COLUMN["evicted_idle"]] = (evicted * idle).round()

        chains = batch.blocks.chain[pieces].tolist()
        size, width = self.block_tokens, self.block_tokens * TOKEN_BYTES
        for account, row, chain in zip(requests, rows.tolist(), chains, strict=True):
            account.row, account.chain, account.place, account.evicted = row, chain, -1, None
            account.tokens = account.tokens[account.numbers[0] // size * width :]
        for number in np.flatnonzero(evicted).tolist():
            account, since = requests[number], float(idle[number])
            gone = self._gone.time_of(account.time - since)
            told_late = gone is None or gone > account.time
            account.evicted = since, None if told_late else gone
        for number in np.flatnonzero(~batch.cross[pieces]).tolist():
            account = requests[number]
            rows[number] = 0
            rows[number, _COLUMN[f"{account.kind}_tokens"]] = account.prompt_tokens
            rows[number, _COLUMN[f"{account.kind}_hit_tokens"]] = account.hit_tokens
        namespaces = [request.namespace for request in requests]
        self._counts.add(rows, namespaces, batch.times[pieces].astype(np.int64))

    def _refer(
        self, batch: Batch, begins: Hashes, stamps: Hashes, seen: Hashes, causes: Causes
    ) -> None:
        """Shows the curve which whole blocks were used, and how long ago before that."""
        blocks, cross, prompts = batch.blocks, batch.cross, batch.prompts
        counted = cross | (prompts.tokens == 0)
        used = blocks.full if counted.all() else blocks.full & counted[blocks.piece]
        rows = np.flatnonzero(used)
        piece, before = blocks.piece[rows], seen[rows]
        self._curve.use(stamps[piece], before)
        known = np.flatnonzero((before > 0) & cross[piece])
        piece, before = piece[known], before[known]
        size = self.block_tokens
        self._curve.prompts(
            begins[piece] - before, blocks.end[rows[known]], size, int(prompts.tokens[cross].sum())
        )
        # The rest of what was known of each prompt, behind its last border.
        rest = causes.ideal_tokens - np.bincount(piece, minlength=len(cross)) * size
        at = np.flatnonzero(cross & (rest != 0) & (causes.last_seen > 0))
        self._curve.prompts(begins[at] - causes.last_seen[at], causes.ideal_tokens[at], rest[at], 0)

    def _near_miss(
        self, batch: Batch, number: int, account: RequestAccount, causes: Causes
    ) -> None:
        tokens, chunks = batch.pieces[number], batch.chunks
        begin, end = np.searchsorted(chunks.piece, (number, number + 1))
        shared = begin + np.flatnonzero(causes.shared[begin:end])
        sketch = np.sort(batch.chunk_keys[shared])[:SKETCH].tolist()
        after = int(chunks.start[shared[0]]) + account.hit_tokens
        divergence = account.divergence
        if divergence is None:
            # The tree has let go of the other continuation; the memory knows where it began.
            position = min(int(causes.ideal_tokens[number]), after)
            divergence = Divergence.at(tokens[: after * TOKEN_BYTES], position, b"")
        self._near_misses.add(
            Sighting(
                account.namespace,
                sketch,
                int(causes.diverged[number]),
                divergence.position,
                divergence.before,
                divergence.ours,
                divergence.theirs,
                tokens[after * TOKEN_BYTES : (after + SHOWN_TOKENS) * TOKEN_BYTES],
            )
        )


def _block_tokens(pool_tokens: int) -> int:
    """Small pools are remembered in finer blocks: the memory costs little there."""
    if pool_tokens > 1 << 21:
        return 512
    if pool_tokens > 1 << 20:
        return 256
    if pool_tokens > 1 << 18:
        return 128
    if pool_tokens > 1 << 15:
        return 64
    return 32 if pool_tokens > 1 << 12 else 16
