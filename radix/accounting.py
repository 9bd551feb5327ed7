"""Tells why tokens missed: each request's computed tokens by cause, and the sums of them all.

The accounting stands beside the tree. Whoever admits a request tells it the prompt and the hit;
whoever ends one tells it the tokens that were added. It remembers, in fixed memory, hashes of what
was ever seen: of prefixes at the borders of blocks, and of stretches of content wherever they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import get_args

import numpy as np

from coppice.radix.accounts import CacheAccounts, Divergence, Kind, RequestAccount
from coppice.radix.batches import TICKS, Batch, BatchHasher, Growth
from coppice.radix.causes import Causes, split
from coppice.radix.curve import FACTORS, MissRatioCurve
from coppice.radix.hashes import Hashes, keys, namespace_salt
from coppice.radix.memory import SeenTable
from coppice.radix.near_misses import SHOWN_TOKENS, SKETCH, NearMisses, Sighting
from coppice.radix.timeline import Timeline
from coppice.radix.tokens import TOKEN_BYTES
from coppice.radix.windows import CAUSES, FIELDS, RollingCounts

# Requests wait to be processed together until there are so many, or so many tokens of them.
BATCH_REQUESTS = 256
_BATCH_TOKENS = 1 << 21
_LEAST_ENTRIES = 1 << 14
_NEAR_MISSES = 10
_KINDS = get_args(Kind)
_COLUMN = {name: column for column, name in enumerate(FIELDS)}
_EVICTED = _COLUMN["evicted"]
# The salt of prefixes that any namespace but the first has seen.
_ELSEWHERE = np.uint64(0xA0761D6478BD642F)


class Accounting:
    """The accounts of one tree over a pool of `pool_tokens` tokens.

    The causes of a prompt's computed tokens, from the end of the hit on; each token has one:

    - `last_token`: the only token left. It is computed for its logits (rule 9).
    - `in_flight`: as many as the caller says that another request was computing.
    - `evicted`: up to the longest prefix of the prompt that was seen in its namespace.
    - `prompt_logprobs`: those of them that no hit can save, since their logprobs were asked for.
    - `namespace`: up to the longest prefix that was seen in any other.
    - `diverged`: content that was seen in the namespace, behind another prefix.
    - `cold`: all else.

    Prefixes are known at multiples of `block_tokens` and at the ends of prompts and sequences.
    Where a seen prefix ends between, the tokens behind the last border count as evicted if their
    content was seen, up to where content was cut last; else as cold. Content is known in chunks of
    about `block_tokens` tokens, so that about one chunk next to each difference counts as cold. The
    memory holds 16 times the pool's tokens, with 2 bytes a token of a large pool; what was seen
    before counts as never seen.

    Requests are processed in batches of `BATCH_REQUESTS`, or when anything is asked, or by
    `settle`, for which a caller may choose a moment at which nobody waits.
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
        self._hasher = BatchHasher(self.block_tokens)
        self._curve = MissRatioCurve(pool_tokens, self.block_tokens)
        self._counts = RollingCounts()
        self._near_misses = NearMisses()
        self._gone = Timeline()  # marks: last uses of what was evicted
        self._start = self._now = now
        self._pending: list[RequestAccount | Growth] = []
        self._pending_tokens = 0
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
        hit_limit: int | None = None,
        kind: Kind = "cross",
        divergence: Divergence | None = None,
        now: float,
    ) -> RequestAccount:
        """A sequence was admitted. O(1); its share of the processing, O(tokens), comes later.

        Args:
            tokens: its prompt as int32 bytes; with `kind` "preempted" all its tokens.
            namespace: the one it was matched in.
            hit_tokens: tokens whose KV is reused; less than all, but with `kind` "same".
            in_flight_tokens: tokens behind the hit that another request was computing.
            hit_limit: where the tokens begin that are computed in any case, for logprobs of the
                prompt; None if none were asked for.
            kind: "cross" for a request's first admission; "same" for a further sequence of it,
                "preempted" for one that was admitted before. Only the first counts in rates.
            divergence: if the hit ended where the tree has another continuation.
            now: seconds.

        Raises ValueError if a number is impossible.
        """
        prompt = len(tokens) // TOKEN_BYTES
        if not prompt or len(tokens) % TOKEN_BYTES:
            raise ValueError(f"tokens: at least one int32 token is needed, got {len(tokens)} bytes")
        if kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
        most = prompt if kind == "same" else prompt - 1
        if not 0 <= hit_tokens <= most:
            raise ValueError(f"hit_tokens must be in 0 .. {most}, got {hit_tokens}")
        if not 0 <= in_flight_tokens <= prompt - hit_tokens:
            raise ValueError(
                f"in_flight_tokens must be in 0 .. {prompt - hit_tokens}, got {in_flight_tokens}"
            )
        if hit_limit is None:
            hit_limit = prompt
        elif not hit_tokens <= hit_limit <= prompt:
            raise ValueError(f"hit_limit must be in {hit_tokens} .. {prompt}, got {hit_limit}")
        if divergence is not None and divergence.position != hit_tokens:
            raise ValueError(
                f"divergence: its position must be the hit's end, {hit_tokens}, "
                f"got {divergence.position}"
            )
        self._pass(now)
        account = RequestAccount(
            namespace, kind, prompt, hit_tokens, in_flight_tokens, hit_limit, divergence, now,
            self.settle, tokens, self._salt(namespace), len(self._pending),
        )  # fmt: skip
        self._append(account, prompt)
        return account

    def finish(self, account: RequestAccount, added: bytes, *, now: float) -> None:
        """The request has ended, and the tree holds these tokens (int32 bytes) behind its prompt.

        Raises ValueError if it was finished before. O(1), and the processing later.
        """
        if len(added) % TOKEN_BYTES:
            raise ValueError(f"added: {len(added)} bytes are no whole number of int32 tokens")
        if account.finished:
            raise ValueError("account: its request was finished already")
        self._pass(now)
        account.finished = True
        if not added:
            return
        whole, parent, chain, tail = (
            account.prompt_tokens // self.block_tokens, account.place, account.chain,
            account.tokens,
        )  # fmt: skip
        if parent >= 0:
            chain, tail = 0, tail[whole * self.block_tokens * TOKEN_BYTES :]
        self._append(
            Growth(tail + added, account.salt, whole, chain, parent, account.prompt_tokens, now),
            len(added) // TOKEN_BYTES,
        )

    def abandoned(
        self, account: RequestAccount, tokens: bytes, computed: int, *, now: float
    ) -> None:
        """The request has ended with only the first `computed` tokens of its prompt in the tree.

        What it alone would have computed behind counts as never seen again, but its causes stay as
        they were told. `tokens` is the prompt as int32 bytes, as at its admission. Raises
        ValueError if it was finished before, or if a size does not fit. O(tokens); settles.
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
        self.settle()
        batch = self._hasher.hash([account.as_it_was(tokens)], self._start)
        causes = account.causes
        known = account.prompt_tokens - sum(
            causes[name] for name in ("namespace", "diverged", "cold")
        )
        blocks, chunks = batch.blocks, batch.chunks
        new = blocks.end > max(known, computed)
        gone = [batch.prefix_keys[new]]
        if account.salt and not causes["namespace"]:
            gone.append(keys(blocks.hashes[new], _ELSEWHERE))
        if not causes["diverged"]:
            end = chunks.start + chunks.length + account.hit_tokens
            gone.append(batch.chunk_keys[end > max(known, computed)])
        self._memory.forget(np.concatenate(gone), int(batch.ticks[0]))

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
        self._memory.clear()

    def _pass(self, now: float) -> None:
        if not self._now <= now < math.inf:
            raise ValueError(f"now must not go backwards, got {now} after {self._now}")
        self._now = now

    def _salt(self, namespace: Hashable) -> int:
        if self._home is None:
            self._home = (namespace,)
        if namespace == self._home[0]:
            return 0
        self._salted = True
        return namespace_salt(namespace)

    def _append(self, item: RequestAccount | Growth, tokens: int) -> None:
        self._pending.append(item)
        self._pending_tokens += tokens
        if len(self._pending) >= BATCH_REQUESTS or self._pending_tokens >= _BATCH_TOKENS:
            self.settle()

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
        batch = self._hasher.hash(self._pending, self._start)
        self._pending, self._pending_tokens = [], 0
        causes = split(batch.prompts, batch.blocks, batch.chunks, *self._see(batch),
                       self.block_tokens)  # fmt: skip
        self._close(batch, causes)
        self._refer(batch)
        missed = batch.cross & (causes.diverged >= 2 * self.block_tokens)
        for number in np.flatnonzero(missed).tolist():
            self._near_miss(batch, number, causes)

    def _see(self, batch: Batch) -> tuple[Hashes, Hashes | None, Hashes]:
        """When each prefix was seen in its own and in other namespaces, and each chunk."""
        blocks, chunks = batch.blocks, batch.chunks
        rows = len(blocks.hashes)
        columns = [batch.prefix_keys, batch.chunk_keys]
        pieces = [blocks.piece, chunks.piece]
        writes = None
        if self._salted:
            # All others than the first namespace enter their prefixes a second time, under one salt
            # for them all; so those and the first's tell what any namespace has seen.
            columns += [keys(blocks.hashes, _ELSEWHERE), keys(blocks.hashes, np.uint64(0))]
            pieces += [blocks.piece, blocks.piece]
            own = np.ones(rows + len(chunks.hashes), np.bool_)
            salted = batch.salts[blocks.piece] != 0
            writes = np.concatenate((own, salted, np.zeros(rows, np.bool_)))
        piece = np.concatenate(pieces)
        found = np.concatenate(columns)
        if writes is None:
            seen = self._memory.see(found, piece, batch.ticks[piece])
        else:
            order = np.argsort(piece, kind="stable")
            found, piece, writes = found[order], piece[order], writes[order]
            seen = np.empty_like(found)
            seen[order] = self._memory.see(found, piece, batch.ticks[piece], writes)
        first, second = rows, rows + len(chunks.hashes)
        elsewhere = None
        if self._salted:
            elsewhere = np.maximum(seen[second : second + rows], seen[second + rows :])
        return seen[:first], elsewhere, seen[first:second]

    def _close(self, batch: Batch, causes: Causes) -> None:
        """Fills in the accounts of the batch, and adds them to the sums."""
        idle = np.where(causes.last_seen > 0, (batch.ticks - causes.last_seen) / TICKS, 0.0)
        prompt, hit, cross = batch.prompts.tokens, batch.prompts.hit, batch.cross
        rows = np.zeros((len(cross), len(FIELDS)), np.int64)
        rows[:, _COLUMN["requests"]] = cross
        rows[:, _COLUMN["prompt_tokens"]] = prompt
        rows[:, _COLUMN["hit_tokens"]] = hit
        for name in (*CAUSES, "ideal_tokens"):
            rows[:, _COLUMN[name]] = getattr(causes, name)
        rows[:, _COLUMN["evicted_idle"]] = (causes.evicted * idle).round()

        chains = batch.blocks.chain.tolist()
        for number, row in enumerate(rows.tolist()):
            account = batch.requests[number]
            if account is None:
                continue
            whole = account.prompt_tokens // self.block_tokens * self.block_tokens
            account.settled(row, chains[number], batch.pieces[number][whole * TOKEN_BYTES :])
            if row[_EVICTED]:
                since = float(idle[number])
                gone = self._gone.time_of(account.time - since)
                told_late = gone is None or gone > account.time
                account.settled_evicted(since, None if told_late else gone)
            if account.kind != "cross":
                rows[number] = 0
                rows[number, _COLUMN[f"{account.kind}_tokens"]] = account.prompt_tokens
                rows[number, _COLUMN[f"{account.kind}_hit_tokens"]] = account.hit_tokens
        told = [(number, request) for number, request in enumerate(batch.requests) if request]
        numbers = [number for number, _ in told]
        seconds_told = batch.times[numbers].astype(np.int64).tolist()
        self._counts.add(rows[numbers], [request.namespace for _, request in told], seconds_told)

    def _refer(self, batch: Batch) -> None:
        """Shows the curve which whole blocks were used."""
        blocks, cross = batch.blocks, batch.cross
        growth = batch.prompts.tokens == 0
        sampled = self._curve.sample(batch.prefix_keys)
        used = (cross | growth)[blocks.piece[sampled]] & blocks.full[sampled]
        sampled = sampled[used]
        pieces = blocks.piece[sampled]
        tokens = batch.prompts.tokens[cross]
        self._curve.refer(
            batch.prefix_keys[sampled],
            pieces,
            cross[pieces],
            int((tokens // self.block_tokens).sum()),
            int(tokens.sum()),
        )

    def _near_miss(self, batch: Batch, number: int, causes: Causes) -> None:
        account = batch.requests[number]
        assert account is not None
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
    if pool_tokens > 1 << 18:
        return 128
    if pool_tokens > 1 << 15:
        return 64
    return 32 if pool_tokens > 1 << 12 else 16
