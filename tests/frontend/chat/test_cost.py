"""Calls and reasoning are found in linear time: whatever a model writes is read once."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.frontend.chat.dialect import Reading
from coppice.frontend.chat.pieces import LONG_SPACE, GatheredSpace, TextPiece, TextReader
from coppice.frontend.chat.reasoning.format import Start
from coppice.frontend.chat.reasoning.registry import REASONING
from coppice.frontend.chat.tools import registry
from coppice.frontend.chat.tools.choice import Function, Tool, tools_of
from tests.frontend import work
from tests.frontend.work import Text, steps_of

ROOT = Path(__file__).resolve().parents[3]
MOST = 2.5


class _Pattern:
    """A compiled pattern that counts: a linear one, as the test of patterns shows."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pattern, name)
        if not callable(found):
            return found

        def method(*args: Any) -> Any:
            text = next(each for each in reversed(args) if isinstance(each, str))
            start = next((each for each in args if isinstance(each, int)), 0)
            work._Count.steps += len(text) - start
            return found(*args)

        return method


WRITTEN = (
    "", "<tool_call>", '<tool_call>{"name": "', '{"name": "', '{"a": {"b": "',
    '{"name": "f", "arguments": {"a": "', '{"name": "f", "parameters": {', "a\n",
    "<think>", "[THINK]a", "a</think>",
)  # fmt: skip
REPEATED = (
    " ",
    "\n",
    "<",
    "{",
    '{"a":{},',
    "a",
    '\\"',
    "[",
    "<tool_call>",
    "</tool_call>",
    "x ",
    "</think",
)


_NAMES = [*registry.FORMATS, *(f"{each} reasons" for each in REASONING)]
_QUICK = ("hermes", "llama", "qwen3_coder")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow][: each not in _QUICK]) for each in _NAMES],
)
def test_readers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a model writes is read once, though it comes in small pieces."""
    for module in _modules("frontend/chat"):
        for key, value in list(vars(module).items()):
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, key, _Pattern(value))
    tool = Tool(type="function", function=Function(name="f"))
    tools = tools_of([tool], None, None)
    assert tools is not None

    calls, _, reasons = name.partition(" ")
    dialect: Any = SimpleNamespace(
        calls=registry.FORMATS.get(name), reasoning=REASONING[calls] if reasons else None
    )
    reading = Reading(dialect, tools, Start.OPEN)

    def make(size: int) -> Callable[[], Any]:
        def read() -> None:
            reader = reading.reader()
            for piece in pieces:
                reader.push(piece)
            reader.end()

        text = beginning + unit * (size // len(unit))
        pieces = [Text(text[at : at + 3]) for at in range(0, len(text), 3)]
        return read

    wrong = {}
    for beginning in WRITTEN:
        for unit in REPEATED:
            steps = steps_of(make(150)), steps_of(make(300))
            if steps[1] > MOST * steps[0]:
                wrong[beginning, unit] = steps
    assert not wrong, wrong


def test_white_space_comes_whole() -> None:
    """A long run of it is handed on with what follows, or at the end."""
    for text in (" " * 500 + "a" + "\n" * 500, " \n" * LONG_SPACE, "a" + " " * LONG_SPACE + "b"):
        reader = GatheredSpace(TextReader())
        pieces = [piece for character in text for piece in reader.push(character)] + reader.end()
        assert all(isinstance(piece, TextPiece) for piece in pieces)
        assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == text
    reader = GatheredSpace(TextReader())
    assert reader.push(" ") == [TextPiece(" ")], "a few are not held back"


def _modules(folder: str) -> list[Any]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [
        importlib.import_module(f"coppice.{name.removesuffix('.__init__')}")
        for name in names
        if "commands" not in name and "demo" not in name
    ]
