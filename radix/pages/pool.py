"""The pool of KV pages: ids with reference counts, handed out in runs where it can."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from coppice.radix.pages.errors import OutOfPages

_ONE = array("i", [1])
_ZERO = array("i", [0])

MAX_PAGES = (1 << 30) - 1
"""Pages that a pool can have: ids, counts and links have 32 bits, and some encode two values."""

# From this many pages on, numpy's vector operations beat a Python loop.
_VECTOR = 48

# From this many runs on, the counts of all pages are changed at once, not run by run.
_MANY_RUNS = 6


class PagePool:
    """`num_pages` pages of `page_size` token slots each, ids 0 .. num_pages - 1; no tensors.

    A page has a reference count in `refs`; it is free exactly while that is not positive. Free
    pages are kept as runs of neighbours with boundary tags (Knuth, TAOCP 1, 2.5). Runs of 2**k ..
    2**(k+1) - 1 pages are in the doubly linked list of class k. So taking a run, and giving one
    back with its neighbours joined, costs O(1) in pools of any size.

    Memory is 8 bytes for each page: the counts, and the ids from which runs are copied. The same
    arrays describe the free runs: the count of a run's first and of its last page is its length,
    negative; those between are 0. The id of the first is the link to the next run of the list, that
    of the last the link to the run before; ids return when the run is taken. A run of one page has
    no second place for links. Its length is known to be 1, so its count has the link to the run
    before: -(link + 2) - num_pages, less than that of any other run. A link is a run's first page,
    or -1.

    Raises ValueError for a size below 1, and for more than `MAX_PAGES` pages.
    """

    __slots__ = ("page_size", "num_pages", "free_pages", "refs", "_ids", "_first", "_classes")

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        if num_pages > MAX_PAGES:
            raise ValueError(f"num_pages must be at most {MAX_PAGES}, got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.num_pages = num_pages
        self.free_pages = num_pages
        self.refs = _ZERO * num_pages
        self._ids = array("i", range(num_pages))
        self._first = [-1] * (num_pages.bit_length() + 1)
        self._classes = 0  # bit k: the list of class k is not empty
        self._link(0, num_pages)

    # -- free runs ---------------------------------------------------------------------------

    def _length(self, tag: int) -> int:
        """The length of the run that has this count at an end."""
        return -tag if tag >= -self.num_pages else 1

    def _link(self, start: int, length: int) -> None:
        """Puts a run, neither of whose neighbours is free, at the head of its list.

        The counts of its pages are 0.
        """
        refs, ids = self.refs, self._ids
        size_class = length.bit_length() - 1
        first = self._first[size_class]
        ids[start] = first
        if length == 1:
            refs[start] = -1 - self.num_pages
        else:
            end = start + length - 1
            refs[start] = refs[end] = -length
            ids[end] = -1
        if first < 0:
            self._classes |= 1 << size_class
        else:
            self._set_before(first, start)
        self._first[size_class] = start

    def _unlink(self, start: int, length: int) -> None:
        """Takes a run out of its list; counts are 0, and ids those of the pages."""
        refs, ids = self.refs, self._ids
        after = ids[start]
        if length == 1:
            before = -refs[start] - 2 - self.num_pages
        else:
            end = start + length - 1
            before = ids[end]
            refs[end] = 0
            ids[end] = end
        refs[start] = 0
        ids[start] = start
        if after >= 0:
            self._set_before(after, before)
        if before >= 0:
            ids[before] = after
        else:
            size_class = length.bit_length() - 1
            self._first[size_class] = after
            if after < 0:
                self._classes &= ~(1 << size_class)

    def _set_before(self, start: int, before: int) -> None:
        """Records which run comes before the one at `start` in its list."""
        tag = self.refs[start]
        if tag < -self.num_pages:
            self.refs[start] = -before - 2 - self.num_pages
        else:
            self._ids[start - tag - 1] = before

    def _give(self, start: int, length: int) -> None:
        """Frees a run whose counts are 0, joining it with free neighbours."""
        self.free_pages += length
        refs, end = self.refs, start + length
        if start and (tag := refs[start - 1]) < 0:
            left = self._length(tag)
            start -= left
            self._unlink(start, left)
        if end < self.num_pages and (tag := refs[end]) < 0:
            right = self._length(tag)
            self._unlink(end, right)
            end += right
        self._link(start, end - start)

    def _take(self, start: int, length: int, count: int) -> array[int]:
        """The first `count` pages of the free run at `start`, each with one reference."""
        rest, begin = length - count, start + count
        ids = self._ids
        size_class = length.bit_length() - 1
        if rest >> size_class:
            # What is left takes the run's place in the list of its class.
            end = start + length - 1
            after, before = ids[start], ids[end]
            ids[start] = start
            self.refs[begin] = self.refs[end] = -rest
            ids[begin] = after
            if after >= 0:
                self._set_before(after, begin)
            if before >= 0:
                ids[before] = begin
            else:
                self._first[size_class] = begin
        else:
            self._unlink(start, length)
            if rest:
                self._link(begin, rest)
        self.free_pages -= count
        self.refs[start:begin] = _ONE * count
        return ids[start:begin]

    # -- operations --------------------------------------------------------------------------

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
        pages = None
        need = count
        firsts, refs, ids = self._first, self.refs, self._ids
        if (
            0 <= after < self.num_pages - 1
            and need
            and refs[after] > 0
            and (tag := refs[after + 1]) < 0
        ):
            length = self._length(tag)
            pages = self._take(after + 1, length, min(need, length))
            need -= len(pages)
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
            length = self._length(refs[start])
            if length >= need:
                taken = self._take(start, length, need)
                return pages + taken if pages else taken
            # All of a run that heads its list: what `_take` does, without the general case. A pool
            # that is always full is fragmented, and spends much of its time in this loop.
            end = start + length
            follower = firsts[size_class] = ids[start]
            if follower >= 0:
                self._set_before(follower, -1)
            else:
                self._classes ^= 1 << size_class
            ids[end - 1] = end - 1
            ids[start] = start
            self.free_pages -= length
            refs[start:end] = _ONE * length
            taken = ids[start:end]
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
            if not 0 <= page < end or refs[page] <= 0:
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
        if count == 1 and 0 <= (page := pages[0]) < self.num_pages and refs[page] > 0:
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
            if not alone and (least := min(counts)) <= 0:
                # (`pages` may equal links among the ids, so the page is named by its own number.)
                page = counts.index(least)
                page = pages[page] if len(runs) == 1 else start + page
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
        """Like `release`, but pages without other references stay allocated, for the caller.

        Returns those, in order, with one reference each. Does not check that the pages are
        allocated. O(pages) at memory speed.
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
        if (counts <= 0).any():
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
        runs, page = [], 0
        while page < self.num_pages:
            length = 0
            if self.refs[page] < 0:
                length = self._length(self.refs[page])
                runs.append((page, length))
            page += length or 1
        return runs

    def check(self) -> None:
        """Recounts the free pages; raises AssertionError on any mismatch. O(num_pages)."""
        free = {page for page, count in enumerate(self.refs) if count <= 0}
        assert self.free_pages == len(free), f"free_pages {self.free_pages}, recount {len(free)}"
        runs = self.free_runs()
        in_runs = [page for start, length in runs for page in range(start, start + length)]
        assert sorted(in_runs) == sorted(free), "free runs do not tile the free pages"
        boundaries = {start for start, _ in runs} | {sum(run) - 1 for run in runs}
        for page in range(self.num_pages):
            assert (self.refs[page] < 0) == (page in boundaries), f"page {page}: a stray tag"
            assert page in boundaries or self._ids[page] == page, f"page {page}: a wrong id"
        for start, length in runs:
            end = start + length
            assert self.refs[end - 1] == self.refs[start], f"run {start}: tail tag is wrong"
            assert end not in free, f"run {start} should be joined with its right neighbour"
        linked = []
        lengths = dict(runs)
        for size_class, first in enumerate(self._first):
            assert (first >= 0) == bool(self._classes >> size_class & 1), f"class {size_class} mask"
            before, page = -1, first
            while page >= 0:
                length = lengths[page]
                link = self._ids[page + length - 1]
                if length == 1:
                    link = -self.refs[page] - 2 - self.num_pages
                assert link == before, f"run {page}: broken list"
                assert length.bit_length() - 1 == size_class, f"run {page}: wrong class"
                linked.append(page)
                before, page = page, self._ids[page]
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
