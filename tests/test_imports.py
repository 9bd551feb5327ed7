"""The plan of the house as tests: what each room may import, and what importing it costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Beside the standard library and the room itself.
ALLOWED: dict[str, set[str]] = {
    # The last two for what compiles the tree: sources that run import neither.
    "radix": {"numpy", "xxhash", "sortedcontainers", "mypy_extensions", "librt.strings"},
    "kernels": {"numpy", "numba", "llvmlite", "torch", "triton", "flashinfer"},
    "runtime": {
        "coppice.radix",
        "coppice.kernels",
        "numpy",
        "torch",
        "transformers",
        "safetensors",
        "huggingface_hub",
        "gguf",
        "tqdm",
        "llguidance",
        "sortedcontainers",
        "xxhash",
        "redis",
        "zmq",
        "msgspec",
    },
    "frontend": {
        "coppice",
        "coppice.runtime",
        "coppice.radix.mirror",  # of the tree's room this sub-room, and tokens, alone
        "coppice.radix.tokens",
        "numpy",
        "aiohttp",
        "markdown_it",
        "plotly",
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "ray",
        "rich",
        "tokenizers",
        "tqdm",
        "transformers",
    },
}


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each module imported anywhere in `source`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module == "coppice":
                for alias in node.names:
                    room = alias.name in ALLOWED
                    yield node.lineno, f"coppice.{alias.name}" if room else "coppice"
            else:
                yield node.lineno, node.module or ""


def broken_rules(room: str, source: str) -> list[str]:
    """What in `source`, a module of `room`, the plan of the house does not allow."""
    allowed = ALLOWED[room] | {f"coppice.{room}"}
    broken = []
    for line, name in imported_modules(source):
        if name.startswith("."):
            broken.append(f"line {line}: relative import {name}")
            continue
        parts = name.split(".")
        owner = ".".join(parts[:2]) if parts[0] == "coppice" else parts[0]
        if ".".join(parts[:3]) in allowed:
            continue
        if owner not in allowed and parts[0] not in sys.stdlib_module_names:
            broken.append(f"line {line}: {room}/ may not import {name}")
    return broken


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    modules = sorted((ROOT / room).rglob("*.py"))
    assert modules, f"no modules found in {room}/"
    broken = [
        f"{path.relative_to(ROOT)}: {rule}"
        for path in modules
        for rule in broken_rules(room, path.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("radix", "import torch"),
        ("radix", "def f():\n    import coppice.runtime.engine.core"),
        ("kernels", "from coppice.radix import RadixTree"),
        ("runtime", "from coppice import frontend"),
        ("runtime", "import aiohttp.web"),
        ("frontend", "from coppice.kernels import interface"),
        ("frontend", "from coppice.radix.pages.pool import PagePool"),
        ("frontend", "from coppice.radix.tree import RadixTree"),
        ("frontend", "from . import llm"),
        ("frontend", "import runtime.engine"),
    ],
)
def test_the_check_sees_each_kind_of_trespass(room: str, source: str) -> None:
    assert broken_rules(room, source)


# The order of sub-rooms, and of the modules that lie beside them: each may import what stands in
# lines above its own, and nothing in its own line but itself.
ORDER: dict[str, str] = {
    "radix": """
        compiled tokens namespace pages
        node
        eviction
        state
        leaves
        drafts
        edges
        tree
        pins upkeep accounting mirror
    """,
    "kernels": """
        transfer
        attention
        pages schedule
        cpu triton
        rounding
        flashinfer sampling
        backends
    """,
    "runtime": """
        startup
        requests
        metrics
        tiers
        sampling
        schedule model
        planning transformers
        config
        runner
        engine
        report
        process offline
    """,
    "frontend": """
        errors
        strict
        text
        chat
        client
        http
        api
        report
        python server
        router
        replay
        simulate demo
        commands
    """,
}


def module_graph(root: Path) -> dict[str, set[str]]:
    """Each module below the rooms of `root`, and the modules that it imports, types included.

    A module is named by its path, such as `radix.pages.pool`; a folder's name is its `__init__`.
    """
    files = {}
    for room in ALLOWED:
        for path in (root / room).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.removeprefix("coppice.") for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                folder = node.module.removeprefix("coppice.")
                names = {f"{folder}.{alias.name}" for alias in node.names}
                imported |= names & files.keys() or {folder}
        imported &= files.keys() - {module}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of the graph, its first node again at its end; [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(node) for node in error.args[1]]
    return []


def folder_graphs(graph: Mapping[str, set[str]]) -> dict[str, dict[str, set[str]]]:
    """For each folder, which of its entries import which, through all that lies in them."""
    folders: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, imported in graph.items():
        ours = module.split(".")
        for other in imported:
            theirs = other.split(".")
            depth = next(
                (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                None,
            )
            if depth:  # else one is the folder of the other, or they are of two rooms
                folders[".".join(ours[:depth])][ours[depth]].add(theirs[depth])
    return {folder: dict(entries) for folder, entries in folders.items()}


@cache
def graph_here() -> dict[str, set[str]]:
    """That of this repository, made by the first test that needs it and not by each collection."""
    return module_graph(ROOT)


def test_the_picture_in_the_documentation_has_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"[\w-]+(?=/)", text.split("```")[1]))
    there = {
        folder.name
        for room in ALLOWED
        for folder in [ROOT / room, *(ROOT / room).rglob("*/")]
        if folder.is_dir() and folder.name != "__pycache__"
    }
    assert drawn == there


def test_no_module_imports_another_in_a_circle() -> None:
    assert not circles(graph_here())


def test_no_two_entries_of_a_folder_import_each_other() -> None:
    found = {folder: circles(entries) for folder, entries in folder_graphs(graph_here()).items()}
    assert not {folder: circle for folder, circle in found.items() if circle}


@pytest.mark.parametrize("room", sorted(ORDER))
def test_sub_rooms_import_in_their_order(room: str) -> None:
    levels = [line.split() for line in ORDER[room].strip().splitlines()]
    level = {name: number for number, line in enumerate(levels) for name in line}
    there = {module.split(".")[1] for module in graph_here() if module.startswith(f"{room}.")}
    assert set(level) == there, "ORDER lists what is in the folder"
    wrong = [
        f"{entry} imports {other}"
        for entry, others in folder_graphs(graph_here()).get(room, {}).items()
        for other in others
        if level[other] >= level[entry]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_checks_see_circles_and_types(tmp_path: Path) -> None:
    def write(path: str, source: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source, encoding="utf-8")

    write("radix/__init__.py", "")
    write("radix/a/__init__.py", "")
    write("radix/a/one.py", "def f():\n    from coppice.radix.b.two import x")
    write("radix/b/__init__.py", "")
    write("radix/b/two.py", "x = 1")
    write("radix/b/three.py", "from typing import TYPE_CHECKING")
    assert not circles(module_graph(tmp_path))
    write("radix/b/three.py", "if TYPE_CHECKING:\n    from coppice.radix.a import one")
    graph = module_graph(tmp_path)
    assert not circles(graph), "no module imports itself by way of others"
    assert set(circles(folder_graphs(graph)["radix"])) == {"a", "b"}
    write("radix/b/two.py", "import coppice.radix.b.three")
    assert set(circles(module_graph(tmp_path))) == {"radix.a.one", "radix.b.two", "radix.b.three"}


FOLDERS = sorted(path.parent for room in ALLOWED for path in (ROOT / room).rglob("__init__.py"))


@pytest.mark.parametrize("folder", [str(path.relative_to(ROOT)) for path in FOLDERS])
def test_a_folder_is_small_and_says_what_it_is_for(folder: str) -> None:
    path = ROOT / folder
    text = ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8")))
    assert text and text.split("\n")[0].endswith("."), "one sentence says what the folder is for"
    entries = [
        each.name.split(".")[0]
        for each in path.iterdir()
        if each.suffix not in (".so", ".digest") and each.name not in ("__init__.py", "__pycache__")
    ]
    assert len(entries) <= 15, sorted(entries)
    repeated = [name for name in entries if path.name in (name, *name.split("_"))]
    assert not repeated, f"{repeated} repeat the name of their folder"


def test_kernels_is_no_more_than_a_name() -> None:
    """Who finds the folder as a top-level package must find nothing to take from it."""
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def test_no_conftest_at_the_root() -> None:
    assert not (ROOT / "conftest.py").exists()


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_the_tree_works_where_torch_is_not_installed() -> None:
    ran = python(
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'transformers'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import coppice, coppice.radix\n"
        "from coppice import PagePool, RadixTree\n"
        "assert RadixTree.__module__.startswith('coppice.radix')\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_importing_the_package_loads_no_room() -> None:
    ran = python(
        "import sys\n"
        "import coppice\n"
        "heavy = {'torch', 'numpy', 'numba', 'transformers', 'aiohttp'} & set(sys.modules)\n"
        "rooms = [name for name in sys.modules if name.startswith('coppice.')]\n"
        "assert not heavy and not rooms, (heavy, rooms)\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_a_server_does_without_torch() -> None:
    """Its engine computes, in a process of its own: torch would be 2 seconds and 200 MB more."""
    ran = python(
        "import sys\n"
        "import coppice.frontend.server.run\n"
        "from coppice.frontend.text.tokenizer import Tokenizer, model_source\n"
        "demo = Tokenizer(model_source('demo'), without_torch=True)\n"
        "turns = [{'role': 'user', 'content': 'Hello'}]\n"
        "text = demo.wrapped.apply_chat_template(turns, tokenize=False)\n"
        "assert 'Hello' in text\n"
        "unwanted = {'torch', 'numba', 'safetensors'} & set(sys.modules)\n"
        "assert not unwanted, unwanted\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_an_engine_is_imported_without_what_only_some_requests_need() -> None:
    ran = python(
        "import sys\n"
        "from coppice import Engine\n"
        "unwanted = {'torch._dynamo', 'transformers.models', 'llguidance.hf'} & set(sys.modules)\n"
        "assert not unwanted, unwanted\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_every_public_name_is_there() -> None:
    import coppice

    for name in coppice.__all__:
        assert getattr(coppice, name) is not None
        assert name in dir(coppice)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = coppice.no_such_name  # type: ignore[attr-defined]
