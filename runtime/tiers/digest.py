"""A digest of a model's weights: what they contain, not where they are or what they are called."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

logger = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
_BLOCK = 2**24


def cache_file() -> Path:
    """Where digests of files are remembered, by the user's own convention for such files."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "coppice" / "digests.json"


def weights_digest(folder: Path, remember: Path | None = None) -> bytes:
    """The digest of all files of weights in a folder, and of its config.json: 16 bytes.

    Each file is read once, at the speed of the disk. `remember` is a file that keeps the digests of
    files; one whose stamp is as it was is not read again.

    Raises OSError if a file can't be read.
    """
    known = _read(remember)
    found: dict[str, tuple[list[int], str]] = {}
    digests = []
    for path in _files(folder):
        stamp = _stamp(path)
        entry = known.get(str(path))
        if entry is None or entry[0] != stamp:
            entry = stamp, _file_digest(path)
            found[str(path)] = entry
        digests.append(entry[1])
    if found and remember is not None:
        _write(remember, {**known, **found})
    return xxhash.xxh3_128_digest("".join(sorted(digests)).encode())


def weights_stamps(folder: Path) -> dict[str, list[int]]:
    """The stamps of the files that `weights_digest` reads, by path; none of one that is gone.

    Files were not changed, nor replaced, between two times at which these were equal.
    """
    stamps = {}
    for path in _files(folder):
        with suppress(OSError):
            stamps[str(path)] = _stamp(path)
    return stamps


def _files(folder: Path) -> Iterator[Path]:
    """The files of weights in a folder, and its config.json, where they lie; in order."""
    files = {path.resolve() for form in _WEIGHTS for path in folder.glob(form)}
    config = folder / "config.json"
    if config.is_file():
        files.add(config.resolve())
    yield from sorted(files)


def _stamp(path: Path) -> list[int]:
    """The size of a file, its times of change, and its number.

    The time at which the system noted the last change can't be set by programs, so a copy that
    keeps the time of its original has another stamp all the same.
    """
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _file_digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(_BLOCK))
        read: Callable[[memoryview], int | None] = file.readinto
        while count := read(block):
            state.update(block[:count])
    return state.hexdigest()


def _read(remember: Path | None) -> dict[str, tuple[list[int], str]]:
    if remember is None:
        return {}
    try:
        content = json.loads(remember.read_text(encoding="utf-8"))
        return {str(path): (list(stamp), str(digest)) for path, (stamp, digest) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # missing, or damaged: everything is read again


def _write(remember: Path, entries: dict[str, tuple[list[int], str]]) -> None:
    """Replaces the file at once, so that no reader finds half of it."""
    part = remember.with_suffix(f".{os.getpid()}")
    try:
        remember.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(entries), encoding="utf-8")
        part.replace(remember)
    except OSError as error:
        logger.info("digests of weights are not remembered: %s", error)
