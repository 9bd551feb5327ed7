"""Giving memory back: changed pages stay, others are read again from their file."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from coppice.runtime.startup import memory

SMAPS = """\
1000-2000 r--p 00000000 fe:00 12 /lib/a.so
Rss:                   4 kB
Shared_Dirty:          0 kB
Private_Dirty:         4 kB
Anonymous:             0 kB
Locked:                0 kB
VmFlags: rd mr mw me
2000-3000 r-xp 00001000 fe:00 12 /lib/a b.so (deleted)
Private_Dirty:         0 kB
Anonymous:             0 kB
3000-4000 r--p 00002000 fe:00 12 /lib/relocated.so
Private_Dirty:         4 kB
Anonymous:             4 kB
Swap:                  0 kB
3000-4000 r--p 00002000 fe:00 12 /lib/swapped.so
Anonymous:             0 kB
Swap:                  4 kB
4000-5000 rw-p 00003000 fe:00 12 /lib/written.so
Anonymous:             0 kB
5000-6000 r--s 00000000 fe:00 13 /shared
Anonymous:             0 kB
6000-7000 r--p 00000000 00:00 0
Anonymous:             0 kB
7000-8000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
8000-9000 r-xp 00000000 fe:00 14 /lib/locked.so
Anonymous:             0 kB
Locked:                4 kB
ffff9000-ffffa000 r-xp 00000000 fe:00 15                 /lib/last.so
Anonymous:             0 kB
"""


def test_only_files_that_nobody_changed_are_dropped() -> None:
    found = list(memory._unchanged_files(SMAPS))
    assert found == [(0x1000, 0x2000), (0x2000, 0x3000), (0xFFFF9000, 0xFFFFA000)]
    assert list(memory._unchanged_files("")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_leaves_memory_and_is_there_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    content = bytes(range(256)) * 4096
    file.write_bytes(content)
    with file.open("r+b") as opened:
        size = len(content)
        read = mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ)
        changed = mmap.mmap(
            opened.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        )
    changed[:5] = b"mine!"
    # Read-only now, as a library is after the loader has written addresses into it.
    place = ctypes.c_char.from_buffer(changed)
    address = ctypes.addressof(place)
    libc = ctypes.CDLL(None)
    protect = libc.mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address, size, mmap.PROT_READ) == 0
    assert read[:] == content
    before = resident_kib(file)
    assert max(before) >= 1024
    memory.give_back_memory()
    assert sorted(resident_kib(file)) == [0, 4], "only the changed page stays"
    assert read[:] == content
    assert changed[:5] == b"mine!"
    assert protect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    del place
    changed.close()
    read.close()


def resident_kib(file: Path) -> list[int]:
    """Of each of the file's mappings."""
    found: list[int] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(":")[0].split(" ")[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found.append(int(line.split()[1]))
    return found
