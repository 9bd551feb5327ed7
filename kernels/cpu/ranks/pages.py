"""Packed pages in memory that the ranks of one machine share: each has its columns of every row.

a page of memory: what tells this memory from another
for each rank: how many of its tasks it has done; the bytes of its part of a page; its mark
rows of packed pages, of which the first rank gives some to whom needs them
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from coppice.kernels.cpu.ranks.meeting import raise_count

MARK_BYTES = 16
_PAGE = 4096
# int64 places of a rank: done tasks and, as `raise_count` needs them, who sleeps; bytes; a mark.
_DONE, _BYTES, _MARK, _PLACES = 0, 32, 40, 64
_ALIGNED = 64  # bytes: rows begin at multiples of it
_KEPT_BYTES = 64 * 2**20  # of memory that was used, while nobody has any


class SharedPages:
    """One rank's view of the memory."""

    def __init__(self, descriptor: int, rank: int, size: int, room: int, secret: bytes) -> None:
        """Maps what `shared_pages` has made for `size` ranks, with `room` bytes of rows.

        Raises ValueError if it is another memory.
        """
        self.rank, self._size, self._room = rank, size, room
        self._mapped = mmap.mmap(descriptor, _bytes(size, room))
        whole = np.frombuffer(self._mapped, np.uint8)
        if whole[: len(secret)].tobytes() != secret:
            raise ValueError("the memory that ranks share for pages is another one")
        self._places = whole[_PAGE : _begin(size)].view(np.int64)[: size * _PLACES]
        self._places = self._places.reshape(size, _PLACES)
        self._addresses = [self._places[each].ctypes.data for each in range(size)]
        self._columns: list[slice] | None = None

    @property
    def room(self) -> int:
        """Bytes of rows."""
        return self._room

    # -- what ranks say of their parts -------------------------------------------------------

    def describe(self, page_bytes: int, mark: bytes) -> None:
        """Says how many bytes of a page this rank has, and what its numbers depend on.

        `mark` has `MARK_BYTES`.
        """
        own = self._places[self.rank]
        own[_MARK : _MARK + MARK_BYTES // 8] = np.frombuffer(mark, np.int64)
        own[_BYTES] = page_bytes
        self.did()  # its first task

    def mark(self, rank: int) -> bytes:
        """What a rank's numbers depend on."""
        return self._places[rank, _MARK : _MARK + MARK_BYTES // 8].tobytes()

    def columns(self, rank: int) -> slice:
        """A rank's columns of a row; all have described theirs."""
        if self._columns is None:
            ends = np.cumsum(self._places[:, _BYTES]).tolist()
            self._columns = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        return self._columns[rank]

    @property
    def page_bytes(self) -> int:
        """Bytes of a row: all ranks' parts of a page."""
        return self.columns(self._size - 1).stop

    # -- tasks -------------------------------------------------------------------------------

    def did(self) -> None:
        """Notes that this rank has done one more task, with all that it has written."""
        raise_count(self._addresses[self.rank] + 8 * _DONE, 1)

    def done(self) -> int:
        """How many tasks all ranks but the first have done, and see what they have written."""
        return min(raise_count(each + 8 * _DONE, 0) for each in self._addresses[1:])

    # -- rows --------------------------------------------------------------------------------

    def memory(self, begin: int, size: int) -> np.ndarray:
        """`size` bytes from `begin` on, as an array of its own."""
        return np.frombuffer(self._mapped, np.uint8, size, _begin(self._size) + begin)

    def part(self, begin: int, count: int) -> torch.Tensor:
        """This rank's columns of `count` rows that begin at byte `begin`."""
        width = self.page_bytes
        rows = self.memory(begin, count * width).reshape(count, width)
        return torch.from_numpy(rows[:, self.columns(self.rank)])

    def begin_of(self, rows: torch.Tensor) -> int:
        """The byte at which rows lie that were given by `SharedRoom.take`, or a view of them."""
        first = self._addresses[0] - _PAGE + _begin(self._size)
        return rows.data_ptr() - first

    def give_back(self) -> None:
        """Gives the memory of all rows back to the system; what they held is gone."""
        begin = _begin(self._size)
        self._mapped.madvise(mmap.MADV_REMOVE, begin, len(self._mapped) - begin)


class SharedRoom:
    """Who has which rows of the memory; on the first rank, for all of its threads.

    Rows are free again when nobody has their tensor, or a view of it, and all tasks are done that
    were given before that: other ranks may read the rows, or write to them, until then.
    """

    def __init__(self, shared: SharedPages, given: Callable[[], int]) -> None:
        """`given` says how many tasks the other ranks were given so far."""
        self._shared, self._given = shared, given
        self._free: list[tuple[int, int]] = [(0, shared.room)]  # begin and end, in order
        self._left: deque[tuple[int, int, int]] = deque()  # tasks to be done before; begin; end
        self._top = 0  # the end of what was ever written since memory was given back
        self._lock = threading.Lock()

    def take(self, count: int) -> torch.Tensor:
        """Rows for `count` pages, uint8. Raises MemoryError if there is no room. O(rows in use)."""
        width = self._shared.page_bytes
        size = -(-max(1, count * width) // _ALIGNED) * _ALIGNED
        with self._lock:
            self._collect()
            begin = self._first(size)
        memory = self._shared.memory(begin, count * width)
        weakref.finalize(memory, self._leave, begin, begin + size).atexit = False
        return torch.from_numpy(memory.reshape(count, width))

    def _first(self, size: int) -> int:
        for at, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[at : at + 1] = [(begin + size, end)] if end - begin > size else []
                self._top = max(self._top, begin + size)
                return begin
        raise MemoryError(f"the memory that ranks share for pages has no room for {size} bytes")

    def _leave(self, begin: int, end: int) -> None:
        # In whatever thread, even one that holds the lock: only this is done here.
        self._left.append((self._given(), begin, end))

    def _collect(self) -> None:
        """Takes back what nobody has any more."""
        if not self._left:
            return
        done = self._shared.done()
        for _ in range(len(self._left)):
            given, begin, end = self._left.popleft()
            if given > done:
                self._left.append((given, begin, end))
                continue
            at = bisect_left(self._free, (begin, end))
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == begin:
                begin = self._free.pop(at - 1)[0]
            insort(self._free, (begin, end))
        if self._top > _KEPT_BYTES and self._free == [(0, self._shared.room)]:
            self._shared.give_back()
            self._top = 0

    @property
    def free(self) -> int:
        """Bytes that nobody has, of those that were taken back."""
        with self._lock:
            self._collect()
            return sum(end - begin for begin, end in self._free)


def shared_pages(size: int, room: int) -> tuple[int, bytes]:
    """Makes memory for `size` ranks with `room` bytes of rows: its descriptor, and its secret.

    It takes what is written to, is in no folder, and is gone with the last process that has it.
    """
    descriptor = os.memfd_create("coppice-pages")
    os.truncate(descriptor, _bytes(size, room))
    secret = os.urandom(MARK_BYTES)
    os.pwrite(descriptor, secret, 0)
    return descriptor, secret


def _begin(size: int) -> int:
    """The byte at which rows begin."""
    return _PAGE + -(-size * _PLACES * 8 // _PAGE) * _PAGE


def _bytes(size: int, room: int) -> int:
    return _begin(size) + -(-room // _PAGE) * _PAGE
