"""Which content was seen, in a table of fixed size: two bytes for each piece, and no times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.seen.growth import doublings, split_sets
from coppice.radix.accounting.seen.hashes import MAX_ROWS, ROW_MASK, Hashes, Ints, group_equal

_WAYS = 8
_HALF = np.uint64(32)
_MARK_BITS = np.uint64(16)
_MARK = np.uint64(2**16 - 1)
_MARK_SHIFT = np.uint64(MAX_ROWS.bit_length() - 1)  # marks are of the bits that `group_equal` keeps

_DOUBLINGS = 3
_CHOOSING = np.uint64((2**_DOUBLINGS - 1) << (16 - _DOUBLINGS))
_FILLED = 5 / 8  # of the entries: more than eight of five meet in 7 % of the sets

_SLICE = 8192  # keys that are looked up at once


class ContentTable:
    """A set-associative table of 16-bit fingerprints of 64-bit keys.

    The key's upper half chooses one of the sets of eight, held in two words. A new one pushes out
    the set's oldest, so a key is still known with a probability of 45 % after as many new ones as
    there are places, and of 95 % after half of these. One that is known is not moved, so it is
    forgotten and entered anew now and then. A key that was never entered is found with a
    probability of 2**-10 in a full table. It begins small and is doubled up to three times.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` fingerprints when it is full-grown, rounded up to whole sets."""
        if not 1 <= capacity < 2**34:
            raise ValueError(f"capacity must be in 1 .. 2**34 - 1, got {capacity}")
        sets = -(-capacity // _WAYS)
        self._most = doublings(sets, _DOUBLINGS)
        self._least = -(-sets >> self._most)
        self._doubled = 0
        self._new_keys = 0
        self._hold(np.empty((self._least, 2), np.uint64))
        self.clear()  # written once, so that no later write takes a page fault

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    def _hold(self, words: Hashes) -> None:
        self._words, self._sets = words, np.uint64(len(words))
        self._items = words.view("V16").reshape(-1)

    def clear(self) -> None:
        self._words[:] = 0
        self._new_keys = 0

    def _grow(self) -> None:
        """Doubles the sets if so many are filled that some overflow, unless it is full-grown."""
        while self._doubled < self._most and self._new_keys > _FILLED * _WAYS * len(self._words):
            lanes = self._words.view(np.uint16)
            upper = lanes >> np.uint16(15 - self._doubled) & np.uint16(1) > 0
            self._doubled += 1
            self._hold(split_sets(lanes, upper).view(np.uint64))

    def see(self, keys: Hashes, pieces: Ints) -> NDArray[np.bool_]:
        """Whether each key was seen before; and sees them all now.

        Row i has key `keys[i]` and comes from piece `pieces[i]`. Pieces follow one another: a row
        finds what earlier pieces of the call entered, but not its own piece's. O(n log n).
        """
        self._grow()
        ranked, leads = group_equal(keys)  # so sets are visited in the order of memory, too
        rows = (ranked & ROW_MASK).view(np.int64)
        begins = np.flatnonzero(leads)
        leaders = ranked[begins] if len(begins) < len(keys) else ranked
        known = np.concatenate(
            [self._enter(leaders[at : at + _SLICE]) for at in range(0, len(leaders), _SLICE)]
            or [leads]
        )
        if len(begins) < len(keys):
            # The first piece with a key finds what the table had, later ones what it has entered.
            first = pieces[rows[begins]]
            group = np.cumsum(leads) - 1
            known = known[group] | (pieces[rows] != first[group])
        seen = np.empty(len(keys), np.bool_)
        seen[rows] = known
        return seen

    def known(self, keys: Hashes) -> NDArray[np.bool_]:
        """Whether each key is in the table; enters none."""
        at, marks = self._places(keys)
        found = self._items.take(at).view(np.uint64).reshape(-1, 2)
        known: NDArray[np.bool_] = np.any(self._same(found, marks), axis=1)
        return known

    def _enter(self, keys: Hashes) -> NDArray[np.bool_]:
        """Whether each of some different keys, in order, is in the table; enters the others."""
        at, marks = self._places(keys)
        found = self._items.take(at).view(np.uint64).reshape(-1, 2)
        known = (self._same(found, marks).view(np.uint64) != 0).reshape(-1)
        new = np.flatnonzero(~known)
        self._new_keys += len(new)
        at, marks, words = at[new], marks[new], found[new]
        while len(at):
            words[:, 1] <<= _MARK_BITS
            words[:, 1] |= words[:, 0] >> np.uint64(48)
            words[:, 0] <<= _MARK_BITS
            words[:, 0] |= marks
            self._items[at] = words.view("V16").reshape(-1)
            # Of keys that met in a set only the last was entered; the others follow.
            late = np.flatnonzero(at[1:] == at[:-1])
            at, marks = at[late], marks[late]
            words = self._items.take(at).view(np.uint64).reshape(-1, 2)
        return known

    def forget(self, keys: Hashes) -> None:
        """The keys count as never seen. O(keys)."""
        at, marks = self._places(keys)
        for place, mark in zip(at.tolist(), marks.tolist(), strict=True):
            lanes = self._words[place].view(np.uint16)
            lanes[lanes == mark] = 0

    def _places(self, keys: Hashes) -> tuple[Ints, Hashes]:
        high = keys >> _HALF
        sets = high * self._sets
        sets >>= _HALF
        # The bits in front are those that choose sets when it has grown.
        marks = high * np.uint64(self._least) >> np.uint64(16) & _CHOOSING
        marks |= keys >> _MARK_SHIFT & ~_CHOOSING & _MARK
        return sets.view(np.int64), np.maximum(marks, np.uint64(1))

    @staticmethod
    def _same(words: Hashes, marks: Hashes) -> NDArray[np.bool_]:
        """Which of each set's fingerprints are the mark. Shape (n, 8)."""
        same: NDArray[np.bool_] = words.view(np.uint16) == marks.astype(np.uint16)[:, None]
        return same
