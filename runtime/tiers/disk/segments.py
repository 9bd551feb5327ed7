"""Files that records of pages are appended to; a full one is never changed again."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.disk.record import (
    ALIGNMENT,
    HEADER_BYTES,
    MAGIC,
    head,
    head_bytes,
    is_right,
    parse,
    record_bytes,
)

_OPEN_FILES = 32
_SUFFIX = ".kv"
_BLOCK = 2**20  # bytes that are searched at once for a record behind a damaged one
# What reading says where a file is gone, is no file, or the disk has lost what it had.
_UNREADABLE = (errno.ENOENT, errno.EISDIR, errno.EIO, errno.ENXIO)


class Segments:
    """The segment files of one folder: numbered, the greatest number is the one that grows.

    A process begins a segment of its own, so that nothing of an earlier one is written over. Any
    thread may read; one writes. Raises OSError where a file can't be read or written.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        """`segment_bytes`: beyond which a segment does not grow, unless one record is larger."""
        self._folder, self._most = folder, segment_bytes
        self._sizes: dict[int, int] = {}
        self._last = 0  # the greatest number that there is or was
        for path in folder.glob(f"*{_SUFFIX}"):
            if path.stem.isdecimal() and path.stem.isascii():
                self._last = max(self._last, int(path.stem))
                if path.is_file():
                    self._sizes[int(path.stem)] = path.stat().st_size
        self._used = sum(self._sizes.values())
        # The last used one last. What is dropped is closed when the last thread has read from it.
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._lock = threading.Lock()
        self._current = 0  # no segment of this process yet
        self._writing = -1  # its descriptor

    def __iter__(self) -> Iterator[int]:
        """The numbers of all segments, oldest first."""
        return iter(sorted(self._sizes))

    def __contains__(self, segment: int) -> bool:
        return segment in self._sizes

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return self._used

    @property
    def current(self) -> int:
        """The segment that grows; 0 if there is none."""
        return self._current

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self._folder / f"{segment:010}{_SUFFIX}"

    def size(self, segment: int) -> int:
        """Bytes of a segment."""
        return self._sizes[segment]

    def append(self, keys: Sequence[PageKey], pages: np.ndarray) -> list[tuple[int, int]]:
        """Writes records to one segment; returns (segment, offset) of each.

        They are on the disk when it returns. If it raises OSError none of them counts: what was
        written is cut off again.
        """
        total = sum(record_bytes(len(key.tokens), pages.shape[1]) for key in keys)
        if self._current and self._sizes[self._current] + total > self._most:
            self.finish()
        if not self._current:
            self._begin()
        begin = offset = self._sizes[self._current]
        places = []
        try:
            for key, page in zip(keys, pages, strict=True):
                places.append((self._current, offset))
                offset += self._write(key, page, offset)
            os.fdatasync(self._writing)
        except OSError:
            self.cut(begin)
            raise
        self._grow(self._current, offset - begin)
        return places

    def _write(self, key: PageKey, page: np.ndarray, offset: int) -> int:
        """Writes one record; returns its bytes."""
        start = head(key, page)
        size = record_bytes(len(key.tokens), len(page))
        padding = b"\0" * (size - len(start) - len(page))
        parts: list[bytes | memoryview] = [start, page.data, padding]
        written = os.pwritev(self._writing, parts, offset)
        if written < size:  # no room for all of it, or interrupted
            data = b"".join(parts)
            while written < size:
                written += os.pwrite(self._writing, data[written:], offset + written)
        return size

    def cut(self, offset: int) -> None:
        """Takes back what was appended to the growing segment from this offset on."""
        self._grow(self._current, offset - self._sizes[self._current])
        os.ftruncate(self._writing, offset)

    def _grow(self, segment: int, size: int) -> None:
        self._sizes[segment] += size
        self._used += size

    def _begin(self) -> None:
        self._last += 1  # first: a file of that number may be there, of whoever put it there
        number = self._last
        self._writing = os.open(self.path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._current = number
        self._sizes[number] = 0

    def finish(self) -> None:
        """The growing segment grows no more, if there is one."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing, self._current = -1, 0

    def read(self, segment: int, offset: int, parent: bytes, tokens: bytes, size: int,
             out: np.ndarray) -> bool:  # fmt: skip
        """Reads the page of `size` bytes whose record, at this place, follows `parent`.

        `tokens`: those of the record. Returns whether `out` has it, bit by bit as it was written.
        """
        if size != len(out) or offset < 0:
            return False
        start = bytearray(head_bytes(len(tokens)))
        try:
            file = self._file(segment)
            got = os.preadv(file.descriptor, [start, out.data], offset)
        except OSError as error:
            if error.errno in _UNREADABLE:
                return False
            raise
        return got == len(start) + len(out) and is_right(memoryview(start), parent, tokens, out)

    def scan(self, segment: int) -> Iterator[tuple[PageKey, int, int]]:
        """(Key, offset, bytes of the page) of all records of a segment, in order.

        Reads headers only, and checks no page. After a damaged header it searches the next one.
        """
        try:
            descriptor = os.open(self.path(segment), os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            end = os.fstat(descriptor).st_size
            offset: int | None = 0
            before = 0  # where the record begins whose lengths have led to `offset`
            while offset is not None and offset < end:
                found = _record(descriptor, offset, end)
                if found is None:
                    offset = _next_header(descriptor, before + ALIGNMENT)
                    before = offset or end
                    continue
                key, size = found
                yield key, offset, size
                before = offset
                offset += record_bytes(len(key.tokens), size)
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
        finally:
            os.close(descriptor)

    def remove(self, segment: int) -> None:
        """Deletes a segment's file; it must not be the one that grows."""
        self._used -= self._sizes.pop(segment, 0)
        with self._lock:
            self._files.pop(segment, None)
            # Under the lock, so that nobody opens it in between and keeps it.
            self.path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes all files."""
        with self._lock:
            self._files.clear()
        self.finish()

    def _file(self, segment: int) -> _File:
        """A segment's file, open for reading."""
        with self._lock:
            file = self._files.get(segment)
            if file is None:
                file = self._files[segment] = _File(self.path(segment))
                if len(self._files) > _OPEN_FILES:
                    self._files.popitem(last=False)
            self._files.move_to_end(segment)
            return file


class _File:
    """A file that is open for reading until nobody uses it any more."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            # Pages of a prompt follow each other, and two threads read them: the system's reading
            # ahead is right more often than it believes.
            with suppress(OSError):
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _record(descriptor: int, offset: int, end: int) -> tuple[PageKey, int] | None:
    """Key and bytes of the page whose record begins here, all of it in the file; else None."""
    try:
        data = os.pread(descriptor, HEADER_BYTES + 4096, offset)
        key, tokens, size, _ = parse(data)
        if offset + record_bytes(tokens, size) > end:
            return None
        if key is None:
            key = parse(os.pread(descriptor, HEADER_BYTES + tokens, offset))[0]
    except ValueError:
        return None
    return None if key is None else (key, size)


def _next_header(descriptor: int, offset: int) -> int | None:
    """Where, from this multiple of 64 on, something begins like a record; None before the end."""
    while data := os.pread(descriptor, _BLOCK, offset):
        at = data.find(MAGIC)
        while at >= 0 and at % ALIGNMENT:
            at = data.find(MAGIC, at + 1)
        if at >= 0:
            return offset + at
        offset += len(data)
    return None
