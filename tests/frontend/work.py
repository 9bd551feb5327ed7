"""Counts the steps of work that a function does, so that its cost can be tested without a clock.

A step is an instruction of Python code of this repository; or a character or byte that a method of
`Text` or `Bytes` reads or copies; or a step of a regular expression, which a model in Python of the
matching engine counts, as long as it backtracks in the same way.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])


class _Count:
    steps = 0


def steps_of(function: Callable[[], Any]) -> int:
    """Runs the function in this thread; returns the steps that it took."""
    _Count.steps = 0

    def instruction(frame: FrameType, event: str, argument: Any) -> Any:
        _Count.steps += event == "opcode"
        return instruction

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(ROOT) or "/.venv/" in file or file == __file__:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return instruction

    before = sys.gettrace()
    sys.settrace(call)
    try:
        function()
    finally:
        sys.settrace(before)
    return _Count.steps


def growth(make: Callable[[int], Callable[[], Any]], size: int) -> float:
    """How many times as much work twice the input is. `make` prepares an input of a size."""
    once, twice = steps_of(make(size)), steps_of(make(2 * size))
    assert once >= size / 8, f"only {once} steps for {size}: the work is not counted"
    return twice / once


def _counting(kind: type) -> dict[str, Any]:
    """Methods of a text that count what they read, and return texts that count, too."""

    def same(value: Any) -> Any:
        if type(value) is kind.__base__:
            return kind(value)
        return type(value)(map(same, value)) if type(value) in (list, tuple) else value

    def counting(name: str) -> Callable[..., Any]:
        plain = getattr(kind.__base__, name)

        def method(self: Any, *args: Any) -> Any:
            result = plain(self, *args)
            if name == "find":
                start = args[1] if len(args) > 1 else 0
                _Count.steps += (result if result >= 0 else len(self)) - start + 1
            elif name == "count" and len(args) > 1:
                _Count.steps += min(args[2], len(self)) - args[1]
            elif name in ("startswith", "endswith"):
                _Count.steps += len(args[0]) if isinstance(args[0], kind.__base__) else 1
            elif name == "__getitem__":
                _Count.steps += len(result) if isinstance(args[0], slice) else 1
            else:
                _Count.steps += len(self)
            return same(result)

        return method

    names = (
        "__add__", "__contains__", "__eq__", "__getitem__", "count", "endswith", "find", "lstrip",
        "partition", "removeprefix", "replace", "rfind", "rstrip", "split", "startswith", "strip",
    )  # fmt: skip

    def added(self: Any, other: Any) -> Any:
        _Count.steps += len(self) + len(other)
        return kind(kind.__base__.__add__(other, self))

    return {name: counting(name) for name in names} | {
        "__radd__": added,
        "__hash__": kind.__base__.__hash__,
    }


class Text(str):
    """A string that counts the characters that are read or copied."""


class Bytes(bytes):
    """Bytes that count those that are read or copied."""


for _kind in (Text, Bytes):
    for _name, _method in _counting(_kind).items():
        setattr(_kind, _name, _method)


# -- regular expressions ---------------------------------------------------------------------------


def regex_steps(pattern: str | bytes, text: str, *, flags: int = 0, search: bool = False) -> int:
    """Steps of matching at the beginning of the text, or of finding all matches (`search`).

    It walks through the alternatives in the order in which `re` does, and so backtracks as often.
    """
    tree = _parsed(pattern, flags)
    model = _Model(text, tree.state.flags)
    place = 0
    while True:
        end = next(model.sequence(list(tree), 0, place), None)
        if not search or place >= len(text):
            return model.steps
        place = place + 1 if end is None or end == place else end


@cache
def _parsed(pattern: str | bytes, flags: int) -> Any:
    """A pattern's parts: parsing takes as long as a short text."""
    return parser.parse(pattern, flags)


class _Model:
    def __init__(self, text: str, flags: int) -> None:
        self.text, self.flags, self.steps = text, flags, 0

    def sequence(self, items: list[Any], index: int, place: int) -> Iterator[int]:
        """Each place at which a match of `items[index:]` from `place` may end, in order."""
        stack: list[tuple[int, Iterator[int]]] = [(index, iter((place,)))]
        while stack:  # without recursion, so that texts may be long
            at, places = stack[-1]
            found = next(places, None)
            if found is None:
                stack.pop()
            elif at == len(items):
                yield found
            else:
                stack.append((at + 1, self.item(items[at], found)))

    def item(self, item: Any, place: int) -> Iterator[int]:
        kind, value = item
        self.steps += 1
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            if place < len(self.text) and self.is_in(item, self.text[place]):
                yield place + 1
        elif kind is op.SUBPATTERN:
            yield from self.sequence(list(value[3]), 0, place)
        elif kind is op.BRANCH:
            for branch in value[1]:
                yield from self.sequence(list(branch), 0, place)
        elif kind in (op.MAX_REPEAT, op.POSSESSIVE_REPEAT, op.MIN_REPEAT):
            yield from self.repeat(kind, *value, place)
        elif kind is op.ATOMIC_GROUP:
            yield from [*self.sequence(list(value), 0, place)][:1]
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            assert value[0] > 0, "a look behind is not known to this model"
            met = next(self.sequence(list(value[1]), 0, place), None) is not None
            if met == (kind is op.ASSERT):
                yield place
        elif kind is op.AT:
            begins = value in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
            if place == (0 if begins else len(self.text)):
                yield place
        else:
            raise NotImplementedError(f"{kind} is not known to this model")

    def repeat(self, kind: Any, low: int, high: int, body: Any, place: int) -> Iterator[int]:
        # Depth first: as often as possible, then once less, with all other ways to be there.
        ways: list[tuple[int, Iterator[int]]] = [(place, self.sequence(list(body), 0, place))]
        if kind is op.MIN_REPEAT and low == 0:
            yield place
        while ways:
            here, more = ways[-1]
            found = next(more, None) if high is op.MAXREPEAT or len(ways) <= int(high) else None
            if found is not None and found > here:
                if kind is op.MIN_REPEAT and len(ways) >= low:
                    yield found
                ways.append((found, self.sequence(list(body), 0, found)))
                continue
            ways.pop()
            if kind is not op.MIN_REPEAT and len(ways) >= low:
                yield here
            if kind is op.POSSESSIVE_REPEAT:
                return

    def is_in(self, item: Any, character: str) -> bool:
        """Whether the item, of one character, matches it."""
        kind, value = item
        if kind in (op.LITERAL, op.NOT_LITERAL):
            return (chr(value) == character) == (kind is op.LITERAL)
        if kind is op.ANY:
            return character != "\n" or bool(self.flags & re.DOTALL)
        negated = value[0][0] is op.NEGATE
        return negated != any(self._member(each, character) for each in value)

    @staticmethod
    def _member(each: Any, character: str) -> bool:
        kind, value = each
        if kind is op.LITERAL:
            return bool(chr(value) == character)
        if kind is op.RANGE:
            return bool(value[0] <= ord(character) <= value[1])
        if kind is op.CATEGORY:
            name = str(value).rpartition("_")[2].lower()
            test = {"digit": r"\d", "space": r"\s", "word": r"\w"}[name]
            return (re.match(test, character) is None) == ("NOT" in str(value))
        return False


def pumps(pattern: str | bytes, size: int) -> Iterator[str]:
    """Texts of about `size` characters on which the pattern could backtrack.

    Each is a beginning that matches up to some part of the pattern; then, again and again, one or
    two of the shortest texts that parts of it match; then a character that ends no match.
    """
    tree = list(parser.parse(pattern))
    beginnings = {_shortest(tree[:length]) for length in range(len(tree) + 1)}
    parts = sorted({part for part in _parts(tree) if part})
    # Two equal parts repeat what one does, and some pairs are the same text.
    units = sorted({one + other for one in parts for other in ["", *parts] if one != other})
    for beginning in sorted(beginnings):
        for unit in units:
            yield beginning + unit * (size // len(unit)) + "\0"


def _parts(items: list[Any]) -> Iterator[str]:
    for item in items:
        yield _shortest([item])
        kind, value = item
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            yield _shortest(list(value[2]))
            yield from _parts(list(value[2]))
        elif kind is op.SUBPATTERN:
            yield from _parts(list(value[3]))
        elif kind is op.BRANCH:
            for branch in value[1]:
                yield from _parts(list(branch))
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            yield from _parts(list(value[1]))


def _shortest(items: list[Any]) -> str:
    text = ""
    for kind, value in items:
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            model = _Model("", 0)
            usual = ["a", "0", " ", '"', "\\", "{", "<", "=", ",", "("]
            candidates = [chr(value)] if kind is op.LITERAL else usual
            if kind is op.IN:
                candidates += [chr(v) for k, v in value if k is op.LITERAL]
            text += next((c for c in candidates if model.is_in((kind, value), c)), "")
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            text += _shortest(list(value[2])) * int(value[0])
        elif kind is op.SUBPATTERN:
            text += _shortest(list(value[3]))
        elif kind is op.BRANCH:
            text += min((_shortest(list(branch)) for branch in value[1]), key=len)
        elif kind is op.ATOMIC_GROUP:
            text += _shortest(list(value))
    return text
