"""Memory of the first pages of the KV cache, before they are written."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.kernels.cpu.code.memory import populate
from coppice.runtime.runner.cache import resident
from coppice.runtime.runner.cache.resident import populate_first


def pages(count: int, numbers: int = 1 << 18) -> torch.Tensor:
    """A MiB each, of memory that nothing has been written to."""
    return torch.from_numpy(np.zeros(count * numbers, np.float32)).view(count, numbers)


def resident_bytes(part: torch.Tensor) -> int:
    """What the system has given of a tensor's memory."""
    begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            first, last = (int(each, 16) for each in head.split("-"))
            inside = first < end and last > begin
        elif inside and head == "Rss:":
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked")
def test_the_first_pages_have_memory_and_the_others_none() -> None:
    keys, values = pages(64), pages(64)
    keys[3, 5] = 7.0
    if not populate(keys[:1]):
        pytest.skip("this Linux cannot be asked")
    assert populate_first((keys, values), most=32 << 20) == 16
    # Huge pages and what lies beside in the same mapping may add some.
    for each in (keys, values):
        assert 16 << 20 <= resident_bytes(each) <= 40 << 20
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
