"""What was ever seen, in a table of fixed size: which keys, and when each was seen last."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from coppice.radix.hashes import Hashes, Ints

_WAYS = 4
_LOW = np.uint64(2**32 - 1)
_MARK = 0 if sys.byteorder == "little" else 1  # the half of an entry with the key's mark
# In the sort that finds equal keys of a batch, the row's number takes the place of so many bits.
_ROW_BITS = 23
_READER = np.uint64(1 << _ROW_BITS)
_ROW = np.uint64((1 << _ROW_BITS) - 1)
MAX_ROWS = 1 << _ROW_BITS
"""Keys that one call of `SeenTable.see` can take."""


class SeenTable:
    """A set-associative table of 64-bit keys and the time each was seen last.

    An entry is one word: the time in the upper half, the key's lower half as a fingerprint in the
    lower. The key's upper half chooses one of `num_sets` sets of four entries; in a full set the
    entry seen longest ago gives way. A key that was never entered is found with a probability of
    2**-29, and 32 bytes a set is all the memory there is.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` entries, rounded up to whole sets."""
        if not 1 <= capacity < 2**34:
            raise ValueError(f"capacity must be in 1 .. 2**34 - 1, got {capacity}")
        self._sets = np.uint64(-(-capacity // _WAYS))
        self._entries = np.empty((int(self._sets), _WAYS), np.uint64)
        self.clear()  # written, so that no page of it has to be found later
        self._flat = self._entries.reshape(-1)

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes

    def clear(self) -> None:
        self._entries[:] = 0

    def see(
        self, keys: Hashes, pieces: Ints, times: Hashes, writes: NDArray[np.bool_] | None = None
    ) -> Hashes:
        """When each key was seen before, 0 if it was not; and sees them now.

        Row i has key `keys[i]`, comes from piece `pieces[i]` and is seen at `times[i]` (1 ..
        2**32 - 1, not decreasing with the piece). Pieces follow one another: a row finds what
        earlier pieces of the call entered, but not its own piece's. Of equal keys that are entered,
        the row of the earlier piece comes first. Rows with `writes` false only look. O(n log n).
        """
        if len(keys) > MAX_ROWS:
            raise ValueError(f"keys: at most {MAX_ROWS} a call, got {len(keys)}")
        sets = (keys >> 32) * self._sets
        sets >>= 32
        at = sets.view(np.int64)
        marks = keys & _LOW
        entries = self._entries.take(at, axis=0)
        same = (entries.view(np.uint32)[:, _MARK::2]) == marks.astype(np.uint32)[:, None]
        found = same.view(np.uint32)[:, 0] != 0
        # Where to write: over itself, or over the entry seen longest ago.
        entries[same] = 0
        at = at * _WAYS + entries.argmin(axis=1)
        values = times << np.uint64(32) | marks
        seen = np.zeros(len(keys), np.uint64)
        old = np.flatnonzero(found)
        if len(old):
            place = at[old]
            seen[old] = self._flat[place] >> 32
            if writes is not None:
                old = old[writes[old]]
                place = at[old]
            self._flat[place] = values[old]
        new = np.flatnonzero(~found)
        if len(new):
            first = _first_writers(keys[new], None if writes is None else writes[new])
            source = new[first]
            known = (first >= 0) & (pieces[source] < pieces[new])
            seen[new[known]] = times[source[known]]
            self._enter(new[(first >= 0) & (source == new)], at, values)
        return seen

    def _enter(self, rows: Ints, at: Ints, values: Hashes) -> None:
        place = at[rows]
        self._flat[place] = values[rows]
        # Rows that met in one entry have overwritten each other; who was overwritten tries again.
        for _ in range(_WAYS):
            lost = self._flat[place] != values[rows]
            rows, place = rows[lost], place[lost]
            if not len(rows):
                return
            sets = place // _WAYS
            place = sets * _WAYS + self._entries.take(sets, axis=0).argmin(axis=1)
            self._flat[place] = values[rows]


def _first_writers(keys: Hashes, writes: NDArray[np.bool_] | None) -> Ints:
    """For each row the first row with the same key that writes; -1 if none does."""
    numbers = np.arange(len(keys), dtype=np.uint64)
    if writes is not None:
        numbers |= np.where(writes, np.uint64(0), _READER)
    # Equal keys get together, writers first, in order: one sort of single words.
    ranked = (keys & ~(_READER | _ROW)) | numbers
    ranked.sort()
    begins = np.ones(len(ranked), np.bool_)
    begins[1:] = (ranked[1:] ^ ranked[:-1]) > (_READER | _ROW)
    leaders = ranked[begins]
    leader = np.where(leaders & _READER, -1, (leaders & _ROW).astype(np.int64))
    first = np.empty(len(keys), np.int64)
    first[(ranked & _ROW).astype(np.int64)] = leader[np.cumsum(begins) - 1]
    return first
