"""Compiled code on disk: found by the next process, and renewed with all that it was made from."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from coppice.kernels.cpu.code import kept

CALLER = """
from coppice.called import double
from coppice.kernels.cpu.code.kept import cfunc, njit
from numba import types

@njit
def answer(x):
    return double(x) + 1

@cfunc(types.int64(types.int64))
def by_address(x):
    return double(x) + 1
"""
CALLED = """
from coppice.constants import (
    FACTOR,
)
from coppice.kernels.cpu.code.kept import njit

@njit
def double(x):
    return FACTOR * x
"""
# Nothing below the folder READ_ONLY can be written, even by root, who runs tests in containers.
PROGRAM = """
import os, sys
folder = os.environ.get("READ_ONLY")
def refuse(event, args):
    if event in ("open", "os.mkdir") and str(args[0]).startswith(folder):
        if event == "os.mkdir" or args[2] & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "on purpose", args[0])
if folder:
    sys.addaudithook(refuse)
from coppice.caller import answer, by_address
print(answer(5), by_address.ctypes(5))
for counts in (answer.stats.cache_hits, answer.stats.cache_misses):
    print(sum(counts.values()))
print(by_address.cache_hits)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of the same name with that module, in which one compiled function calls another."""
    root = tmp_path / "coppice"
    code = root / "kernels" / "cpu" / "code"
    code.mkdir(parents=True)
    for folder in (code, *list(code.parents)[:3]):
        (folder / "__init__.py").touch()
    shutil.copy(kept.__file__, code)
    (root / "caller.py").write_text(CALLER)
    (root / "called.py").write_text(CALLED)
    (root / "constants.py").write_text("FACTOR = 2\n")
    return root


def run(package: Path, program: str = PROGRAM, **environment: str) -> list[int]:
    """The results of both functions; then hits and misses of the first, and hits of the second."""
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=package.parent,
        env={**os.environ, **environment},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [int(each) for each in found.stdout.split()]


def test_the_next_process_finds_compiled_code(package: Path) -> None:
    assert run(package) == [11, 11, 0, 1, 0]
    assert run(package) == [11, 11, 1, 0, 1]
    assert any((package / "__pycache__").glob("caller.answer*.nbi"))


def test_one_of_several_processes_compiles_and_the_others_wait(package: Path) -> None:
    """Within one file a compiled function calls another, and each is waited for."""
    caller = package / "caller.py"
    several = "@njit\ndef half(x):\n    return double(x) // 4\n\n@njit\ndef answer"
    text = CALLER.replace("@njit\ndef answer", several)
    caller.write_text(text.replace("double(x) + 1", "2 * half(x) + double(x) // 10 + 6"))
    found = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=package.parent, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    told = [[int(each) for each in process.communicate()[0].split()] for process in found]
    assert [each[:2] for each in told] == [[11, 11]] * 3
    misses = [each[3] for each in told]
    assert sorted(misses) == [0, 0, 1]
    # One of them also compiled the other function, which need not be the same.
    assert sorted(each[4] for each in told) == [0, 1, 1]


def test_a_process_that_does_not_end_is_not_waited_for_forever(package: Path) -> None:
    with (package / "caller.py").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        hurried = "from coppice.kernels.cpu.code import kept\nkept._PATIENCE = 0.2\n" + PROGRAM
        assert run(package, hurried) == [11, 11, 0, 1, 0]
    assert run(package) == [11, 11, 1, 0, 1]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        pytest.param("called", "FACTOR * x", "FACTOR * x + 2", marks=pytest.mark.slow),
        ("constants", "FACTOR = 2", "FACTOR = 1 + 2"),
    ],
)
def test_a_change_of_what_is_called_renews_the_caller(
    package: Path, module: str, old: str, new: str
) -> None:
    """Of the called function, and of a number that it takes from a third module.

    Both changes change the size of the file: Python itself takes a file of the same size that was
    written in the same second for the same.
    """
    run(package)
    file = package / f"{module}.py"
    file.write_text(file.read_text().replace(old, new))
    expected = 13 if module == "called" else 16
    assert run(package) == [expected, expected, 0, 1, 0]
    assert run(package) == [expected, expected, 1, 0, 1]


MOVED = """
from typing import NamedTuple
class Pair(NamedTuple):
    one: int
    other: int
"""


@pytest.mark.slow
def test_code_of_types_that_were_moved_is_replaced(package: Path) -> None:
    """numba reads the types of all that it kept before it looks whether that is still valid."""
    caller = package / "caller.py"
    add = "@njit\ndef add(pair):\n    return pair.one + pair.other\n\n@njit\ndef answer"
    caller.write_text(
        CALLER.replace("from numba", "from coppice.pairs import Pair\nfrom numba")
        .replace("@njit\ndef answer", add)
        .replace("double(x) + 1", "add(Pair(double(x), 1))")
    )
    (package / "pairs.py").write_text(MOVED)
    assert run(package) == [11, 11, 0, 1, 0]
    (package / "pairs.py").rename(package / "twos.py")
    caller.write_text(caller.read_text().replace("coppice.pairs", "coppice.twos"))
    assert run(package) == [11, 11, 0, 1, 0]
    assert run(package) == [11, 11, 1, 0, 1]


def test_a_change_elsewhere_renews_nothing(package: Path) -> None:
    (package / "other.py").write_text("from coppice.called import double\n")
    run(package)
    (package / "other.py").write_text("from coppice.caller import answer\n")
    assert run(package) == [11, 11, 1, 0, 1]


@pytest.mark.slow
def test_code_is_kept_elsewhere_where_the_sources_cannot_be_written(
    package: Path, tmp_path: Path
) -> None:
    """In the user's cache folder, or in the one that NUMBA_CACHE_DIR names."""
    for folder in {each.parent for each in package.rglob("*.py")}:
        (folder / "__pycache__").touch()  # a file: no folder of that name can be made
    for variable in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        place = {variable: str(tmp_path / variable)}
        assert run(package, **place) == [11, 11, 0, 1, 0]
        assert run(package, **place) == [11, 11, 1, 0, 1]
        assert any((tmp_path / variable).rglob("caller.answer*.nbi"))


@pytest.mark.slow
def test_code_that_can_only_be_read_is_used(package: Path, tmp_path: Path) -> None:
    """Beside sources that cannot be written, with and without a folder that can."""
    run(package)
    kept_files = {each: each.read_bytes() for each in package.rglob("*.nb?")}
    assert kept_files
    for there in (tmp_path / "empty", Path("/proc/nowhere")):
        places = {"READ_ONLY": str(package), "XDG_CACHE_HOME": str(there)}
        assert run(package, **places) == [11, 11, 1, 0, 1]
        assert not (there / "numba").exists()
    assert {each: each.read_bytes() for each in package.rglob("*.nb?")} == kept_files


@pytest.mark.slow
def test_where_nothing_can_be_written_functions_are_compiled_each_time(
    package: Path,
) -> None:
    places = {"READ_ONLY": str(package), "XDG_CACHE_HOME": "/proc/nowhere"}
    for more in ({}, {"NUMBA_CACHE_DIR": "/proc/nowhere/either"}):
        for _ in range(2):
            assert run(package, **places, **more) == [11, 11, 0, 1, 0]
    assert not list(package.rglob("*.nb?"))


@pytest.mark.slow
def test_what_is_missing_beside_the_sources_is_kept_elsewhere(
    package: Path, tmp_path: Path
) -> None:
    """Code of one function is read beside the source, that of the other in the user's folder."""
    run(package)
    for file in package.rglob("caller.by_address*"):
        file.unlink()
    places = {"READ_ONLY": str(package), "XDG_CACHE_HOME": str(tmp_path / "user")}
    assert run(package, **places) == [11, 11, 1, 0, 0]
    assert run(package, **places) == [11, 11, 1, 0, 1]
    assert {each.name.split("-")[0] for each in tmp_path.rglob("user/**/*.nbi")} == {
        "caller.by_address"
    }


def test_a_file_that_was_cut_is_compiled_again(package: Path) -> None:
    run(package)
    for file in package.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:20])
    assert run(package) == [11, 11, 0, 1, 0]


@pytest.mark.slow
def test_numbas_own_classes_are_taken_where_the_user_says_so(package: Path) -> None:
    place = {"NUMBA_CACHE_LOCATOR_CLASSES": "InTreeCacheLocator"}
    run(package, **place)
    (package / "constants.py").write_text("FACTOR = 3\n")
    assert run(package, **place)[0] == 11, "numba compares the file of the function alone"
