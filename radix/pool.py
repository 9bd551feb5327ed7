"""The pool of KV pages: ids with reference counts, handed out in runs where it can."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from coppice.radix.out_of_pages import OutOfPages

_ONE = array("i", [1])

# From this many pages on, numpy's vector operations beat a Python loop.
_VECTOR = 48

# From so many runs on the counts of all pages are changed at once, not run by run.
_MANY_RUNS = 6


class PagePool:
    """`num_pages` pages of `page_size` token slots each, ids 0 .. num_pages - 1; no tensors.

    A page has a reference count; it is free exactly while the count is zero. Free pages are kept
    as runs of neighbours with boundary tags (Knuth, TAOCP 1, 2.5): `_head[s]` is the length of the
    free run that begins at page s, `_tail[e]` of the one that ends at page e, 0 elsewhere. Runs of
    2**k .. 2**(k+1) - 1 pages hang in the intrusive doubly linked list of class k. So taking a run,
    and giving one back with its neighbours joined, costs O(1), whatever the pool's size; memory is
    24 bytes a page.
    """

    __slots__ = ("page_size", "num_pages", "free_pages", "refs", "_ids", "_head", "_tail",
                 "_next", "_prev", "_first", "_classes")  # fmt: skip

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.num_pages = num_pages
        self.free_pages = num_pages
        self.refs = array("i", bytes(4 * num_pages))
        self._ids = array("i", range(num_pages))
        self._head = array("i", bytes(4 * (num_pages + 1)))  # one more: the page after the last
        self._tail = array("i", bytes(4 * (num_pages + 1)))  # [-1] serves as "before the first"
        self._next = array("i", bytes(4 * num_pages))
        self._prev = array("i", bytes(4 * num_pages))
        self._first = [-1] * (num_pages.bit_length() + 1)
        self._classes = 0  # bit k: the list of class k is not empty
        self._link(0, num_pages)

    # -- free runs ---------------------------------------------------------------------------

    def _link(self, start: int, length: int) -> None:
        self._head[start] = length
        self._tail[start + length - 1] = length
        size_class = length.bit_length() - 1
        first = self._first[size_class]
        self._next[start] = first
        self._prev[start] = -1
        if first >= 0:
            self._prev[first] = start
        else:
            self._classes |= 1 << size_class
        self._first[size_class] = start

    def _unlink(self, start: int, length: int) -> None:
        self._head[start] = 0
        self._tail[start + length - 1] = 0
        after, before = self._next[start], self._prev[start]
        if after >= 0:
            self._prev[after] = before
        if before >= 0:
            self._next[before] = after
        else:
            size_class = length.bit_length() - 1
            self._first[size_class] = after
            if after < 0:
                self._classes &= ~(1 << size_class)

    def _give(self, start: int, length: int) -> None:
        """Frees a run, joining it with free neighbours."""
        self.free_pages += length
        left = self._tail[start - 1] if start else 0
        if left:
            self._unlink(start - left, left)
            start -= left
            length += left
        right = self._head[start + length]
        if right:
            self._unlink(start + length, right)
            length += right
        self._link(start, length)

    def _take(self, start: int, length: int, count: int) -> array[int]:
        """The first `count` pages of the free run at `start`, each with one reference."""
        rest, begin = length - count, start + count
        size_class = length.bit_length() - 1
        if rest >> size_class:
            # What is left takes the run's place in the list of its class.
            heads, following, preceding = self._head, self._next, self._prev
            after, before = following[start], preceding[start]
            heads[start] = 0
            heads[begin] = self._tail[start + length - 1] = rest
            following[begin], preceding[begin] = after, before
            if after >= 0:
                preceding[after] = begin
            if before >= 0:
                following[before] = begin
            else:
                self._first[size_class] = begin
        else:
            self._unlink(start, length)
            if rest:
                self._link(begin, rest)
        self.free_pages -= count
        self.refs[start:begin] = _ONE * count
        return self._ids[start:begin]

    # -- the public face ---------------------------------------------------------------------

    def allocate(self, count: int, after: int = -1) -> array[int]:
        """`count` pages with one reference each, as few runs of neighbours as can be found fast.

        `after` is the page that the new ones should follow, if they can (the last page of the
        growing sequence), or -1. O(number of runs). Raises OutOfPages, with nothing changed.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        if not -1 <= after < self.num_pages:
            raise ValueError(f"after must be -1 or a page, 0 .. {self.num_pages - 1}, got {after}")
        if count > self.free_pages:
            raise OutOfPages(count, self.free_pages)
        head = self._head
        pages = None
        need = count
        if after >= 0 and need and (length := head[after + 1]):
            pages = self._take(after + 1, length, min(need, length))
            need -= len(pages)
        tail, firsts, refs, ids = self._tail, self._first, self.refs, self._ids
        while need > 0:
            # Any run of class (need - 1).bit_length() or above is long enough; take the smallest
            # such class so that long runs stay whole. With none, take the longest class there is.
            size_class = (need - 1).bit_length()
            fitting = self._classes >> size_class << size_class
            if fitting:
                size_class = (fitting & -fitting).bit_length() - 1
            else:
                size_class = self._classes.bit_length() - 1
            start = firsts[size_class]
            length = head[start]
            if length >= need:
                taken = self._take(start, length, need)
                return pages + taken if pages else taken
            # All of a run that heads its list: what _take does, without the general case. A pool
            # that is always full is in pieces, and this loop is where that is felt.
            head[start] = tail[start + length - 1] = 0
            follower = firsts[size_class] = self._next[start]
            if follower >= 0:
                self._prev[follower] = -1
            else:
                self._classes ^= 1 << size_class
            self.free_pages -= length
            refs[start : start + length] = _ONE * length
            taken = ids[start : start + length]
            if pages:
                pages += taken
            else:
                pages = taken
            need -= length
        return pages or array("i")

    def share(self, pages: Sequence[int]) -> None:
        """One more reference for each page; ValueError, with nothing changed, if one is free."""
        refs, end = self.refs, self.num_pages
        for page in pages:
            if not 0 <= page < end or not refs[page]:
                raise ValueError(f"pages: {page} can't be shared, {self._unused(page)}")
        for page in pages:
            refs[page] += 1

    def release(self, pages: Sequence[int]) -> int:
        """One reference less for each page; those that reach zero return to the pool.

        Returns how many did. O(runs of neighbours) at memory speed, plus the pages of runs in which
        some keep a reference. Raises ValueError, with nothing changed, if a page is free already. A
        page may appear in `pages` only once.
        """
        if not isinstance(pages, array):
            pages = array("i", pages)
        refs, count = self.refs, len(pages)
        if not count:
            return 0
        if count == 1 and 0 <= (page := pages[0]) < self.num_pages and refs[page]:
            refs[page] -= 1
            if refs[page]:
                return 0
            self._give(page, 1)
            return 1
        runs = [(pages[0], count)]
        if count > 1 and pages != self._ids[pages[0] : pages[0] + count]:
            runs = _runs(pages)
        if len(runs) > _MANY_RUNS:
            return self._release_pieces(np.frombuffer(pages, np.int32))
        kept = []  # of each run, whether some of its pages have other references
        for start, length in runs:
            if start < 0 or start + length > self.num_pages:
                page = start if start < 0 else max(start, self.num_pages)
                raise ValueError(f"pages: {page} can't be released, {self._unused(page)}")
            counts = refs[start : start + length]
            alone = counts == _ONE * length
            if not alone and 0 in counts:
                page = start + counts.index(0)
                raise ValueError(f"pages: {page} can't be released, {self._unused(page)}")
            kept.append(not alone)
        freed = 0
        for (start, length), some_kept in zip(runs, kept, strict=True):
            if some_kept:
                freed += self._release_each(start, length)
            else:
                refs[start : start + length] = array("i", bytes(4 * length))
                self._give(start, length)
                freed += length
        return freed

    def take_over(self, pages: array[int]) -> array[int]:
        """Like `release`, but the pages that nobody else references stay allocated: the caller's.

        Returns those, in order, with one reference each. For pages that are known to be allocated.
        O(pages) at memory speed.
        """
        if len(pages) < _VECTOR:
            sole = array("i")
            for page in pages:
                if self.refs[page] == 1:
                    sole.append(page)
                else:
                    self.refs[page] -= 1
            return sole
        refs, ids = np.frombuffer(self.refs, np.int32), np.frombuffer(pages, np.int32)
        counts = refs.take(ids)
        if counts.tobytes() == (_ONE * len(pages)).tobytes():
            return pages
        shared = counts != 1
        refs[ids[shared]] -= 1
        return array("i", ids[~shared].tobytes())

    def _release_pieces(self, pages: np.ndarray) -> int:
        """Releases pages (int32) that are in many pieces: the counts at once, not run by run."""
        inside = (pages >= 0) & (pages < self.num_pages)
        if not inside.all():
            page = int(pages[int(inside.argmin())])
            raise ValueError(f"pages: {page} can't be released, {self._unused(page)}")
        refs = np.frombuffer(self.refs, np.int32)
        counts = refs[pages]
        if not counts.all():
            page = int(pages[int(counts.argmin())])
            raise ValueError(f"pages: {page} can't be released, {self._unused(page)}")
        counts -= 1
        refs[pages] = counts
        freed = pages if not counts.any() else pages[counts == 0]
        if len(freed):
            for start, length in _runs(array("i", freed.tobytes())):
                self._give(start, length)
        return len(freed)

    def _release_each(self, start: int, length: int) -> int:
        """Releases a run in which some pages have other references."""
        refs = self.refs
        if length < _VECTOR:
            keeping = []
            for page in range(start, start + length):
                refs[page] -= 1
                if refs[page]:
                    keeping.append(page - start)
        else:
            counts = np.frombuffer(refs, np.int32)[start : start + length]
            counts -= 1
            keeping = np.flatnonzero(counts).tolist()
        freed, first = 0, 0  # the pages start + first, ... have reached zero
        for kept in [*keeping, length]:
            if first < kept:
                self._give(start + first, kept - first)
                freed += kept - first
            first = kept + 1
        return freed

    def _unused(self, page: int) -> str:
        if 0 <= page < self.num_pages:
            return "it is free"
        return f"the pool has pages 0 .. {self.num_pages - 1}"

    def free_runs(self) -> list[tuple[int, int]]:
        """The free runs as (first page, length), in page order. O(num_pages)."""
        return [(page, length) for page, length in enumerate(self._head) if length]

    def _check(self) -> None:
        """Recounts the free pages; raises AssertionError on any mismatch. O(num_pages)."""
        free = {page for page, count in enumerate(self.refs) if count == 0}
        assert min(self.refs) >= 0, "a page has a negative count"
        assert self.free_pages == len(free), f"free_pages {self.free_pages}, recount {len(free)}"
        runs = self.free_runs()
        in_runs = [page for start, length in runs for page in range(start, start + length)]
        assert sorted(in_runs) == sorted(free), "free runs do not tile the free pages"
        for start, length in runs:
            assert self._tail[start + length - 1] == length, f"run {start}: tail tag is wrong"
            assert start + length not in free, (
                f"run {start} should be joined with its right neighbour"
            )
        linked = []
        for size_class, first in enumerate(self._first):
            assert (first >= 0) == bool(self._classes >> size_class & 1), f"class {size_class} mask"
            before, page = -1, first
            while page >= 0:
                assert self._prev[page] == before, f"run {page}: broken list"
                assert self._head[page].bit_length() - 1 == size_class, f"run {page}: wrong class"
                linked.append(page)
                before, page = page, self._next[page]
        assert sorted(linked) == [start for start, _ in runs], "lists and tags disagree"


def _runs(pages: array[int]) -> list[tuple[int, int]]:
    """The maximal runs of neighbours in `pages`, at least one, in order: (first page, length)."""
    if len(pages) >= _VECTOR:
        ids = np.frombuffer(pages, np.int32)
        borders: np.ndarray = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
        firsts = [0, *borders.tolist()]
        lasts = [*firsts[1:], len(pages)]
        return [(pages[a], b - a) for a, b in zip(firsts, lasts, strict=True)]
    runs = []
    start, length = pages[0], 0
    for page in pages:
        if page == start + length:
            length += 1
            continue
        runs.append((start, length))
        start, length = page, 1
    runs.append((start, length))
    return runs
