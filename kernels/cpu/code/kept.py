"""Compiled functions that stay on disk until a source that they depend on changes.

``njit`` and ``cfunc`` are numba's, with its cache on disk: beside the source or, where that cannot
be written, in the user's cache folder; ``NUMBA_CACHE_DIR`` moves it. numba itself compares the file
of the function alone, and would keep the old code of a checkout in which only a called function has
changed. Here the stamp of cached code covers the module of the function and all modules of this
package that it imports at the top of the file, directly or through others.

numba takes classes that give such stamps by the name of the setting
``NUMBA_CACHE_LOCATOR_CLASSES``, and its own classes are their bases (numba 0.68). A version that
lacks them, and a user who sets that variable, get what numba does without this module.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

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
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def _stamping(base: Any) -> Any:
    class Locator(base):
        """A place for the compiled code of a function, with the stamp of its sources."""

        def __init__(self, function: Any, file: str) -> None:
            super().__init__(function, file)
            self._module = function.__module__

        def get_source_stamp(self) -> str:
            return sources(self._module)

    return Locator


_LOCATORS = ""
_BASES = ("UserProvidedCacheLocator", "InTreeCacheLocator", "UserWideCacheLocator")
if hasattr(numba.config, "CACHE_LOCATOR_CLASSES") and all(
    hasattr(caching, name) for name in _BASES
):
    # numba finds them by these names.
    in_named_folder, beside_source, in_users_folder = (
        _stamping(getattr(caching, name)) for name in _BASES
    )
    _LOCATORS = ",".join(
        f"{__name__}.{name}" for name in ("in_named_folder", "beside_source", "in_users_folder")
    )


@contextmanager
def _stamped() -> Iterator[None]:
    """What is decorated in this context gets the stamp of its sources."""
    if not _LOCATORS or numba.config.CACHE_LOCATOR_CLASSES:
        yield
        return
    numba.config.CACHE_LOCATOR_CLASSES = _LOCATORS
    try:
        yield
    finally:
        numba.config.CACHE_LOCATOR_CLASSES = ""


def njit(function: Any = None, **options: Any) -> Any:
    """``numba.njit`` with these options, kept on disk."""
    if function is None:
        return partial(njit, **options)
    with _stamped():
        return numba.njit(function, cache=True, **options)


def cfunc(signature: Any, **options: Any) -> Any:
    """``numba.cfunc`` with these options, kept on disk."""

    def decorate(function: Any) -> Any:
        with _stamped():
            return numba.cfunc(signature, cache=True, **options)(function)

    return decorate
