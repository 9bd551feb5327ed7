"""One call of a tool as a JSON object, read from text that comes in pieces."""

from __future__ import annotations

import json
import re
from typing import Any

from coppice.frontend.chat.pieces import CallArguments, CallBegins, Piece
from coppice.frontend.chat.tools.nesting import Nesting

# The beginning of a call's object, in the order in which models write it.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class CallObject:
    """One JSON object that should be a call, read piece by piece."""

    def __init__(self, index: int) -> None:
        self.complete = False
        self.begun = False  # whether the call's name is known
        self._index = index
        self._read: list[str] = []  # the text so far, never added up, since each sum is a copy
        self._length = 0
        self._nesting = Nesting()
        self._nested = False  # whether a value of the object has begun that has values itself
        self._ends: list[int] = []  # of such values
        self._begin = 0  # of the arguments
        self._sent = 0  # characters that were handed on

    def push(self, text: str) -> tuple[list[Piece], str]:
        """The pieces that the text completes, and the text after the object's end."""
        rest, found = "", self._nested
        for place, character in enumerate(text):
            self._scan(character, self._length + place)
            if self.complete:
                text, rest = text[: place + 1], text[place + 1 :]
                break
        self._read.append(text)
        self._length += len(text)
        return self._pieces(text, begins=self._nested and not found), rest

    @property
    def text(self) -> str:
        """The text so far. O(its length)."""
        self._read = ["".join(self._read)]
        return self._read[0]

    def _scan(self, character: str, place: int) -> None:
        change, depth = self._nesting.push(character), self._nesting.depth
        if change > 0:
            self._nested |= depth == 2
        elif change < 0:
            if depth == 1:
                self._ends.append(place + 1)
            self.complete = depth <= 0

    def _pieces(self, new: str, *, begins: bool) -> list[Piece]:
        """The pieces that the text's end, `new`, completes.

        `begins`: whether the first value that has values began in it, such as a call's arguments.
        """
        pieces: list[Piece] = []
        if not self.begun:
            head = _HEAD.match(self.text) if begins else None
            name = _loaded(head[1]) if head is not None else None
            if head is None or not isinstance(name, str):
                return self._whole() if self.complete else []
            self.begun, self._begin, self._sent = True, head.end(), head.end()
            pieces.append(CallBegins(self._index, name))
        end = next((end for end in self._ends if end > self._begin), self._length)
        if end > self._sent:
            before = self._length - len(new)  # all of which was handed on, unless the call is new
            whole = self._sent < before
            text = self.text[self._sent : end] if whole else new[self._sent - before : end - before]
            pieces.append(CallArguments(self._index, text))
            self._sent = end
        return pieces

    def _whole(self) -> list[Piece]:
        """The call in a complete object whose keys have another order; [] if it is no call."""
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
            CallArguments(self._index, json.dumps(arguments, ensure_ascii=False)),
        ]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
