"""Memory as products read it best: weights in huge pages, numbers from a cache line on.

A step reads all weights, and of pages of 4 KB each 64 lines need another entry of the processor's
table of addresses. With pages of 2 MB products of one to 64 rows took 0.85 to 0.93 of the time on
an Intel Xeon. Weights of a few hundred KB share such pages, so they are cut from blocks.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
from ctypes import CDLL, c_int, c_size_t, c_void_p
from functools import cache

import numpy as np
import torch

from coppice.kernels.cpu.code.kept import njit

_log = logging.getLogger(__name__)

#: Bytes of a huge page, and of a line of the cache.
HUGE, LINE = 1 << 21, 64
_BLOCK = 1 << 25
# The number of the advice; Python has it by name since 3.14.
_POPULATE_WRITE = 23
_lock = threading.Lock()
# What is left of the last block.
_left = torch.empty(0, dtype=torch.uint8)


@njit
def lines(count: int) -> np.ndarray:
    """``count`` float32 numbers, not defined, that begin a cache line.

    A vector or a row of a tile that lies in two lines takes twice as long to load.
    """
    made = np.empty(count + LINE // 4, np.float32)
    first = -made.ctypes.data % LINE // 4
    return made[first : first + count]


@njit
def matrix(rows: int, width: int) -> np.ndarray:
    """``lines`` of float32 numbers as ``[rows, width]``."""
    return lines(rows * width).reshape(rows, width)


def room_for(size: int) -> torch.Tensor:
    """Memory of ``size`` bytes, uint8, that begins a cache line; its numbers are not defined.

    A block is freed when no weight in it is left.
    """
    global _left
    whole = -(-size // LINE) * LINE
    if whole > _BLOCK // 4:
        return _block(size)[:size]
    with _lock:
        if len(_left) < whole:
            _left = _block(_BLOCK)
        found, _left = _left[:size], _left[whole:]
    return found


def _block(size: int) -> torch.Tensor:
    """Memory from the beginning of a huge page on."""
    memory = torch.empty(size + HUGE, dtype=torch.uint8)
    block = memory[-memory.data_ptr() % HUGE :]
    advise(block)
    return block


def advise(memory: torch.Tensor) -> None:
    """Has the system take huge pages for what lies in whole ones of a tensor, if it offers that."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-memory.data_ptr() // HUGE) * HUGE
    end = (memory.data_ptr() + memory.nbytes) // HUGE * HUGE
    if advice is not None and begin < end and not _madvise(begin, end, advice):
        _log.debug("the system gives no huge pages")


def populate(memory: torch.Tensor) -> bool:
    """Has the system give memory for all of a contiguous tensor, whose numbers stay as they are.

    False where it does not know the request (Linux before 5.14, other systems), or refuses it.
    """
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = memory.data_ptr() + memory.nbytes
    return sys.platform == "linux" and _madvise(begin, end, _POPULATE_WRITE)


def _madvise(begin: int, end: int, advice: int) -> bool:
    """Whether the system took an advice about addresses."""
    return bool(_libc().madvise(begin, end - begin, advice) == 0)


@cache
def _libc() -> CDLL:
    library = CDLL(None)
    library.madvise.argtypes = c_void_p, c_size_t, c_int
    return library
