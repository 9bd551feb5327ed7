"""What was ever seen, in a table of fixed size: which keys, and the last stamp of each."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.seen.growth import doublings, split_sets
from coppice.radix.accounting.seen.hashes import ROW_MASK, Hashes, Ints, group_equal

_WAYS = 4
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_MARK = 0 if sys.byteorder == "little" else 1  # the half of an entry with the key's mark
_SLICE = 2048  # keys that are looked up at once
_MARK_BITS = 32
_DOUBLINGS = 6
_CHOOSING = np.uint64((2**_DOUBLINGS - 1) << (_MARK_BITS - _DOUBLINGS))
_FILLED = 3 / 8  # of the entries: more than four of 1.5 meet in 2 % of the sets


class PrefixTable:
    """A set-associative table of 64-bit keys and the stamp each was seen with last.

    An entry is one word: the stamp in the upper half, the key's lower half as a fingerprint in the
    lower. The key's upper half chooses one of `num_sets` sets of four entries, most recent first;
    a new one pushes out the last. A key that was never entered is found with a probability of
    2**-23. The memory is 32 bytes for each set. It begins small and is doubled up to six times, as
    entries fill it.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` entries when it is full-grown, rounded up to whole sets."""
        if not 1 <= capacity < 2**34:
            raise ValueError(f"capacity must be in 1 .. 2**34 - 1, got {capacity}")
        sets = -(-capacity // _WAYS)
        self._most = doublings(sets, _DOUBLINGS)
        self._least = -(-sets >> self._most)
        self._doubled = 0
        self._new_keys = 0
        self._hold(np.empty((self._least, _WAYS), np.uint64))
        self.clear()  # written once, so that no later write takes a page fault
        # Where entries are worked on, kept, since fresh memory costs more than its use.
        self._taken = np.empty((_SLICE, _WAYS), np.uint64)
        self._taken_items = _as_items(self._taken)
        self._old = np.empty((_WAYS, _SLICE), np.uint64)
        self._new = np.empty((_SLICE, _WAYS), np.uint64)
        self._new_items = _as_items(self._new)

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes

    def _hold(self, entries: Hashes) -> None:
        self._entries, self._sets = entries, np.uint64(len(entries))
        self._items = _as_items(entries)

    def clear(self) -> None:
        self._entries[:] = 0
        self._new_keys = 0

    def _grow(self) -> None:
        """Doubles the sets if so many are filled that some overflow, unless it is full-grown."""
        while self._doubled < self._most and self._new_keys > _FILLED * self._entries.size:
            entries = self._entries
            # A set becomes two; the mark's next bit tells which of them an entry belongs to.
            upper = entries >> np.uint64(_MARK_BITS - 1 - self._doubled) & np.uint64(1) > 0
            self._doubled += 1
            self._hold(split_sets(entries, upper))

    def see(
        self, keys: Hashes, pieces: Ints, stamps: Hashes, writes: NDArray[np.bool_] | None = None
    ) -> Hashes:
        """The stamp each key was seen with before, 0 if it was not; and sees them now.

        Row i has key `keys[i]`, comes from piece `pieces[i]` and is seen with `stamps[i]` (1 ..
        2**32 - 1). Pieces follow one another, and among rows with equal keys neither they nor the
        stamps decrease: a row finds what earlier pieces of the call entered, but not its own
        piece's. Rows with `writes` false are looked up but not entered. O(n log n).
        """
        if not len(keys):
            return np.zeros(0, np.uint64)
        self._grow()
        ranked, leads = group_equal(keys)  # so sets are visited in the order of memory, too
        ranked &= ROW_MASK
        rows = ranked.view(np.int64)
        if writes is not None:
            stamps = np.where(writes, stamps, np.uint64(0))
        begins = np.flatnonzero(leads)
        leaders = keys[rows[begins]]
        found = np.empty(len(keys), np.uint64)
        if len(begins) == len(keys):
            found[rows] = self._exchange(leaders, stamps[rows])
            return found

        # Of several equal keys all but the first find the last one that was entered before. Stamps
        # do not decrease, so that one's is the highest; counted up in the upper half, the key keeps
        # the maximum from passing on to the next.
        group = np.cumsum(leads) - 1
        highest = group.view(np.uint64) << _HALF
        highest |= stamps[rows]
        np.maximum.accumulate(highest, out=highest)
        highest &= _LOW
        before = np.empty(len(keys), np.uint64)
        before[1:] = highest[:-1]
        before[begins] = 0
        ends = np.append(begins[1:], len(keys)) - 1
        np.maximum(before, self._exchange(leaders, highest[ends])[group], out=before)
        piece = pieces[rows]
        again = np.flatnonzero((piece[1:] == piece[:-1]) & ~leads[1:])
        if len(again):
            # Rows of one key in one piece find what the first of them found.
            leads[1:] |= piece[1:] != piece[:-1]
            before = before[leads][np.cumsum(leads) - 1]
        found[rows] = before
        return found

    def known(self, keys: Hashes) -> Hashes:
        """The stamp each key was seen with last, 0 if it was not; enters none."""
        entries = self._entries[self._places(keys)]
        same = entries & _LOW == self._marks(keys)[:, None]
        found: Hashes = np.where(same, entries >> _HALF, np.uint64(0)).max(axis=1, initial=0)
        return found

    def forget(self, keys: Hashes, stamp: int) -> None:
        """Those of the keys that were seen last with `stamp` count as never seen. O(keys)."""
        at = self._places(keys)
        values = self._marks(keys) | np.uint64(stamp << 32)
        row, way = np.nonzero(self._entries[at] == values[:, None])
        self._entries[at[row], way] = 0

    def _places(self, keys: Hashes) -> Ints:
        sets = keys >> _HALF
        sets *= self._sets
        sets >>= _HALF
        return sets.view(np.int64)

    def _marks(self, keys: Hashes) -> Hashes:
        """The lower half of each key, with the bits in front that choose sets when it has grown."""
        marks = (keys >> _HALF) * np.uint64(self._least)
        marks &= _CHOOSING
        marks |= keys & ~_CHOOSING & _LOW
        return marks

    def _exchange(self, keys: Hashes, stamps: Hashes) -> Hashes:
        """The stamps of different keys, in order of their sets; enters those with one not 0."""
        at = self._places(keys)
        marks = self._marks(keys)
        found = np.empty(len(keys), np.uint64)
        for begin in range(0, len(keys), _SLICE):
            part = slice(begin, begin + _SLICE)
            found[part] = self._exchange_slice(at[part], marks[part], stamps[part])
        self._new_keys += len(keys) - int(np.count_nonzero(found))
        # Of keys that met in a set only the last was entered; the others follow.
        late = np.flatnonzero(at[1:] == at[:-1])
        while len(late):
            for begin in range(0, len(late), _SLICE):
                turn = late[begin : begin + _SLICE]
                self._exchange_slice(at[turn], marks[turn], stamps[turn])
            late = late[:-1][at[late[1:]] == at[late[:-1]]]
        return found

    def _exchange_slice(self, at: Ints, marked: Hashes, stamps: Hashes) -> Hashes:
        """The same for marks of the sets `at`; of those in one set only the last is entered."""
        count = len(at)
        np.take(self._items, at, out=self._taken_items[:count], mode="clip")
        old, new = self._old[:, :count], self._new[:count]
        old[:] = self._taken[:count].T
        halves = old.view(np.uint32)
        marks = marked.astype(np.uint32)
        value = stamps << _HALF
        value |= marked
        # The entries before the key's own, or all but the last, move down a place.
        new[:, 0] = value
        met = halves[0, _MARK::2] == marks
        found = old[0] * met
        for way in range(1, _WAYS):
            new[:, way] = np.where(met, old[way], old[way - 1])
            same = halves[way, _MARK::2] == marks
            found += old[way] * same
            met |= same
        if stamps.all():
            self._items[at] = self._new_items[:count]
        else:
            entered = np.flatnonzero(stamps)
            self._items[at[entered]] = self._new_items[entered]
        found >>= _HALF
        return found


def _as_items(sets: Hashes) -> NDArray[np.void]:
    """The sets as single items, which numpy copies whole."""
    return sets.view(f"V{8 * _WAYS}").reshape(-1)
