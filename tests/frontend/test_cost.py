"""What a client sends costs no more than its size: twice the input, at most 2.5 times the steps.

Steps are counted (see `work`), never timed. Each input is one that an earlier version, or a usual
way of writing the same, needs quadratic time for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coppice.frontend.chat.tools.choice import (
    AllowedTools,
    AllowedToolsChoice,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    tools_of,
)
from coppice.frontend.client.deltas import Deltas
from coppice.frontend.http import json_bodies
from coppice.frontend.text.detokenizer import REPLACEMENT, IncrementalDecoder
from coppice.frontend.text.outputs import TextDelta, joined
from coppice.frontend.text.stop_strings import StopStrings
from coppice.runtime.sampling.token_rules import BadWords
from tests.frontend.work import Bytes, Text, growth, pumps, regex_steps

ROOT = Path(__file__).resolve().parents[2]
MOST = 2.5


@pytest.mark.parametrize(
    ("begin", "unit"),
    [
        (b'"', b'\\",'),  # stopped a server for hours: a string without an end
        (b"", b'\\",'),
        (b'"', b","),
        (b"", b'"'),
        (b"", b'","'),
        (b'"', b"\\"),
        (b'"\\', b"\\\\"),
        (b"[", b"[,"),
    ],
)
def test_values_of_a_body(begin: bytes, unit: bytes) -> None:
    def make(size: int) -> Callable[[], Any]:
        raw = Bytes(begin + unit * (size // len(unit)))
        return lambda: json_bodies._commas_outside_strings(raw)

    assert growth(make, 2**16) <= MOST


def test_the_count_sees_a_scan_that_begins_again_at_every_quote() -> None:
    """The pattern that was used before, on a body that stopped a server."""
    unit = '\\",'
    once, twice = (
        regex_steps(r'"(?:[^"\\]++|\\.)*+"', '"' + unit * size, flags=re.DOTALL, search=True)
        for size in (20, 40)
    )
    assert twice > 3 * once


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (lambda size: ["a" * size + "b"], "a"),
        (lambda size: ["a" * size + "b", "a" * (size // 2) + "c"], "a"),
        (lambda size: ["ab" * size + "c"], "ab"),
        (lambda size: ["a" * (size // 2) + "ba" * size], "a"),
        (lambda size: ["b"], "a"),
    ],
)
@pytest.mark.parametrize("length", [1, 7])
def test_stop_strings(stop: Callable[[int], list[str]], text: str, length: int) -> None:
    def make(size: int) -> Callable[[], Any]:
        whole = text * (size // len(text))
        pieces = [Text(whole[at : at + length]) for at in range(0, size, length)]

        def read() -> None:
            stops = StopStrings(stop(size))
            for piece in pieces:
                stops.push(piece)
                stops.take()

        return read

    assert growth(make, 700) <= MOST


@pytest.mark.parametrize(
    "token",
    [b"\x80", b"\xf0", b"\xe4\xbd", REPLACEMENT.encode(), b"", b"a", b"a\xff"],
)
def test_detokenizing(token: bytes) -> None:
    """Tokens that never become a character, or have no text, are not decoded again and again."""

    def decoded(size: int) -> int:
        read = 0

        def decode(ids: list[int]) -> str:
            nonlocal read
            read += 1 + len(ids)
            return b"".join(token for _ in ids).decode(errors="replace")

        decoder = IncrementalDecoder(decode)
        for number in range(size):
            decoder.push((number,))
        return read + sum(1 for _ in decoder.flush())

    assert decoded(800) <= MOST * decoded(400)


async def test_a_reader_that_is_slow() -> None:
    def make(size: int) -> Callable[[], Any]:
        arrived = [TextDelta("x", Text("text"), (1,), None) for _ in range(size)]

        def read() -> None:
            deltas = Deltas(["x"], lambda name: None)
            for delta in arrived:
                deltas.put(delta)
            (whole,) = map(joined, deltas._arrived.values())
            assert len(whole.text) == 4 * size == 4 * len(whole.new_token_ids)

        return read

    assert growth(make, 500) <= MOST


def test_tools() -> None:
    def make(size: int) -> Callable[[], Any]:
        names = [Text(f"f{number:06}") for number in range(size)]
        tools = [
            Tool.model_construct(type="function", function=Function.model_construct(name=name))
            for name in names
        ]
        named = [
            NamedTool.model_construct(
                type="function", function=NamedFunction.model_construct(name=name)
            )
            for name in reversed(names)
        ]
        allowed = AllowedTools.model_construct(mode="required", tools=named)
        choice = AllowedToolsChoice.model_construct(type="allowed_tools", allowed_tools=allowed)

        def read() -> None:
            found = tools_of(tools, choice, None)
            assert found is not None
            assert len(found.allowed) == size

        return read

    assert growth(make, 200) <= MOST


def test_bad_words() -> None:
    """Many that share the token before their last one, which is generated all the time."""

    def make(size: int) -> Callable[[], Any]:
        from array import array

        words = BadWords([(9, number % 7, 5, number) for number in range(size)])
        tokens = array("i", [5] * 20)
        assert len(BadWords([(5, 5, 1), (5, 2)]).completing(tokens)) == 2

        def generate() -> None:
            for _ in range(size):
                words.completing(tokens)

        return generate

    assert growth(make, 200) <= MOST


def _patterns() -> list[tuple[str, str, bool]]:
    """Each pattern in code that may read what clients send, and whether it searches a text."""
    found = []
    for folder in ("frontend", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parts[-2] in ("demo", "commands", "replay", "startup"):
                continue  # they read files of their own, and what their own user types
            text = path.read_text(encoding="utf-8")
            if "import re\n" not in text:
                continue
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "re"
                    and node.args
                    and isinstance(node.args[0], ast.Constant)
                ):
                    searched = node.func.attr not in ("match", "fullmatch")
                    if node.func.attr == "compile":
                        source = ast.unparse(tree)
                        searched = bool(
                            re.search(r"\.(search|sub|finditer|findall|split)\(", source)
                        )
                    found.append((str(path.relative_to(ROOT)), str(node.args[0].value), searched))
    return found


@pytest.mark.parametrize(("where", "pattern", "searched"), _patterns())
def test_patterns(where: str, pattern: str, searched: bool) -> None:
    """No text that is made of the parts of a pattern makes it backtrack more than its length."""
    wrong = [
        short
        for short, long in zip(pumps(pattern, 20), pumps(pattern, 40), strict=True)
        if (steps := regex_steps(pattern, long, search=searched)) > 200
        and steps > MOST * regex_steps(pattern, short, search=searched) + 200
    ]
    assert not wrong, f"{where}: {pattern} on {wrong[:3]}"


@pytest.mark.parametrize(
    ("pattern", "search", "linear"),
    [
        (r"(a+)+b", False, False),
        (r"\s*\s*x", False, False),
        (r"(a|a)*b", False, False),
        (r"a+b", True, False),
        (r"a++b", False, True),
        (r"[^b]*b", False, True),
        (r'"(?:[^"\\]|\\.)*"', False, True),
    ],
)
def test_the_model_of_patterns_sees_what_backtracks(
    pattern: str, search: bool, linear: bool
) -> None:
    sizes = (7, 14)
    ratios = [
        regex_steps(pattern, long, search=search) / (regex_steps(pattern, short, search=search) + 8)
        for short, long in zip(*(pumps(pattern, size) for size in sizes), strict=True)
    ]
    assert (max(ratios) <= MOST) == linear
