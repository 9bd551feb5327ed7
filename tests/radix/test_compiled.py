"""The compiled core of the tree: it does what its sources do, and is used only if they match."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.radix import POLICIES, compiled

ROOT = Path(__file__).resolve().parent.parent.parent

# A tight pool, all policies, hits that end anywhere, drafts; prints a digest of all results and of
# what the log says.
RUN = """
import hashlib, random
from array import array
from coppice.radix import POLICIES, OutOfPages, PagePool, RadixTree, check, compiled
from coppice.radix.mirror.changes import TreeChanges
print(compiled.in_use("coppice.radix"))
for policy in POLICIES:
    random.seed(policy)
    state = hashlib.sha256()
    tree = RadixTree(PagePool(60, 4), policy)
    changes = TreeChanges(tree, limit=20)
    running = []
    for step in range(1500):
        if len(running) < 4:
            stem = [random.randrange(3)] * random.randrange(20)
            prompt = [1, *stem, *(random.randrange(4) for _ in range(random.randrange(30)))]
            match = tree.match(prompt, limit=len(prompt) - 1)
            hold, table = tree.start(match)
            try:
                if match.length % 4 and not tree.claim_tail(hold):
                    table[-1] = tree.allocate(1)[0]
                table += tree.allocate(-(-(len(prompt) + 8) // 4) - len(table))
            except OutOfPages as error:
                state.update(str(error).encode())
                tree.unlock(hold)
                continue
            tree.insert(hold, prompt, table, draft=random.random() < 0.3)
            running.append((hold, prompt, table))
        else:
            hold, prompt, table = running.pop(random.randrange(len(running)))
            if random.random() < 0.3:
                tree.release(hold, table, drop=True)
            else:
                tree.finish(hold, prompt + [5] * random.randrange(8), table)
        if step % 40 < 10:
            state.update(repr(changes.drain()).encode())
        state.update(repr((tree.cached_tokens, tree.cached_pages, tree.locked_pages,
                           tree.num_nodes, tree.evicted_tokens, tree.pool.free_pages)).encode())
    assert changes.restarts
    check(tree, [(hold, table) for hold, _, table in running])
    print(policy, tree.evicted_tokens > 1000, state.hexdigest())
"""


def run(**environment: str) -> list[str]:
    """The lines that `RUN` prints."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", RUN],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=Path(compiled.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.skipif(not compiled.in_use("coppice.radix"), reason="the tree was not compiled here")
def test_compiled_and_sources_do_the_same() -> None:
    (first, *theirs), (second, *ours) = run(), run(COPPICE_PURE_PYTHON="1")
    assert (first, second) == ("True", "False")
    assert theirs == ours
    assert len(ours) == len(POLICIES)
    assert all(" True " in line for line in ours), "nothing was evicted"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package with sources of the modules' names, and a record of them."""
    folder = tmp_path / "grove"
    folder.mkdir()
    for name in compiled.MODULES:
        path = compiled.source(folder, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("ORIGIN = 'source'\n", encoding="utf-8")
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / compiled.RECORD).write_text(compiled.record(folder), encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    return folder


def hides(folder: Path) -> bool:
    """Whether the sources of `folder` are imported instead of compiled modules."""
    before = len(sys.meta_path)
    compiled.choose("grove", folder)
    if len(sys.meta_path) == before:
        return False
    spec = importlib.util.find_spec("grove.tree")
    assert spec is not None
    assert spec.origin == str(folder / "tree.py")
    return True


def test_compiled_modules_of_these_sources_are_used(package: Path) -> None:
    assert not hides(package)


@pytest.mark.parametrize("name", compiled.MODULES)
def test_a_changed_source_is_used_instead_of_what_was_compiled(package: Path, name: str) -> None:
    compiled.source(package, name).write_text("ORIGIN = 'changed'\n", encoding="utf-8")
    assert hides(package)


@pytest.mark.parametrize("installed", ["another one", ""])
def test_sources_are_used_without_the_library_of_the_compiled_ones(
    package: Path, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(compiled, "library", lambda: installed)
    assert hides(package)
    assert compiled.why_not(package) == (
        "librt is missing or not the one it was compiled with; install coppice again"
    )


def test_a_missing_library_has_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(compiled.library()) == 32
    monkeypatch.delitem(sys.modules, "librt.strings", raising=False)
    monkeypatch.setitem(sys.modules, "librt", None)
    assert compiled.library() == ""


def test_the_switch_prefers_sources(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "1")
    assert hides(package)


def test_without_compiled_modules_nothing_is_in_the_way(package: Path) -> None:
    (package / compiled.RECORD).unlink()
    assert not hides(package)


def test_the_reason_for_which_sources_run_is_known(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled.why_not(package) == "a source has changed since it was compiled"
    (package / compiled.RECORD).unlink()
    assert compiled.why_not(package) == "they were never compiled"
    (package / compiled.REASON).write_text("no C compiler was found\n", encoding="utf-8")
    assert compiled.why_not(package) == "no C compiler was found"
    monkeypatch.setenv(compiled.SWITCH, "1")
    assert compiled.why_not(package) == "COPPICE_PURE_PYTHON is 1"


def test_other_modules_are_left_alone(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "1")
    assert hides(package)
    assert sys.meta_path[0].find_spec("grove.accounting", None) is None
    assert sys.meta_path[0].find_spec("meadow.tree", None) is None


def test_every_compiled_module_exists() -> None:
    folder = Path(compiled.__file__).parent
    assert all(compiled.source(folder, name).is_file() for name in compiled.MODULES)
