"""Making room in a folder: what is dropped, and what is written again before."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from coppice.runtime.tiers.disk.index import Entry, Index, is_full
from coppice.runtime.tiers.disk.record import record_bytes
from coppice.runtime.tiers.disk.segments import Segments

Moved = list[tuple[Entry, int, int]]
"""Pages, and the segment and offset where each is now."""


def no_room(error: Exception) -> bool:
    """Whether the disk is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, sqlite3.Error) and is_full(error)


def bytes_of(entry: Entry) -> int:
    """Bytes of a page's record."""
    return record_bytes(len(entry.key.tokens), entry.size)


def drop_oldest(index: Index, segments: Segments, room: int, piece: int) -> list[Entry] | None:
    """Drops the oldest segment, but for pages that were used since they were written.

    Those used last are written again, as far as they fill `room` bytes; in pieces of up to `piece`
    bytes. On a full disk none are. Returns the pages that are gone; None if nothing is left to
    drop.
    """
    oldest = next(iter(segments), None)
    if oldest is None:
        return None
    if oldest == segments.current:
        if not segments.size(oldest):
            return None
        segments.finish()
    kept: Moved = []
    entries = index.of_segment(oldest)
    try:
        for moved in rewritten(segments, _used_again(entries, room), piece):
            kept += moved
    except OSError as error:
        if not no_room(error):
            raise
    try:
        index.replace_segment(oldest, kept)
    except sqlite3.Error as error:
        if not is_full(error):
            raise
        segments.remove(oldest)  # that makes the room which the index needs
        index.shrink()
        index.replace_segment(oldest, kept)
    segments.remove(oldest)
    moved_keys = {entry.key for entry, *_ in kept}
    return [entry for entry in entries if entry.key not in moved_keys]


def _used_again(entries: Sequence[Entry], room: int) -> list[Entry]:
    """The pages of a segment that were used since they were written, as far as there is room."""
    wanted = []
    for entry in sorted(entries, key=lambda each: -each.used):
        if entry.again and (size := bytes_of(entry)) <= room:
            wanted.append(entry)
            room -= size
    return wanted


def rewritten(segments: Segments, entries: Sequence[Entry], piece: int) -> Iterator[Moved]:
    """Writes pages at the end once more, in pieces of up to `piece` bytes, and gives their places.

    Those that are damaged are left out. Nothing is removed, nor indexed.
    """
    for size, alike in groupby(sorted(entries, key=lambda each: each.size), lambda e: e.size):
        waiting: list[Entry] = []
        filled = 0
        for entry in alike:
            if waiting and filled + bytes_of(entry) > piece:
                yield _rewrite(segments, waiting, size)
                waiting, filled = [], 0
            waiting.append(entry)
            filled += bytes_of(entry)
        yield _rewrite(segments, waiting, size)


def _rewrite(segments: Segments, entries: list[Entry], size: int) -> Moved:
    pages = np.empty((len(entries), size), np.uint8)
    right = [read(segments, entry, row) for entry, row in zip(entries, pages, strict=True)]
    there = [entry for entry, good in zip(entries, right, strict=True) if good]
    if not there:
        return []
    places = segments.append([each.key for each in there], pages[right])
    return [(entry, *place) for entry, place in zip(there, places, strict=True)]


def read(segments: Segments, entry: Entry, row: np.ndarray) -> bool:
    """Reads a page to `row`; returns whether it is as it was written. Raises OSError."""
    return segments.read(entry.segment, entry.offset, *entry.key, entry.size, row)
