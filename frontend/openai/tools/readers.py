"""Finding calls of tools in a text that comes in pieces, their arguments handed on as they come.

What may yet turn out to begin a call is held back; everything else is text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call has begun; `index` counts the calls of the text from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """The next piece of a call's arguments, JSON text when all are put together."""

    index: int
    text: str


Piece: TypeAlias = TextPiece | CallBegins | ArgumentsPiece

# The beginning of a call's object, in the order in which models write it.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class _CallObject:
    """One JSON object that is a call, read piece by piece."""

    def __init__(self, index: int) -> None:
        self.text = ""
        self.complete = False
        self.begun = False  # whether the call's name is known
        self._index = index
        self._depth = 0
        self._quoted = self._escaped = False
        self._sent = 0  # characters that went out
        self._end: int | None = None  # of the arguments

    def push(self, text: str) -> tuple[list[Piece], str]:
        """What became known, and what of the text lies behind the object."""
        for place, character in enumerate(text):
            self._scan(character, len(self.text) + place)
            if self.complete:
                self.text += text[: place + 1]
                return self._pieces(), text[place + 1 :]
        self.text += text
        return self._pieces(), ""

    def _scan(self, character: str, place: int) -> None:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1 and self.begun and self._end is None and place >= self._sent:
                self._end = place + 1
            self.complete = self._depth <= 0

    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        if not self.begun:
            head = _HEAD.match(self.text)
            name = _loaded(head[1]) if head is not None else None
            if head is None or not isinstance(name, str):
                return self._whole() if self.complete else []
            self.begun, self._sent = True, head.end()
            self._end = _end_of_value(self.text, head.end())
            pieces.append(CallBegins(self._index, name))
        end = len(self.text) if self._end is None else self._end
        if end > self._sent:
            pieces.append(ArgumentsPiece(self._index, self.text[self._sent : end]))
            self._sent = end
        return pieces

    def _whole(self) -> list[Piece]:
        """The call of an object whose keys stand in another order; [] if it is none."""
        found = _loaded(self.text)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return []
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        if not isinstance(arguments, dict):
            return []
        self.begun = True
        return [
            CallBegins(self._index, found["name"]),
            ArgumentsPiece(self._index, json.dumps(arguments, ensure_ascii=False)),
        ]


def _end_of_value(text: str, begin: int) -> int | None:
    """Where the object that begins at `begin` ends; None: not in this text."""
    depth, quoted, escaped = 0, False, False
    for place in range(begin, len(text)):
        character = text[place]
        if quoted:
            quoted = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if depth == 0:
                return place + 1
    return None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class ToolReader(ABC):
    """Reads one continuation.

    Attributes:
        calls: calls that have begun.
    """

    def __init__(self, *, parallel: bool) -> None:
        self.calls = 0
        self._parallel = parallel
        self._object: _CallObject | None = None
        self._pending = ""  # text that may yet begin a call

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """What the next piece of text makes known."""

    @abstractmethod
    def end(self) -> list[Piece]:
        """What was held back; for the end of the text."""

    def _in_object(self, text: str) -> tuple[list[Piece], str]:
        """Goes on with the object that is read; calls beyond the first may not be wanted."""
        assert self._object is not None
        before = self._object.begun
        pieces, rest = self._object.push(text)
        self.calls += self._object.begun and not before
        return (pieces if self._parallel or self.calls <= 1 else []), rest


class HermesReader(ToolReader):
    """Calls between `<tool_call>` and `</tool_call>`; white space around them is no text."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    _behind_call = False  # and behind nothing but white space since then

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text or self._pending:
            if self._object is None:
                text = self._outside(text, pieces)
                if self._object is None:
                    break
            if not self._object.complete:
                found, text = self._in_object(text)
                pieces += found
                if not self._object.complete:
                    break
            self._pending += text
            stripped = self._pending.lstrip()
            if stripped.startswith(self._CLOSE):
                self._leave(pieces, closed=True)
                text, self._pending = stripped[len(self._CLOSE) :], ""
            elif self._CLOSE.startswith(stripped):
                break
            else:
                self._leave(pieces, closed=False)
                text, self._pending = self._pending, ""
        return pieces

    def _outside(self, text: str, pieces: list[Piece]) -> str:
        """Takes text up to where a call begins; what lies behind its tag."""
        text, self._pending = self._pending + text, ""
        before, tag, behind = text.partition(self._OPEN)
        if tag:
            self._say(before.rstrip(), pieces)
            self._object = _CallObject(self.calls)
            return behind
        kept = len(before.rstrip())
        for length in range(min(len(self._OPEN) - 1, len(before)), 0, -1):
            if before.endswith(self._OPEN[:length]):
                kept = len(before[:-length].rstrip())
                break
        self._say(before[:kept], pieces)
        self._pending = before[kept:]
        return ""

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self._behind_call:
            text = text.lstrip()
        if text:
            self._behind_call = False
            pieces.append(TextPiece(text))

    def _leave(self, pieces: list[Piece], *, closed: bool) -> None:
        """The object has ended; if it was no call after all, it is text."""
        assert self._object is not None
        if not self._object.begun:
            close = self._CLOSE if closed else ""
            pieces.append(TextPiece(self._OPEN + self._object.text + close))
        self._behind_call = self._object.begun
        self._object = None

    def end(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._object is not None:
            if self._object.begun and self._CLOSE.startswith(self._pending.strip()):
                self._pending = ""
            self._leave(pieces, closed=False)
        if self._pending.strip() or not self.calls:
            self._say(self._pending, pieces)
        self._pending = ""
        return [piece for piece in pieces if not isinstance(piece, TextPiece) or piece.text]


class LlamaReader(ToolReader):
    """A text that is calls from its beginning to its end, or has none in it."""

    _TAG = "<|python_tag|>"

    def __init__(self, *, parallel: bool) -> None:
        super().__init__(parallel=parallel)
        self._plain = False  # there are no calls, or no more

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._plain:
                pieces.append(TextPiece(text))
                break
            if self._object is None:
                text, self._pending = self._pending + text, ""
                start = text.lstrip(" \t\r\n;" if self.calls else None).removeprefix(self._TAG)
                start = start.lstrip()
                if not start or self._TAG.startswith(start):
                    self._pending = text
                    break
                if not start.startswith("{"):
                    self._plain = True
                    continue
                self._object = _CallObject(self.calls)
                text = start
            found, text = self._in_object(text)
            pieces += found
            if self._object.complete:
                if not self._object.begun:
                    self._plain, text = True, self._object.text + text
                self._object = None
        return pieces

    def end(self) -> list[Piece]:
        held = self._pending
        if self._object is not None and not self._object.begun:
            held += self._object.text
        self._object, self._pending = None, ""
        if self.calls and not held.strip(" \t\r\n;"):
            held = ""
        return [TextPiece(held)] if held else []
