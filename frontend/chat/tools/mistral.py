"""Tool calls as Mistral's models write them: after a mark, a list of objects or a name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.pieces import Piece
from coppice.frontend.chat.tools.call_object import CallObject
from coppice.frontend.chat.tools.choice import Tool, Tools
from coppice.frontend.chat.tools.format import (
    JsonExtent,
    MarkedToolReader,
    ToolFormat,
    arguments_of,
    object_of,
)

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\][^\[{]*+)?(?:\[ARGS\])?\s*+(?=\{)")
_LONGEST_HEAD = 200  # characters between the mark and the arguments


class MistralFormat(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}]`, or since the tokenizer's version 11
    `[TOOL_CALLS]name[ARGS]{...}` for each call.
    """

    marks = (OPEN, ARGUMENTS, CALL_ID)

    def reader(self, tools: Tools) -> MistralReader:
        return MistralReader(parallel=tools.parallel)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        objects = [
            f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls
        ]
        return f"{OPEN}[{', '.join(objects)}]"

    def call(self, tool: Tool, marks: Marks) -> str:
        if marks.id(ARGUMENTS) is None:
            return object_of(tool)
        return f"{json.dumps(tool.function.name)} {marks.term(ARGUMENTS)} {arguments_of(tool)}"

    def after(self, call: str, parallel: bool, marks: Marks) -> str:
        if marks.id(ARGUMENTS) is None:
            more = f' (", " {call})*' if parallel else ""
            return f'after: " "? "[" {call}{more} "]"'
        more = f" ({marks.term(OPEN)} {call})*" if parallel else ""
        return f"after: {call}{more}"


class MistralReader(MarkedToolReader):
    """Reads both ways of writing calls."""

    openings: tuple[str, ...] = (OPEN,)
    _listed = False  # whether the calls are objects
    _extent: JsonExtent | None = None  # of the arguments after a name

    def _read(self, text: str, pieces: list[Piece]) -> str:
        if self._extent is not None:
            end = self._extent.end(text)
            self._arguments(text[:end], pieces)
            if end is not None:
                self._extent, self._within = None, False
            return "" if end is None else text[end:]
        if self._object is not None:
            found, text = self._in_object(text)
            pieces += found
            if self._object.begun:
                self._opened, self._after_call = "", True
            if self._object.complete:
                held, begun, self._object = self._object.text, self._object.begun, None
                if not begun:
                    self._listed = False
                    return self._give_up(held + text, pieces)
            return text
        bare = text.lstrip(" \t\r\n,")
        if not bare or (not self._listed and ARGUMENTS.startswith(bare)):
            self._pending = text
            return ""
        if self._listed and bare[0] == "]":
            self._within = self._listed = False
            return bare[1:]
        if not self._listed and bare[0] == "[" and not bare.startswith((ARGUMENTS, CALL_ID)):
            self._listed = True
            return bare[1:]
        if bare[0] == "{":
            self._listed, self._object = True, CallObject(self.calls)
            return bare
        if self._listed:
            self._listed = False
            return self._give_up(text, pieces)
        return self._head(text, pieces)

    def _head(self, text: str, pieces: list[Piece]) -> str:
        """Reads the name of a call, and what may stand between it and the arguments."""
        head = _HEAD.match(text)
        if head is not None:
            self._begin(head[1], pieces)
            self._extent = JsonExtent()
            return text[head.end() :]
        if "{" in text or len(text) > _LONGEST_HEAD:
            return self._give_up(text, pieces)
        self._pending = text
        return ""

    def end(self) -> list[Piece]:
        if self._object is not None and not self._object.begun:
            self._pending = self._object.text
        return super().end()
