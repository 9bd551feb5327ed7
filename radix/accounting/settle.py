"""Processes recorded requests in batches: hashes, looks up, splits by cause and adds up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from coppice.radix.accounting.causes import Causes, split
from coppice.radix.accounting.counts import FIELDS, FOUND_CAUSES, RollingCounts
from coppice.radix.accounting.log.account import Divergence, RequestAccount
from coppice.radix.accounting.log.batches import Batch, BatchHasher
from coppice.radix.accounting.log.items import Abandonment, Growth
from coppice.radix.accounting.log.loaded import Span
from coppice.radix.accounting.miss_ratio import FACTORS, MissRatioCurve
from coppice.radix.accounting.near_misses import SHOWN_TOKENS, SKETCH, NearMisses, Sighting
from coppice.radix.accounting.reuses import Reuses
from coppice.radix.accounting.seen.anchors import MEAN_GAP, WINDOW
from coppice.radix.accounting.seen.content_table import ContentTable
from coppice.radix.accounting.seen.hashes import Hashes, Ints
from coppice.radix.accounting.seen.namespaces import Namespaces
from coppice.radix.accounting.seen.prefix_table import PrefixTable
from coppice.radix.accounting.seen.use_clock import UseClock
from coppice.radix.accounting.timeline import Timeline
from coppice.radix.tokens import TOKEN_BYTES

_LEAST_ENTRIES = 1 << 12
_NEAR_MISS_TOKENS = 2 * MEAN_GAP  # known content that makes a request one of them
_COLUMN = {name: column for column, name in enumerate(FIELDS)}


class Settler:
    """The memory of what requests used, of fixed size, and the sums over them."""

    def __init__(self, pool_tokens: int, start: float) -> None:
        """`start` is the time in seconds from which windows of counts are measured."""
        self.block_tokens = _block_tokens(pool_tokens)
        self.uses = Reuses(MissRatioCurve(pool_tokens), self.block_tokens)
        self.counts = RollingCounts()
        self.near_misses = NearMisses()
        self.evictions = Timeline()  # marks: last uses of what was evicted
        remembered = round(FACTORS[-1]) * pool_tokens
        self._memory = PrefixTable(max(_LEAST_ENTRIES, remembered // self.block_tokens))
        self._contents = ContentTable(max(_LEAST_ENTRIES, remembered // MEAN_GAP))
        self._hasher = BatchHasher(self.block_tokens)
        self._stamps = UseClock(pool_tokens)
        self._start = start
        self._namespaces = Namespaces()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of what was seen."""
        return self._memory.nbytes + self._contents.nbytes

    def forget(self) -> None:
        """What was seen counts as never seen; the sums stay."""
        self._memory.clear()
        self._contents.clear()
        self.uses.clear()

    def add_uncached(self, tokens: int, namespace: Hashable, now: float) -> None:
        """Counts a prompt of this many tokens that no cache could hit. O(1)."""
        row = np.zeros((1, len(FIELDS)), np.int64)
        for name, value in (("requests", 1), ("prompt_tokens", tokens), ("no_cache", tokens)):
            row[0, _COLUMN[name]] = value
        self.counts.add(row, [namespace], [int(now - self._start)])

    def process(
        self,
        items: list[RequestAccount | Growth],
        loaded: Sequence[tuple[RequestAccount, float]] = (),
    ) -> None:
        """Settles requests and what they added; the `place` of each request is its index.

        Requests that a sample counts are not added to the sums. `loaded` are requests that were
        settled before, and are counted now; with the time at which the last of their tokens came.
        O(tokens, but for those that hit a node with known borders).
        """
        if not items:
            self._count([], [], [], loaded)
            return
        batch = self._hasher.hash(items, 0, self._salts_of(items))
        try:
            begun, stamps = self._stamps.stamp(batch.lengths, batch.times - self._start)
        except OverflowError:  # after 65,536 pools' worth of tokens
            self.forget()
            self._stamps.restart()
            begun, stamps = self._stamps.stamp(batch.lengths, batch.times - self._start)
        seen, elsewhere = self._see(batch, stamps)
        seen_anchors = self._contents.see(batch.anchor_keys, batch.anchors.piece)
        causes = split(
            batch.prompts, batch.borders, batch.anchors, seen, elsewhere, seen_anchors,
            self.block_tokens,
        )  # fmt: skip
        self.uses.record(batch, begun, stamps, seen, causes.known_tokens)
        missed = batch.counted & (causes.diverged >= _NEAR_MISS_TOKENS)
        for number in np.flatnonzero(missed).tolist():
            self._near_miss(batch, number, causes)
        self._close(batch, stamps, causes, loaded)

    def preview(self, account: RequestAccount) -> tuple[dict[str, int], float | None]:
        """What `process` would find of a request now; nothing of it is remembered or counted.

        Returns its computed tokens by cause, only causes that occur, and for how many seconds the
        evicted ones had not been used; None: none were evicted. O(tokens).
        """
        salt = self._namespaces.peek(account.namespace)
        batch = self._hasher.hash([account], 0, [salt])
        elsewhere = self._namespaces.known_elsewhere(self._memory, batch.borders.hashes, salt)
        causes = split(
            batch.prompts,
            batch.borders,
            batch.anchors,
            self._memory.known(batch.border_keys),
            elsewhere,
            self._contents.known(batch.anchor_keys),
            self.block_tokens,
        )
        found = {name: int(getattr(causes, name)[0]) for name in FOUND_CAUSES}
        idle = None
        if found["evicted"]:
            idle = 0.0  # as in `_close`: no border before them is known, and so no time
            if causes.last_seen[0]:
                used = float(self._stamps.time_of(causes.last_seen)[0])
                idle = max(0.0, account.time - self._start - used)
        return {name: tokens for name, tokens in found.items() if tokens}, idle

    def _salts_of(self, items: list[RequestAccount | Growth]) -> list[int]:
        """The salt of each item's namespace."""
        return self._namespaces.salts(
            [
                item.namespace if isinstance(item, RequestAccount) else item.account.namespace
                for item in items
            ]
        )

    def _see(self, batch: Batch, stamps: Hashes) -> tuple[Hashes, Hashes | None]:
        """When each prefix was seen in its own and in other namespaces: stamps, 0 for never."""
        piece = batch.borders.piece
        return self._namespaces.see(
            self._memory, batch.border_keys, batch.borders.hashes, batch.salts[piece], piece,
            stamps[piece],
        )  # fmt: skip

    def _close(
        self,
        batch: Batch,
        stamps: Hashes,
        causes: Causes,
        loaded: Sequence[tuple[RequestAccount, float]],
    ) -> None:
        """Fills in the accounts of the batch, and adds them and those of `loaded` to the sums."""
        seconds = batch.times - self._start
        last_used = self._stamps.time_of(causes.last_seen)
        idle = np.where(causes.last_seen > 0, np.maximum(seconds - last_used, 0.0), 0.0)
        rows = np.zeros((len(seconds), len(FIELDS)), np.int64)
        rows[:, _COLUMN["requests"]] = 1
        rows[:, _COLUMN["prompt_tokens"]] = batch.prompts.tokens
        rows[:, _COLUMN["hit_tokens"]] = batch.prompts.hit
        for name in (*FOUND_CAUSES, "ideal_tokens"):
            rows[:, _COLUMN[name]] = getattr(causes, name)
        rows[:, _COLUMN["evicted_idle"]] = (causes.evicted * idle).round()

        settled, namespaces, entered = [], [], stamps.tolist()
        for number, row in enumerate(rows.tolist()):
            account = batch.requests[number]
            if account is None:
                continue
            account.settled(row, entered[number], batch.chains[number], batch.tails[number])
            if account.tiers is not None:
                account.tiers.diverged = _diverged(batch, number, causes)
                if account.tiers.open:  # more of it may come: it is counted when it has
                    continue
                rows[number] = account.row()
            if account.estimated:
                continue
            settled.append(number)
            namespaces.append(account.namespace)
            if account.kind != "cross":
                rows[number] = _of_kind(account)
        for number in np.flatnonzero(causes.evicted).tolist():
            account = batch.requests[number]
            assert account is not None
            since = float(idle[number])
            at = self.evictions.time_of(account.time - since)
            account.settled_evicted(since, None if at is None or at > account.time else at)
        self._count(rows[settled], namespaces, seconds[settled].astype(np.int64).tolist(), loaded)

    def _count(
        self,
        rows: Ints | list[list[int]],
        namespaces: list[Hashable],
        seconds: list[int],
        loaded: Sequence[tuple[RequestAccount, float]],
    ) -> None:
        """Adds rows of counts to the sums, and those of accounts that were settled before."""
        if loaded:
            late = [each.row() if each.kind == "cross" else _of_kind(each) for each, _ in loaded]
            rows = np.array([*rows, *late], np.int64)
            namespaces += [each.namespace for each, _ in loaded]
            seconds += [int(at - self._start) for _, at in loaded]
        self.counts.add(np.asarray(rows, np.int64), namespaces, seconds)

    def undo(self, item: Abandonment) -> None:
        """Forgets the tokens that only an abandoned prompt was to compute. O(tokens)."""
        account = item.account
        causes = account.found_causes()
        batch = self._hasher.hash([account.as_it_was(item.tokens)], 0, self._salts_of([account]))
        unknown = sum(causes[name] for name in ("namespace", "diverged", "cold"))
        if not causes["evicted"]:  # else it is after what others computed here
            unknown += causes["other_replica"]
        begin = max(account.prompt_tokens - unknown, item.computed)
        after = batch.borders.end > begin
        self._namespaces.forget(
            self._memory,
            batch.borders.hashes[after],
            int(batch.salts[0]),
            account.stamp,
            not causes["namespace"],
        )
        if not causes["diverged"]:
            after = batch.anchors.start + account.hit_tokens + WINDOW > begin
            self._contents.forget(batch.anchor_keys[after])

    def _near_miss(self, batch: Batch, number: int, causes: Causes) -> None:
        account = batch.requests[number]
        assert account is not None
        tokens, anchors = account.tokens, batch.anchors
        shared = _shared(batch, number, causes)
        cost = int(causes.diverged[number])
        if account.tiers is not None:  # what comes back costs nothing
            missed = [account.tiers.missed(*each) for each in _spans(shared, causes)]
            shared, cost = shared[np.array(missed) > 0], sum(missed)
            if cost < _NEAR_MISS_TOKENS:
                return
        sketch = np.sort(batch.anchor_keys[shared])[:SKETCH].tolist()
        after = int(anchors.start[shared[0]]) + account.hit_tokens
        divergence = account.divergence
        if divergence is None:
            # The other continuation was evicted; its remembered prefixes show where it began.
            position = min(int(causes.known_tokens[number]), after)
            divergence = Divergence.at(tokens[: after * TOKEN_BYTES], position, b"")
        self.near_misses.add(
            Sighting(
                account.namespace,
                sketch,
                cost,
                divergence.position,
                divergence.before,
                divergence.ours,
                divergence.theirs,
                tokens[after * TOKEN_BYTES : (after + SHOWN_TOKENS) * TOKEN_BYTES],
            )
        )


def _shared(batch: Batch, number: int, causes: Causes) -> Ints:
    """The anchors of a piece after which tokens count as diverged."""
    begin, end = np.searchsorted(batch.anchors.piece, (number, number + 1))
    return begin + np.flatnonzero(causes.shared[begin:end])


def _spans(anchors: Ints, causes: Causes) -> list[Span]:
    """The tokens after each of these anchors that count as diverged."""
    return list(zip(causes.begin[anchors].tolist(), causes.end[anchors].tolist(), strict=True))


def _diverged(batch: Batch, number: int, causes: Causes) -> list[Span]:
    return _spans(_shared(batch, number, causes), causes)


def _of_kind(account: RequestAccount) -> list[int]:
    """The counts of a sequence that is not a request's first: they change no rate."""
    row = [0] * len(FIELDS)
    row[_COLUMN[f"{account.kind}_tokens"]] = account.prompt_tokens
    hit = account.hit_tokens + sum(account.loaded.values())
    row[_COLUMN[f"{account.kind}_hit_tokens"]] = hit
    return row


def _block_tokens(pool_tokens: int) -> int:
    """Tokens of a block: fewer in small pools, where the memory for more blocks costs little."""
    if pool_tokens > 1 << 18:
        return 128
    if pool_tokens > 1 << 15:
        return 64
    return 32 if pool_tokens > 1 << 12 else 16
