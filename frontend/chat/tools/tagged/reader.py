"""Reads calls with a tag for each parameter: their arguments become JSON as they come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coppice.frontend.chat.pieces import Piece, held_back
from coppice.frontend.chat.tools.choice import Tools
from coppice.frontend.chat.tools.format import MarkedToolReader
from coppice.frontend.chat.tools.tagged.values import is_text


class TaggedReader(MarkedToolReader):
    """Values that are text are read as they come, all others at their ends.

    Attributes:
        value_end: the tag after a value.
        framed: whether a line break before and after a value is not part of it.
    """

    value_end: str = ""
    framed = False

    def __init__(self, tools: Tools) -> None:
        super().__init__(parallel=tools.parallel)
        self._schemas = {tool.function.name: json.loads(tool.schema_text) for tool in tools.offered}
        self._schema: Mapping[str, Any] = {}  # of the current call
        self._in_call = False
        self._parameters = 0
        self._text_value: bool | None = None  # whether the current value is text; None: no value
        self._fresh = False  # whether the value has no text yet
        self._ends = (self.value_end, "\n" + self.value_end)[: 1 + self.framed]

    def _begin_call(self, name: str, pieces: list[Piece]) -> None:
        self._schema = self._schemas.get(name, {})
        self._begin(name, pieces)
        self._arguments("{", pieces)
        self._in_call, self._parameters = True, 0

    def _begin_value(self, name: str, pieces: list[Piece]) -> None:
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        self._text_value, self._fresh = is_text(schema, self._schema), True
        comma, quote = ", " if self._parameters else "", '"' if self._text_value else ""
        self._parameters += 1
        self._arguments(f"{comma}{json.dumps(name)}: {quote}", pieces)

    def _in_value(self, text: str, pieces: list[Piece]) -> str:
        if self.framed and self._fresh and text.startswith("\n"):
            text = text[1:]
            if not text:
                self._pending = "\n"
                return ""
        value, end, after = text.partition(self.value_end)
        if not end:
            kept = 0
            if self._text_value:
                kept = len(text) - held_back(text, *self._ends)
                self._arguments(_escaped(text[:kept]), pieces)
                self._fresh &= not kept
            self._pending = ("\n" if self.framed and self._fresh else "") + text[kept:]
            return ""
        if self.framed:
            value = value.removesuffix("\n")
        self._arguments(_escaped(value) + '"' if self._text_value else _json(value), pieces)
        self._text_value = None
        return after

    def _close(self, pieces: list[Piece]) -> None:
        self._arguments("}", pieces)
        self._in_call = False


def after_no_tag(text: str) -> str:
    """The text from its next tag on: what stands between parameters and is none is left out."""
    place = text.find("<", 1)
    return "" if place < 0 else text[place:]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json(text: str) -> str:
    """The value as JSON; a text that is no JSON becomes a text in it."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        found = {"True": "true", "False": "false", "None": "null"}.get(text.strip())
        return found or json.dumps(text, ensure_ascii=False)
