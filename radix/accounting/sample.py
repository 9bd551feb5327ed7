"""Causes from a sample of token positions, for requests that come too fast to settle each.

Of each text the same places stand for all others (`PlaceFinder`), so that whether the prefix or
the content at one was seen before is known without remembering any other place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.counts import FIELDS, RollingCounts
from coppice.radix.accounting.log.account import RequestAccount
from coppice.radix.accounting.log.items import Abandonment, Growth, columns, note
from coppice.radix.accounting.miss_ratio import FACTORS
from coppice.radix.accounting.seen.content_table import ContentTable
from coppice.radix.accounting.seen.hashes import Hashes, Ints, keys
from coppice.radix.accounting.seen.namespaces import Namespaces
from coppice.radix.accounting.seen.places import PlaceFinder
from coppice.radix.accounting.seen.prefix_table import PrefixTable
from coppice.radix.accounting.shares import ESTIMATED

_LEAST_ENTRIES = 1 << 10
_SPARE = 1.25  # places of the tables for each entry, so that few sets overflow before all are full
_TICKS = 100  # stamps a second
_LAST = 2**32 - 1
# The hit part of one request of this many is seen again, so that what is in use stays remembered.
_REFRESHED = 16
_COLUMN = {name: column for column, name in enumerate(FIELDS)}
_LOGPROBS, _EVICTED, _NAMESPACE, _DIVERGED, _COLD = range(len(ESTIMATED))


@dataclass(frozen=True, slots=True)
class _Exact:
    """What is known of each item without looking it up. Arrays with a number for each."""

    rows: Ints  # counts, columns as in `FIELDS`
    at: Ints  # where the tokens begin whose causes are estimated
    limit: Ints  # from here on tokens are computed in any case
    rest: Ints  # how many these tokens are


class Sample:
    """Remembers the chosen places of all texts, and counts requests by them.

    Tokens that hit, and those with the causes `last_token`, `in_flight` and `other_replica`, are
    counted exactly. So is the number of all others; their causes are those of the chosen places
    among them.
    """

    def __init__(
        self, pool_tokens: int, counts: RollingCounts, start: float, seed: int | None = None
    ) -> None:
        """`counts` gets the requests; times are in seconds, windows begin at `start`."""
        every = _every(pool_tokens)
        remembered = max(_LEAST_ENTRIES, round(_SPARE * FACTORS[-1]) * pool_tokens // every)
        self._counts = counts
        self._start = start
        self._places = PlaceFinder(every, seed)
        self._namespaces = Namespaces()
        self._memory = PrefixTable(remembered)
        self._contents = ContentTable(remembered)
        self._serial = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of what was seen."""
        return self._memory.nbytes + self._contents.nbytes

    def forget(self) -> None:
        """What was seen counts as never seen."""
        self._memory.clear()
        self._contents.clear()

    def process(self, items: list[RequestAccount | Growth]) -> None:
        """Sees what requests computed, and counts those with `estimated`. O(tokens after hits)."""
        read = columns(items, self._serial, _REFRESHED)
        self._serial += len(items)
        owners = read.owners
        seconds = np.array(read.times) - self._start
        exact = _exact(np.frombuffer(read.numbers, np.int64).reshape(-1, 5))
        places = self._places.find(read.texts, read.begins)
        piece = places.piece
        salts = np.array(self._namespaces.salts([each.namespace for each in owners]), np.uint64)
        stamps = np.minimum(seconds * _TICKS + 1, _LAST).astype(np.uint64)
        own = keys(places.prefixes, salts[piece])
        seen, elsewhere = self._namespaces.see(
            self._memory, own, places.prefixes, salts[piece], piece, stamps[piece]
        )
        # If a prefix was seen, so were all shorter ones, though some of them may be forgotten.
        seen = _latest_from(seen, piece)
        known = self._contents.see(keys(places.contents, salts[piece]), piece)
        cause = np.where(known, _DIVERGED, _COLD)
        if elsewhere is not None:
            cause[elsewhere > 0] = _NAMESPACE
        cause[(seen > 0) & (places.position >= exact.limit[piece])] = _LOGPROBS
        cause[(seen > 0) & (places.position < exact.limit[piece])] = _EVICTED
        counted = (places.position >= exact.at[piece]) & (exact.rest[piece] > 0)
        idle = np.maximum(seconds[piece] - (seen.astype(np.float64) - 1) / _TICKS, 0.0)
        elsewhere_too = np.zeros(len(piece), np.bool_) if elsewhere is None else elsewhere > 0
        self._note(items, piece, places.position, seen > 0, known | elsewhere_too, stamps)
        found = np.flatnonzero(counted)
        sampled = np.zeros((len(items), len(ESTIMATED)), np.int64)
        np.add.at(sampled, (piece[found], cause[found]), 1)
        away = np.zeros(len(items))
        np.add.at(away, piece[found], np.where(cause == _EVICTED, idle, 0.0)[found])
        self._counts.add_groups(cause[found], places.group[found])
        if numbers := read.counted:
            for number in numbers:
                account = owners[number]
                if account.kind != "cross":
                    row = exact.rows[number]
                    row[_COLUMN[f"{account.kind}_tokens"]] = account.prompt_tokens
                    row[_COLUMN[f"{account.kind}_hit_tokens"]] = account.hit_tokens
            self._counts.add_estimated(
                exact.rows[numbers],
                sampled[numbers],
                away[numbers],
                [owners[number].namespace for number in numbers],
                seconds[numbers].astype(np.int64).tolist(),
            )

    def _note(
        self,
        items: list[RequestAccount | Growth],
        piece: Ints,
        position: Ints,
        seen: NDArray[np.bool_],
        known: NDArray[np.bool_],
        stamps: Hashes,
    ) -> None:
        """Keeps in the accounts what `undo` needs."""
        note(items, stamps.tolist())
        # Alike for all, so that what others have cached does not show in how long it takes.
        reached = np.where(seen, position + 1, 0)
        for number, tokens, more in zip(
            piece.tolist(), reached.tolist(), known.tolist(), strict=True
        ):
            item = items[number]
            if isinstance(item, RequestAccount):
                item.seen_at(tokens, more)

    def undo(self, item: Abandonment) -> None:
        """Forgets the places that only an abandoned prompt was to compute. O(tokens)."""
        account = item.account
        places = self._places.find([item.tokens], [account.hit_tokens])
        (salt,) = self._namespaces.salts([account.namespace])
        after = places.position >= max(item.computed, account.seen_tokens)
        if not after.any():
            return
        alone = not account.known_more
        self._namespaces.forget(
            self._memory, places.prefixes[after], salt, account.sampled_at, alone
        )
        if alone:
            self._contents.forget(keys(places.contents[after], np.uint64(salt)))


def _latest_from(stamps: Hashes, piece: Ints) -> Hashes:
    """For each row, the greatest stamp from it to the last row of its piece."""
    if not len(stamps):
        return stamps
    # Counted up from the last piece, in the upper half, the piece keeps stamps from passing on.
    words = (piece[-1] - piece).astype(np.uint64) << np.uint64(32) | stamps
    latest: Hashes = np.maximum.accumulate(words[::-1])[::-1] & np.uint64(_LAST)
    return latest


def _every(pool_tokens: int) -> int:
    """Tokens for each chosen place: fewer in small pools, where more places cost little memory."""
    if pool_tokens > 1 << 16:
        return 1024
    if pool_tokens > 1 << 14:
        return 256
    return 64 if pool_tokens > 1 << 12 else 16


def _exact(columns: Ints) -> _Exact:
    """What is known without looking up; of an item with 0 tokens all is 0 (see `causes.split`)."""
    total, hit, in_flight, hit_limit, held = columns.T
    rows = np.zeros((len(total), len(FIELDS)), np.int64)
    counted = total > 0
    paid = np.minimum(hit + in_flight, total)
    last = total - paid == 1
    reached = np.where(last, total, paid)
    limit = np.maximum(reached, hit_limit)
    most = np.minimum(total - 1, hit_limit)
    held = np.minimum(held, total)
    other = np.maximum(np.minimum(held, limit), reached) - reached
    at = np.maximum(reached, held)
    again = at - np.minimum(at, limit)
    rest = total - at
    for name, values in (
        ("requests", counted),
        ("prompt_tokens", total),
        ("hit_tokens", hit),
        ("last_token", last),
        ("in_flight", in_flight),
        ("other_replica", other),
        ("prompt_logprobs", again),
        ("ideal_tokens", np.maximum(hit, np.minimum(np.maximum(paid, held), most))),
        ("estimated_tokens", rest),
    ):
        rows[:, _COLUMN[name]] = values * counted
    return _Exact(rows, at, limit, rest * counted)
