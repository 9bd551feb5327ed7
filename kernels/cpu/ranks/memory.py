"""The memory that ranks on one machine share: messages of the first one, sums, joined columns."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np

from coppice.kernels.cpu.ranks import meeting
from coppice.kernels.cpu.ranks.errors import RanksEnded

# Room for one message: a step's plan has some kilobytes; a longer one is sent in pieces.
_MESSAGE_BYTES = 1 << 18
_PAGE = 4096


def shared_file(size: int, region_bytes: int) -> int:
    """A file descriptor of memory for ``size`` ranks; ``region_bytes`` as in ``RankMemory``.

    It is in no folder, and is gone with the last process that has it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("coppice-ranks")
    else:
        file, path = tempfile.mkstemp(prefix="coppice-ranks-")
        os.unlink(path)
        descriptor = file
    os.truncate(descriptor, _bytes(size, region_bytes))
    return descriptor


class RankMemory:
    """One rank's view of the memory that ranks on one machine share.

    Each rank makes the same calls in the same order, except for messages and ``end``. All calls
    raise ``RanksEnded`` when ``end`` was called by any rank.

    Attributes:
        fields: int64, what compiled code needs (``meeting.FIELDS``).
    """

    def __init__(self, descriptor: int, rank: int, size: int, region_bytes: int) -> None:
        """Maps the memory of ``shared_file(size, region_bytes)``, which stays open.

        ``region_bytes`` is the most that a rank can bring to a meeting, in whole pages of memory.
        """
        if region_bytes % _PAGE or region_bytes <= 0:
            raise ValueError(f"region_bytes must be a multiple of {_PAGE}, got {region_bytes}")
        self._size = size
        self._mapped = mmap.mmap(descriptor, _bytes(size, region_bytes))
        self._bytes = np.frombuffer(self._mapped, np.uint8)
        self._places = self._bytes[: 8 * meeting.PLACES].view(np.int64)
        self._message = self._bytes[_PAGE : _PAGE + _MESSAGE_BYTES]
        self._regions = self._bytes[_PAGE + _MESSAGE_BYTES :].reshape(size, 2, region_bytes)
        self._messages = 0  # pieces sent, or received
        address = self._bytes.ctypes.data
        start = address + _PAGE + _MESSAGE_BYTES
        self.fields = np.array([address, rank, size, start, region_bytes, 0, 0, 0, 0], np.int64)

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called."""
        return bool(self._places[meeting.OVER])

    def end(self) -> None:
        """Ends all waits of all ranks; from any thread."""
        meeting.end_all(self.fields[0])

    def sum(self, numbers: np.ndarray) -> None:
        """``numbers``, float32 ``[n]``, become the sums of all ranks', in place."""
        meeting.sum_numbers(self.fields, numbers)
        self.check()

    def gather(self, part: np.ndarray, widths: Sequence[int]) -> np.ndarray | None:
        """The columns of all ranks side by side, on the first one; None on the others.

        ``part`` is float32 ``[R, widths[rank]]``; the result is ``[R, sum of widths]``.
        """
        rank = int(self.fields[1])
        out = np.empty((len(part), sum(widths)), np.float32) if rank == 0 else None
        together = max(1, self._regions.shape[2] // (4 * max(widths)))
        for first in range(0, len(part), together):
            rows = min(together, len(part) - first)
            turn = int(self.fields[5]) // self._size % 2
            self._region(rank, turn, rows, widths[rank])[:] = part[first : first + rows]
            meeting.meet_alone(self.fields)
            if out is None:
                continue
            begin = 0
            for other, width in enumerate(widths):
                out[first : first + rows, begin : begin + width] = self._region(
                    other, turn, rows, width
                )
                begin += width
        self.check()
        return out

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        rank, turn = int(self.fields[1]), int(self.fields[5]) // self._size % 2
        self._regions[rank, turn, :8].view(np.int64)[0] = number
        meeting.meet_alone(self.fields)
        found = min(int(each[:8].view(np.int64)[0]) for each in self._regions[:, turn])
        self.check()
        return found

    def share(self, numbers: np.ndarray) -> None:
        """``numbers`` become the first rank's, in place; a contiguous array of at most a region."""
        rank, turn = int(self.fields[1]), int(self.fields[5]) // self._size % 2
        region = self._regions[0, turn, : numbers.nbytes].view(numbers.dtype)
        if rank == 0:
            region[:] = numbers.reshape(-1)
        meeting.meet_alone(self.fields)
        numbers.reshape(-1)[:] = region
        self.check()

    def send(self, message: bytes) -> None:
        """Sends a message from the first rank to all others, which take it by ``receive``."""
        address = int(self.fields[0])
        for first in range(0, max(1, len(message)), _MESSAGE_BYTES):
            # The room is free when all others have taken what was in it.
            meeting.wait_for(address + 8 * meeting.TAKEN, self._messages * (self._size - 1))
            self.check()
            piece = message[first : first + _MESSAGE_BYTES]
            self._message[: len(piece)] = np.frombuffer(piece, np.uint8)
            self._places[meeting.LENGTH] = len(message) - first
            self._messages += 1
            meeting.raise_count(address + 8 * meeting.SENT, 1)

    def receive(self) -> bytes:
        """The next message of the first rank; waits for it."""
        address, pieces = int(self.fields[0]), []
        while True:
            self._messages += 1
            meeting.wait_for(address + 8 * meeting.SENT, self._messages)
            self.check()
            left = int(self._places[meeting.LENGTH])
            pieces.append(self._message[: min(left, _MESSAGE_BYTES)].tobytes())
            meeting.raise_count(address + 8 * meeting.TAKEN, 1)
            if left <= _MESSAGE_BYTES:
                return b"".join(pieces)

    def _region(self, rank: int, turn: int, rows: int, width: int) -> np.ndarray:
        used = self._regions[rank, turn, : 4 * rows * width]
        return used.view(np.float32).reshape(rows, width)

    def check(self) -> None:
        """Raises ``RanksEnded`` when ``end`` was called."""
        if self.ended:
            raise RanksEnded("the ranks of this model have ended")


def region_bytes(numbers: int) -> int:
    """Bytes of a region for so many float32 numbers."""
    return max(1, -(-4 * numbers // _PAGE)) * _PAGE


def _bytes(size: int, region_bytes: int) -> int:
    return _PAGE + _MESSAGE_BYTES + 2 * size * region_bytes
