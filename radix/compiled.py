"""The core of the tree as compiled code, used where it was built from the present sources.

`setup.py` compiles `MODULES` with mypyc: the same Python takes about half the time per request.
Without a C compiler or mypyc, or when a source has changed since, the sources run as they are.
Either all modules run compiled or none, since compiled classes have another memory layout.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_: bool) -> Any:
        """A setting for the compiler; without effect where the source runs."""
        return lambda cls: cls


MODULES = (
    "accounting.ledger",
    "accounting.log.account",
    "accounting.log.items",
    "accounting.log.pace",
    "accounting.seen.texts",
    "drafts",
    "edges",
    "eviction.adaptive",
    "eviction.density",
    "eviction.order",
    "eviction.past_uses",
    "eviction.recency",
    "eviction.records",
    "eviction.reuse",
    "eviction.shadows",
    "leaves",
    "mirror.log",
    "mirror.records",
    "mirror.suffixes.branches",
    "mirror.suffixes.hashes",
    "mirror.suffixes.index",
    "mirror.suffixes.text",
    "node",
    "pages.pool",
    "state",
    "tokens",
    "tree",
)

# If this environment variable is 1, compiled code is neither built nor used.
SWITCH = "COPPICE_PURE_PYTHON"

# File beside the modules with the `digest` of the sources that were compiled, and the `library`.
RECORD = "compiled.digest"

# File beside the modules with the reason for which a build did not compile them.
REASON = "not-compiled.txt"


def source(folder: Path, name: str) -> Path:
    """The source of one of `MODULES`, below the folder of the package."""
    return folder.joinpath(*name.split(".")).with_suffix(".py")


def digest(folder: Path) -> str:
    """Hash of the sources of all compiled modules in `folder`."""
    state = hashlib.blake2b(digest_size=16)
    for name in MODULES:
        state.update(source(folder, name).read_bytes())
    return state.hexdigest()


def library() -> str:
    """Hash of the compiler's library, which compiled modules call; empty if it is missing.

    They can't be imported with one of another interface.
    """
    try:
        found = find_spec("librt.strings")
    except ImportError:
        found = None
    if found is None or found.origin is None:
        return ""
    return hashlib.blake2b(Path(found.origin).read_bytes(), digest_size=16).hexdigest()


def record(folder: Path) -> str:
    """What `RECORD` holds if compiled modules are those of the sources and the library here."""
    return f"{digest(folder)} {library()}"


class _Sources:
    """Finds the sources of the modules, though compiled code lies beside them."""

    def __init__(self, package: str, folder: Path) -> None:
        self._package, self._folder = package, folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{self._package}.")
        if name == fullname or name not in MODULES:
            return None
        return spec_from_file_location(fullname, source(self._folder, name))


def choose(package: str, folder: Path) -> None:
    """Hides compiled modules from the import of `package` in `folder` unless they are to be used.

    Must run before any of them is imported. Takes milliseconds if there are compiled modules.
    """
    written = folder / RECORD
    if not written.exists():
        return
    if os.environ.get(SWITCH) == "1" or written.read_text(encoding="ascii") != record(folder):
        sys.meta_path.insert(0, _Sources(package, folder))


def in_use(package: str) -> bool:
    """Whether `package`, which has been imported, runs compiled modules."""
    return not str(sys.modules[f"{package}.tree"].__file__).endswith(".py")


def why_not(folder: Path) -> str:
    """Why the sources of `folder` run, where compiled modules do not."""
    if os.environ.get(SWITCH) == "1":
        return f"{SWITCH} is 1"
    reason = folder / REASON
    if reason.exists():
        return reason.read_text(encoding="utf-8").strip()
    if not (folder / RECORD).exists():
        return "they were never compiled"
    if (folder / RECORD).read_text(encoding="ascii").partition(" ")[2] != library():
        return "librt is missing or not the one it was compiled with; install coppice again"
    return "a source has changed since it was compiled"


def described(package: str, folder: Path) -> str:
    """Whether the core of the tree is compiled, and if not, why."""
    if in_use(package):
        return "the tree is compiled"
    return f"the tree is not compiled ({why_not(folder)})"


if __package__:  # not in `setup.py`
    choose(__package__, Path(__file__).parent)
