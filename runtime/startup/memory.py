"""Gives back the memory that a start has used and the steps to come do not need."""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

#: First line of a mapping in smaps (proc(5)): its addresses, rights and file.
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ +(/.*)")


def give_back_memory() -> None:
    """Has what only the start needed leave resident memory; takes some ten milliseconds.

    What loading weights has freed goes back to the system, which malloc would keep for later. And
    libraries' code is dropped: of LLVM, which has no more to do once the kernels are compiled or
    loaded, of what torch runs when it is imported, 110 MiB in all. What is called again comes back
    from the system's own copy of the file, 64 KiB at a time. Without effect where the system has
    no such thing; call it when the model is loaded, again at any time.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.malloc_trim(ctypes.c_size_t(0))
        for start, end in _unchanged_files(Path("/proc/self/smaps").read_text()):
            libc.madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(end - start), int(mmap.MADV_DONTNEED)
            )
    except (OSError, AttributeError) as error:  # not Linux, or another C library
        _log.debug("memory of the start is kept: %s", error)


def _unchanged_files(smaps: str) -> Iterator[tuple[int, int]]:
    """Addresses of the mappings of files that cannot be written to and have not been changed.

    A page that was changed, as the loader does when it relocates a library, would be lost. It is
    anonymous from then on, in memory or swapped out. (Dirty ones may be the file's own, as yet
    unwritten.)
    """
    found: tuple[int, int] | None = None
    clean = False
    for line in smaps.splitlines():
        name, _, value = line.partition(":")
        if value and " " not in name:
            if name in ("Anonymous", "Swap", "Locked"):
                clean = clean and value.split()[0] == "0"
            continue
        if found is not None and clean:
            yield found
        mapping = _MAPPING.match(line)
        found = None
        if mapping is not None and mapping[3] in ("r--p", "r-xp"):
            found, clean = (int(mapping[1], 16), int(mapping[2], 16)), True
    if found is not None and clean:
        yield found
