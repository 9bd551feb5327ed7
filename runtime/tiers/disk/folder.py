"""The folder of a disk tier: what it contains, who has it, and what repairs it."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from coppice.runtime.tiers.disk.index import Entry, Index, is_damage
from coppice.runtime.tiers.disk.record import VERSION
from coppice.runtime.tiers.disk.segments import Segments
from coppice.runtime.tiers.store import TierFailed

logger = logging.getLogger(__name__)

_INDEX, _LOCK = "index.sqlite", "lock"
_ENTERED = 1000  # entries of one transaction while an index is made anew
# Who only asks whether a folder is in use has its lock for an instant.
_TRIES, _TRY_SECONDS = 10, 0.05


def content(folder: Path) -> Path:
    """Where pages of this version's format lie; those of others lie beside it, and stay."""
    return folder / f"v{VERSION}"


def older(folder: Path) -> list[Path]:
    """What older versions have left in a folder, oldest first."""
    found = {
        int(name[1]): path
        for path in folder.iterdir()
        if (name := re.fullmatch(r"v(\d{1,9})", path.name, re.ASCII)) and path.is_dir()
    }
    return [found[version] for version in sorted(found) if version < VERSION]


class FolderInUse(TierFailed):
    """Another process has the folder."""


class FolderLock:
    """The right to write to a folder, for as long as this process has it and lives.

    Raises FolderInUse if another process has it, OSError if the folder can't be used.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._take(folder)
        except BaseException:
            self.release()
            raise
        with suppress(OSError):  # a full disk; who asks then learns no number
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def _take(self, folder: Path) -> None:
        for _ in range(_TRIES):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_TRY_SECONDS)
        owner = os.pread(self._file, 32, 0).decode(errors="replace").strip()
        raise FolderInUse(
            f"disk_cache: {str(folder.parent)!r} is in use by process {owner or 'unknown'}; each "
            "server needs a folder of its own, or a shared_cache"
        )

    def release(self) -> None:
        """Gives the folder back; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def owner(folder: Path) -> str | None:
    """The process that has a folder's content, as a number or "unknown"; None if none has it."""
    try:
        file = os.open(folder / _LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(file)
    return None


def open_index(folder: Path, segments: Segments) -> Index:
    """The index in a folder; one that is damaged or missing is made anew from the segments.

    O(1) for one that is right.
    """
    path = folder / _INDEX
    if not path.exists():
        return rebuild(folder, segments, "it is missing")
    try:
        return Index(path)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return rebuild(folder, segments, str(error))


def rebuild(folder: Path, segments: Segments, why: str) -> Index:
    """Makes the index of a folder anew, from the headers of all records. O(records)."""
    if any(True for _ in segments):
        logger.warning("the index of %s can't be used (%s) and is made anew", folder, why)
    for name in (_INDEX, f"{_INDEX}-wal", f"{_INDEX}-shm"):
        (folder / name).unlink(missing_ok=True)
    index = Index(folder / _INDEX, new=True)
    waiting: list[Entry] = []
    for segment in segments:
        for key, offset, size in segments.scan(segment):
            waiting.append(Entry(key, segment, offset, size))
            if len(waiting) == _ENTERED:
                index.add(waiting)
                waiting.clear()
    index.add(waiting)
    index.finish()
    return index


def read_index(folder: Path) -> Index:
    """The index of a folder for reading only, while a server has it or none does.

    Raises ValueError if there is none, sqlite3.Error if it can't be read.
    """
    path = content(folder) / _INDEX
    if not path.is_file():
        raise no_cache(folder)
    return Index(path, read_only=True)


def index_bytes(folder: Path) -> int:
    """Bytes of a folder's index, its log included."""
    files = (content(folder) / f"{_INDEX}{end}" for end in ("", "-wal", "-shm"))
    return sum(path.stat().st_size for path in files if path.is_file())


def no_cache(folder: Path) -> ValueError:
    """What to raise for a folder without pages of this version."""
    there = "" if folder.exists() else ", which does not exist"
    return ValueError(f"DIR must be the folder of a disk_cache, got {str(folder)!r}{there}")
