"""Compiled functions that stay on disk until a source that they depend on changes.

``njit`` and ``cfunc`` are numba's, with its cache on disk: beside the source and in the user's
cache folder, or in the folder that ``NUMBA_CACHE_DIR`` names. Code is read from each of them that
has it, and written to the first that can be written. So code that was compiled when a package was
installed is used by those who can only read it, and where nothing can be written functions are
compiled at each start. numba itself uses one folder, which must be writable.

Processes that start together, such as replicas and ranks, need the same code at the same time. One
of them compiles it, and the others wait and read it (``_lock``).

numba also compares the file of the function alone, and would keep the old code of a checkout in
which only a called function has changed. Here the stamp of cached code covers the module of the
function and all modules of this package that it imports at the top of the file, directly or through
others.

This builds on numba's classes of caches (numba 0.68). A version that lacks them, and a user who
sets ``NUMBA_CACHE_LOCATOR_CLASSES``, get what numba does without this module.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, ccallback, sigutils

_log = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]
_IMPORT = re.compile(rf"^from ({_PACKAGE}[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


@cache
def _read(file: str) -> tuple[bytes, list[str]]:
    """A digest of a source file, and what it imports of this package: modules and other names."""
    text = Path(file).read_text(encoding="utf-8")
    names = []
    for package, imported in _IMPORT.findall(text):
        names += [package, *(f"{package}.{name}" for name in re.findall(r"\w+", imported))]
    return hashlib.sha256(text.encode()).digest(), names


@cache
def sources(module: str) -> str:
    """A digest of the sources of a module and of all that it imports of this package, loaded."""
    digests: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and name not in digests:
            digests[name], imported = _read(file)
            waiting += imported
    parts = [digests[name] for name in sorted(digests)]
    # Constants of the code, such as the lanes of a register, differ by the path that is forced
    # (``code.processor``).
    forced = os.environ.get("COPPICE_CPU_PATHS", "")
    return hashlib.sha256(b"".join([*parts, forced.encode()])).hexdigest()


_BASES = ("UserProvidedCacheLocator", "InTreeCacheLocator", "UserWideCacheLocator")
_NEEDED = (*_BASES, "FunctionCache", "IndexDataCacheFile")
_OURS = (
    hasattr(numba.config, "CACHE_LOCATOR_CLASSES")
    and all(hasattr(caching, name) for name in _NEEDED)
    and hasattr(ccallback, "CFunc")
)


@cache
def _writable(folder: str) -> bool:
    """Whether files can be written to a folder, which is made if need be."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@cache
def _cannot_keep(folders: tuple[str, ...]) -> None:
    _log.warning(
        "compiled code is kept nowhere, so that each start compiles it anew: none of %s can be "
        "written; NUMBA_CACHE_DIR names another folder",
        ", ".join(folders),
    )


# Seconds for which a process waits for another one to compile a function of a source file, with all
# that it calls. A busy machine takes less.
_PATIENCE = 120.0
# What this process compiles, each called by the one before: its cache, its source file, and the
# lock on that file, -1 where one before has it or there is none. numba compiles in one thread at a
# time.
_compiling: list[tuple[object, str, int]] = []
# Source files for which it has waited in vain. It does not wait for them again.
_given_up: set[str] = set()


def _lock(file: str) -> int:
    """A descriptor that holds a lock on a file as long as it is open; -1: there is none.

    Modules do not import each other in circles, so processes do not wait for each other in one.
    """
    if file in _given_up or any(file == other for _, other, _ in _compiling):
        return -1
    try:
        lock = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    begin = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() - begin < _PATIENCE:
                time.sleep(0.02)
                continue
            _log.info("%s: another process still compiles it, so this one does, too", file)
            _given_up.add(file)
        except OSError:  # a file system without locks
            pass
        os.close(lock)
        return -1


def _unlock(cache: object) -> None:
    """Gives up the lock of that cache's function, and those of functions that it called in vain."""
    while any(other is cache for other, _, _ in _compiling):
        _, _, lock = _compiling.pop()
        if lock >= 0:
            os.close(lock)


def _folders(function: Any, file: str) -> list[str]:
    """Where the code of a function may lie, best first."""
    named, *others = (getattr(caching, name) for name in _BASES)
    found = []
    if numba.config.CACHE_DIR:
        found.append(named(function, file).get_cache_path())
        if _writable(found[0]):
            return found
    found += [each(function, file).get_cache_path() for each in others]
    return [each for each in found if os.path.isabs(each)]  # not below "~", where there is no home


if _OURS:

    class Place(caching.InTreeCacheLocator):
        """A place for the compiled code of a function, with the stamp of its sources.

        numba finds this class by its name. It asks nothing of the folder, which `_Kept` does.
        """

        def __init__(self, function: Any, file: str) -> None:
            super().__init__(function, file)
            self._module = function.__module__
            self.folders = _folders(function, file)

        def get_source_stamp(self) -> str:
            return sources(self._module)

        def ensure_cache_path(self) -> None:
            pass

    class _Kept(caching.FunctionCache):
        """The compiled code of one function, in all folders that have it."""

        def __init__(self, function: Any) -> None:
            numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Place.__name__}"
            try:
                super().__init__(function)
            finally:
                numba.config.CACHE_LOCATOR_CLASSES = ""
            place = self._impl.locator
            self._files = _Files(place.folders, self._impl.filename_base, place.get_source_stamp())
            self._cache_file = self._files
            self._cache_path = self._files.path
            self._source = function.__code__.co_filename

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            """The code for a signature. Where it is None, the caller compiles it and saves it."""
            found = super().load_overload(sig, target_context)
            if found is None and self._files.writable:
                _compiling.append((self, self._source, _lock(self._source)))
                # Meanwhile another process may have saved it.
                found = super().load_overload(sig, target_context)
                if found is not None:
                    _unlock(self)
            return found

        def save_overload(self, sig: Any, data: Any) -> None:
            """Keeps the code for a signature."""
            try:
                super().save_overload(sig, data)
            finally:
                _unlock(self)

    class _Files:
        """The files of one function's code, as `IndexDataCacheFile` in several folders."""

        def __init__(self, folders: list[str], name: str, stamp: str) -> None:
            self.path = folders[0] if folders else ""
            self._folders = tuple(folders)
            self._files = [caching.IndexDataCacheFile(folder, name, stamp) for folder in folders]

        @property
        def writable(self) -> bool:
            """Whether code can be kept."""
            return any(map(_writable, self._folders))

        def load(self, key: Any) -> Any:
            """The code with that key; None if no folder has it."""
            for file in self._files:
                try:
                    found = file.load(key)
                except Exception as error:  # not readable, or cut by a full disk
                    _log.debug("%s: compiled code cannot be read: %r", file, error)
                    continue
                if found is not None:
                    return found
            return None

        def save(self, key: Any, data: Any) -> None:
            """Keeps code in the first folder that takes it."""
            for folder, file in zip(self._folders, self._files, strict=True):
                try:
                    os.makedirs(folder, exist_ok=True)
                    try:
                        file.save(key, data)
                    except OSError:
                        raise
                    except Exception as error:
                        # Its index was cut, or has types of a module that is elsewhere by now.
                        _log.debug("%s: compiled code is replaced: %r", folder, error)
                        file.flush()
                        file.save(key, data)
                except OSError as error:
                    _log.debug("%s: compiled code cannot be written: %r", folder, error)
                    continue
                return
            _cannot_keep(tuple(os.path.dirname(each) for each in self._folders))

        def flush(self) -> None:
            """Forgets what the folders have, as far as they can be written."""
            for file in self._files:
                with suppress(OSError):
                    file.flush()


def _ours() -> bool:
    return _OURS and not numba.config.CACHE_LOCATOR_CLASSES


def njit(function: Any = None, **options: Any) -> Any:
    """``numba.njit`` with these options, kept on disk."""
    if function is None:
        return partial(njit, **options)
    if not _ours():
        return numba.njit(function, cache=True, **options)
    made = numba.njit(function, **options)
    made._cache = _Kept(made.py_func)
    return made


def cfunc(signature: Any, **options: Any) -> Any:
    """``numba.cfunc`` with these options, kept on disk."""

    def decorate(function: Any) -> Any:
        if not _ours():
            return numba.cfunc(signature, cache=True, **options)(function)
        normal = sigutils.normalize_signature(signature)
        made = ccallback.CFunc(function, normal, locals={}, options=options)
        made._cache = _Kept(function)  # type: ignore[attr-defined]
        made.compile()
        return made

    return decorate
