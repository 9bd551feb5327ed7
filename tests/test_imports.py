"""The plan of the house as tests: what each room may import, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Beside the standard library and the room itself.
ALLOWED: dict[str, set[str]] = {
    # mypy_extensions only for what compiles the tree: nothing imports it when it runs.
    "radix": {"numpy", "xxhash", "sortedcontainers", "mypy_extensions"},
    "kernels": {"numpy", "numba", "llvmlite", "torch", "triton", "flashinfer"},
    "runtime": {
        "coppice.radix",
        "coppice.kernels",
        "numpy",
        "torch",
        "transformers",
        "safetensors",
        "huggingface_hub",
        "llguidance",
        "sortedcontainers",
        "xxhash",
    },
    "frontend": {
        "coppice",
        "coppice.runtime",
        "numpy",
        "aiohttp",
        "plotly",
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "rich",
        "tokenizers",
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
        ("frontend", "from . import llm"),
        ("frontend", "import runtime.engine"),
    ],
)
def test_the_check_sees_each_kind_of_trespass(room: str, source: str) -> None:
    assert broken_rules(room, source)


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
        "import coppice.frontend.serve\n"
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
