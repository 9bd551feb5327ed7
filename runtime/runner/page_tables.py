"""What the device has of page tables, so that each step sends only what has changed.

The page tables of running sequences lie in one line of int32 on the device, each in a place of its
own with room to grow. In a decoding step one of them gets an entry in every `page_size` tokens; all
others stay as they are. What is known here of a place is compared with the table that a step needs,
entry by entry: so nothing depends on who has used a place before, nor on whose it is called.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from coppice.radix.tokens import TOKEN_BYTES, common_prefix

# The fewest entries of a place. Places double as tables grow.
_LEAST = 64

#: Entries of all places together: 16 MiB.
MOST_ENTRIES = 2**22

#: Where the table of a sequence that pads a step begins: it has the spare page alone.
PADDING = 0


class Placed(NamedTuple):
    """Page tables of a step: where they begin, int32 [B], and what changes, int32 [c] each."""

    start: np.ndarray
    places: np.ndarray
    pages: np.ndarray


@dataclass(slots=True)
class _Place:
    begin: int
    room: int
    table: bytes = b""
    step: int = 0  # the last that had it


@dataclass(slots=True)
class PageTables:
    """Places of page tables in a line of `entries`.

    `place` assumes that everything it returned before has been written, or will be before what it
    returns now. Call `forget` when that may not be so. Entry `PADDING` is not given away.
    """

    entries: int
    _places: dict[int, _Place] = field(default_factory=dict)
    _free: dict[int, list[int]] = field(default_factory=dict)  # begins of free places, by room
    _end: int = PADDING + 1
    _step: int = 0
    _last: tuple[Seq[object], Seq[bytes], np.ndarray] | None = None

    def forget(self) -> None:
        """Takes nothing for written."""
        self._places.clear()
        self._free.clear()
        self._end, self._last = PADDING + 1, None

    def place(self, sequences: Seq[object], tables: Seq[bytes]) -> Placed | None:
        """Places for the page tables (int32 as bytes) of a step; None: there is no room.

        `sequences` are distinct objects. A table whose sequence was in a step before, in the same
        place, is sent from where it differs on. O(bytes) at memcmp speed, with little Python for
        each sequence whose table has changed.
        """
        self._step += 1
        which: Seq[int] = range(len(tables))
        start = np.zeros(len(tables), np.int32)
        if self._last is not None and self._last[0] == sequences:
            _, before, start = self._last
            changed = zip(which, tables, before, strict=True)
            which = [index for index, new, old in changed if new != old]
            if any(len(tables[index]) > self._room(sequences[index]) for index in which):
                which, start = range(len(tables)), np.zeros(len(tables), np.int32)
        if len(which) == len(tables):
            for sequence in sequences:
                if (place := self._places.get(id(sequence))) is not None:
                    place.step = self._step
        found: list[tuple[int, bytes]] = []
        for again in (False, True):
            if again:
                self.forget()
                which, found = range(len(tables)), []
            if all(self._write(sequences[i], tables[i], i, start, found) for i in which):
                break
        else:
            self.forget()
            return None
        self._last = sequences, tables, start
        written = [
            np.arange(begin, begin + len(new) // TOKEN_BYTES, dtype=np.int32)
            for begin, new in found
        ]
        places = np.concatenate(written) if written else np.zeros(0, np.int32)
        pages = np.frombuffer(b"".join(new for _, new in found), np.int32)
        return Placed(start, places, pages)

    def _room(self, sequence: object) -> int:
        """Bytes of a sequence's place."""
        return self._places[id(sequence)].room * TOKEN_BYTES

    def _write(
        self,
        sequence: object,
        table: bytes,
        index: int,
        start: np.ndarray,
        found: list[tuple[int, bytes]],
    ) -> bool:
        """Find or make the sequence's place; what is to be written there goes to `found`."""
        key, length = id(sequence), len(table) // TOKEN_BYTES
        place = self._places.get(key)
        if place is not None and length > place.room:
            self._free.setdefault(place.room, []).append(place.begin)
            del self._places[key]
            place = None
        if place is None:
            room = max(_LEAST, 1 << (length - 1).bit_length())
            begin = self._take(room)
            if begin is None:
                return False
            place = self._places[key] = _Place(begin, room)
        place.step = self._step
        start[index] = place.begin
        if place.table != table:
            same = common_prefix(place.table, 0, table) // TOKEN_BYTES
            if same < length:
                found.append((place.begin + same, table[same * TOKEN_BYTES :]))
            place.table = table
        return True

    def _take(self, room: int) -> int | None:
        """The begin of a free place; those of sequences that are not in this step may be taken."""
        free = self._free.get(room)
        if not free and self._end + room > self.entries:
            for key, place in list(self._places.items()):
                if place.step != self._step:
                    self._free.setdefault(place.room, []).append(place.begin)
                    del self._places[key]
            free = self._free.get(room)
        if free:
            return free.pop()
        if self._end + room > self.entries:
            return None
        self._end += room
        return self._end - room


def entries_for(most_rows: int, max_pages: int) -> int:
    """Entries that page tables of a step of `most_rows` sequences may need at most, within reason.

    Each has up to `max_pages` pages, and its place up to twice as many.
    """
    room = max(_LEAST, 1 << (max_pages - 1).bit_length())
    return min(PADDING + 1 + 2 * most_rows * room, MOST_ENTRIES)
