"""Makes the folder of a disk tier smaller, while no server has it."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coppice.runtime.tiers.disk.contents import bytes_below
from coppice.runtime.tiers.disk.folder import (
    FolderLock,
    content,
    no_cache,
    older,
    open_index,
)
from coppice.runtime.tiers.disk.index import Entry, Index
from coppice.runtime.tiers.disk.room import drop_oldest, read
from coppice.runtime.tiers.disk.segments import Segments
from coppice.runtime.tiers.disk.store import segment_bytes


@dataclass(frozen=True, slots=True)
class Tidied:
    """What was removed.

    Attributes:
        older: folders of older versions.
        segments: files with pages.
        damaged: pages that could not be read as they were written; only if all were read.
        pages: others.
        freed: bytes, of all files.
    """

    older: int
    segments: int
    damaged: int
    pages: int
    freed: int


def tidy(folder: Path, most: int | None = None, *, verify: bool = False) -> Tidied:
    """Removes what no server will use, and the oldest pages beyond `most` bytes of them.

    Pages that were used since they were written stay longer: they are written again, while others
    go. `verify`: reads every page, and removes those that are damaged; O(bytes), else O(pages).

    Raises ValueError if there is no cache, FolderInUse if a server has it, OSError and
    sqlite3.Error.
    """
    inside = content(folder)
    if not inside.is_dir():
        raise no_cache(folder)
    before = bytes_below(folder)
    lock = FolderLock(inside)
    try:
        old = older(folder)
        for path in old:
            shutil.rmtree(path)
        limit = segment_bytes(most if most is not None else before)
        segments = Segments(inside, limit)
        files = set(segments)
        with closing(open_index(inside, segments)) as index:
            pages = _count(index)
            damaged = _remove_damaged(index, segments) if verify else 0
            indexed = index.segments()
            for segment in files - set(indexed):
                segments.remove(segment)
            while most is not None and segments.used > most:
                if drop_oldest(index, segments, limit // 2, limit) is None:
                    break
            left = _count(index)
            index.compact()
        kept = files & set(segments)
        segments.close()
    finally:
        lock.release()
    return Tidied(
        older=len(old),
        segments=len(files - kept),
        damaged=damaged,
        pages=pages - damaged - left,
        freed=max(0, before - bytes_below(folder)),
    )


def _count(index: Index) -> int:
    return sum(each.pages for each in index.counts())


def _remove_damaged(index: Index, segments: Segments) -> int:
    """Reads all pages and removes those that are not as they were written; returns how many."""
    wrong: list[Entry] = []
    for segment in sorted(index.segments()):
        for entry in index.of_segment(segment):
            if not read(segments, entry, np.empty(max(0, entry.size), np.uint8)):
                wrong.append(entry)
    return index.remove(wrong)
