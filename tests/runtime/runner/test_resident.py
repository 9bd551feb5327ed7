"""Memory of the first pages of the KV cache, before they are written."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch

from coppice.kernels.cpu.code.memory import populate
from coppice.runtime.runner.cache import resident
from coppice.runtime.runner.cache.resident import populate_first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked")


def pages(count: int, numbers: int = 1 << 18) -> torch.Tensor:
    """A MiB each, of memory that nothing has been written to: what was freed is not taken."""
    fresh = mmap.mmap(-1, 4 * count * numbers, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(fresh, dtype=torch.float32).view(count, numbers)


def resident_bytes(part: torch.Tensor) -> int:
    """How much of a tensor's memory the system has given (mincore(2))."""
    begin = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = part.data_ptr() + part.nbytes - begin
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(begin, size, found.ctypes.data) == 0
    return int((found & 1).sum()) * mmap.PAGESIZE


def test_the_first_pages_have_memory_and_the_others_none() -> None:
    keys, values = pages(64), pages(64)
    keys[3, 5] = 7.0
    if not populate(keys[:1]):
        pytest.skip("this Linux cannot be asked")
    assert populate_first((keys, values), most=32 << 20) == 16
    for each in (keys, values):
        assert resident_bytes(each[:16]) >= 16 << 20
        assert resident_bytes(each[20:]) <= 2 << 20  # a huge page that the next tensor begins in
    assert keys[3, 5] == 7.0 and keys.sum() == 7.0


def test_a_small_cache_gets_all_of_it() -> None:
    keys = pages(3)
    assert populate_first((keys, keys)) == (3 if populate(keys) else 0)
    assert populate_first(()) == 0


def test_a_system_that_cannot_be_asked_leaves_pages_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resident, "populate", lambda part: False)
    assert populate_first((pages(4),)) == 0
