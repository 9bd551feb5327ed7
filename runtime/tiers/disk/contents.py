"""What a folder has, for people who look at it, while a server writes to it or none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coppice.radix.mirror.names import NAME_BYTES
from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.tiers.disk.folder import content, index_bytes, older, owner, read_index
from coppice.runtime.tiers.disk.index import Counts, Entry, Index
from coppice.runtime.tiers.disk.record import VERSION
from coppice.runtime.tiers.disk.room import read
from coppice.runtime.tiers.disk.segments import Segments

_SHOWN = 8  # tokens that show how a prefix begins


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages that follow each other without a branch, and what leads to them.

    Attributes:
        length: tokens from the first one of the prompt to the last one of these pages; from the
            first that the folder still has, if `whole` is not.
        tokens: of these pages alone.
        pages, size: how many, and their bytes.
        hits: how often the page was used that was used most.
        used: when one was used last, in seconds since 1970; None: never.
        next: how many prefixes follow, and go on differently.
        starts: the first tokens of the first of these pages, up to eight.
        name: of the last page, in hexadecimal digits.
        parent: name of what lies before these pages: of the page before, or of the root.
        after: whether the page before is in the folder; else they begin a prompt, or what was
            before is gone.
    """

    length: int
    tokens: int
    pages: int
    size: int
    hits: int
    used: float | None
    next: int
    starts: list[int]
    name: str
    parent: str
    after: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """A folder in figures; sizes in bytes.

    Attributes:
        version: of the format.
        owner: number of the process that has the folder, None if none has.
        pages, tokens, size, hits: of all pages that are indexed.
        segments, segment_size: files with pages, and their bytes.
        empty_segments: those of which nothing is indexed.
        index_size: of the index.
        models: the same for each size of pages, which models of different shapes do not share.
        older: folders that older versions have left, and their bytes.
    """

    version: int
    owner: str | None
    pages: int
    tokens: int
    size: int
    hits: int
    segments: int
    segment_size: int
    empty_segments: int
    index_size: int
    models: list[Counts]
    older: dict[str, int]


@dataclass(frozen=True, slots=True)
class Damage:
    """A page that can't be read as it was written, and where it should be."""

    file: str
    offset: int
    tokens: int
    size: int
    missing: bool  # the file, not only the page


def totals(folder: Path) -> Totals:
    """The figures of a folder. O(pages). Raises as `read_index` does, and OSError."""
    with closing(read_index(folder)) as index:
        counts, indexed = index.counts(), index.segments()
    segments = Segments(content(folder), 0)
    return Totals(
        version=VERSION,
        owner=owner(content(folder)),
        pages=sum(each.pages for each in counts),
        tokens=sum(each.tokens for each in counts),
        size=sum(each.pages * each.size for each in counts),
        hits=sum(each.hits for each in counts),
        segments=sum(1 for _ in segments),
        segment_size=segments.used,
        empty_segments=sum(segment not in indexed for segment in segments),
        index_size=index_bytes(folder),
        models=counts,
        older={path.name: bytes_below(path) for path in older(folder)},
    )


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def damages(folder: Path) -> Iterator[Damage | None]:
    """Reads every page; gives what is wrong with it, None for one that is right.

    Pages that a server moves or removes meanwhile are no damage. O(bytes). Raises as `read_index`
    does, and OSError.
    """
    segments = Segments(content(folder), 0)
    with closing(read_index(folder)) as index:
        for segment in sorted(index.segments()):
            row = np.empty(0, np.uint8)
            for entry in index.of_segment(segment):
                if entry.size != len(row):
                    row = np.empty(max(0, entry.size), np.uint8)
                if read(segments, entry, row) or not _still_there(index, entry):
                    yield None
                    continue
                path = segments.path(segment)
                yield Damage(
                    path.name, entry.offset, entry.key.length, entry.size, not path.is_file()
                )
    segments.close()


def _still_there(index: Index, entry: Entry) -> bool:
    [now] = index.find([entry.key])
    return now is not None and (now.segment, now.offset) == (entry.segment, entry.offset)


def prefixes(folder: Path, most: int) -> tuple[list[Prefix], int]:
    """Up to `most` prefixes, those used most first, and how many there are.

    O(pages log pages) time, about 150 bytes of memory a page. Raises as `read_index` does.
    """
    with closing(read_index(folder)) as index:
        pages = _Pages(index.entries())
    return pages.prefixes(most)


class _Pages:
    """All pages of an index as columns, and which of them follow which."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        names, parents, starts = bytearray(), bytearray(), bytearray()
        figures: list[tuple[int, int, int, int]] = []
        for entry in entries:
            names += entry.key.name
            parents += entry.key.parent[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
            begin = entry.key.tokens[: _SHOWN * TOKEN_BYTES]
            starts += begin[: len(begin) // TOKEN_BYTES * TOKEN_BYTES].ljust(
                _SHOWN * TOKEN_BYTES, b"\xff"
            )
            figures.append((entry.key.length, entry.size, entry.hits, entry.used))
        self._names = np.frombuffer(names, f"S{NAME_BYTES}")
        self._parents = np.frombuffer(parents, f"S{NAME_BYTES}")
        self._starts = np.frombuffer(starts, np.int32).reshape(-1, _SHOWN)
        columns = np.array(figures, np.int64).reshape(-1, 4).T
        self._tokens, self._sizes, self._hits, self._used = columns
        self._before = self._pages_before()

    def _pages_before(self) -> np.ndarray:
        """The page before each, -1 if the folder does not have it."""
        if not len(self._names):
            return np.empty(0, np.int64)
        order = np.argsort(self._names)
        at = np.searchsorted(self._names[order], self._parents)
        found = order[np.minimum(at, len(order) - 1)]
        before: np.ndarray = np.where(self._names[found] == self._parents, found, -1)
        return before

    def prefixes(self, most: int) -> tuple[list[Prefix], int]:
        """See the function of that name."""
        count, before = len(self._names), self._before
        has = before >= 0
        followers = np.bincount(before[has], minlength=count)
        first = ~has | (followers[before] != 1)  # where a prefix begins
        lengths = _summed(self._tokens, before)
        head = _heads(before, first)
        [heads] = np.nonzero(first)
        hits = np.zeros(count, np.int64)
        np.maximum.at(hits, head, self._hits)
        used = np.zeros(count, np.int64)
        np.maximum.at(used, head, self._used)
        [ends] = np.nonzero(followers != 1)
        end = np.zeros(count, np.int64)
        end[head[ends]] = ends
        tokens = np.bincount(head, self._tokens, count).astype(np.int64)
        pages = np.bincount(head, minlength=count)
        sizes = np.bincount(head, self._sizes, count).astype(np.int64)
        order = np.lexsort((-tokens[heads], -used[heads], -hits[heads]))[:most]
        shown = []
        for at in heads[order]:
            starts = self._starts[at]
            shown.append(
                Prefix(
                    length=int(lengths[end[at]]),
                    tokens=int(tokens[at]),
                    pages=int(pages[at]),
                    size=int(sizes[at]),
                    hits=int(hits[at]),
                    used=int(used[at]) / 1e6 if used[at] else None,
                    next=int(followers[end[at]]),
                    starts=[int(each) for each in starts if each >= 0],
                    name=self._hex(self._names[end[at]]),
                    parent=self._hex(self._parents[at]),
                    after=bool(has[at]),
                )
            )
        return shown, len(heads)

    @staticmethod
    def _hex(name: bytes) -> str:
        return bytes(name).ljust(NAME_BYTES, b"\0").hex()  # numpy drops zeros at the end


def _summed(values: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Of each page, the sum of its own value and those of all before. O(n log longest)."""
    total, above = values.copy(), before.copy()
    for _ in range(_rounds(len(values))):
        [going] = np.nonzero(above >= 0)
        if not len(going):
            break
        total[going] += total[above[going]]
        above[going] = above[above[going]]
    return total


def _heads(before: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The first page of the prefix that each page is in. O(n log longest)."""
    head = np.where(first, np.arange(len(before)), before)
    for _ in range(_rounds(len(before))):
        head = head[head]
    return head


def _rounds(count: int) -> int:
    """How often a step that doubles the distance can be of use."""
    return max(1, count).bit_length()
