"""How a family of models writes tool calls: a grammar for its text, and a reader of it.

A format for another family of models is a module beside `hermes.py`, and one line in `registry.py`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.pieces import (
    CallArguments,
    CallBegins,
    Piece,
    Reader,
    TextPiece,
    held_back,
)
from coppice.frontend.chat.tools.call_object import CallObject
from coppice.frontend.chat.tools.choice import Tool, Tools
from coppice.frontend.chat.tools.nesting import Nesting
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.grammar_source import followed

# White space as models are trained on it: as json.dumps writes it.
AS_TRAINED = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class ToolFormat(ABC):
    """How one family writes calls.

    Attributes:
        marks: texts that mark calls; they stay in the text even if they are special tokens. The
            first of them begins calls.
    """

    marks: tuple[str, ...] = ()

    @abstractmethod
    def reader(self, tools: Tools) -> Reader:
        """A new reader, for one continuation of a request."""

    @abstractmethod
    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them: the name of each, and its arguments as JSON text."""

    @abstractmethod
    def call(self, tool: Tool, marks: Marks) -> str:
        """What matches one call of the tool in a Lark rule; further lines are rules that it needs.

        Rules of the same name must be the same.
        """

    @abstractmethod
    def after(self, call: str, parallel: bool, marks: Marks) -> str:
        """Lark rules, of which `after` matches what follows the first mark.

        `call` matches what `call` returned for any of the tools.
        """

    def rules(self, call: str, tools: Tools, marks: Marks) -> str:
        """Lark rules of a text that is calls, or of one that may have calls at its end."""
        opening, after = self.marks[0], self.after(call, tools.parallel, marks)
        if tools.forced:
            return f"start: {marks.term(opening)} after\n{after}"
        before, text = marks.until("before", opening), marks.without("TEXT", opening)
        return f"start: TEXT | before after\n{before}\n{text}\n{after}"

    def constraint(self, tools: Tools, marks: Marks) -> StructuredOutputsParams | None:
        """The grammar that makes calls fit the tools' schemas; None: none is needed."""
        if not tools.held:
            return None
        wanted = tools.forced or tools.allowed
        calls = " | ".join(f"call_{index}" for index in range(len(wanted)))
        rules = [self.rules(f"({calls})", tools, marks)]
        rules += [f"call_{index}: {self.call(tool, marks)}" for index, tool in enumerate(wanted)]
        lines = "\n".join(rules).split("\n")
        # Calls may share terminals, and each has a line of its own.
        return StructuredOutputsParams(grammar="\n".join(dict.fromkeys(lines)) + "\n")


def object_of(tool: Tool, key: str = "arguments") -> str:
    """What matches a call as a JSON object, with the arguments under that key."""
    head = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "{key}": ')
    return f'{head} {arguments_of(tool)} "}}"'


def arguments_of(tool: Tool) -> str:
    """What matches the tool's arguments as a JSON object."""
    return json_of(schema_of(tool))


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of the tool's arguments, as grammars follow it. Raises ValueError."""
    return followed(tool.schema_text, strict=bool(tool.function.strict))


def json_of(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> str:
    """What matches JSON of a schema, which may be a part of `root`, in a Lark rule."""
    shared = {key: root[key] for key in ("$defs", "definitions") if root and key in root}
    guidance = {"lenient": True, **AS_TRAINED}
    return f"%json {json.dumps({**shared, **schema, 'x-guidance': guidance})}"


class ToolReader(Reader):
    """Finds the calls in one continuation.

    Text that may yet begin a call is held back; all other text is returned at once.
    """

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._object: CallObject | None = None
        self._pending = ""  # text that may yet begin a call

    def _in_object(self, text: str) -> tuple[list[Piece], str]:
        """Reads on in the current object; leaves out the pieces of calls that are not wanted."""
        assert self._object is not None
        before = self._object.begun
        pieces, rest = self._object.push(text)
        self.calls += self._object.begun and not before
        return (pieces if self._parallel or self.calls <= 1 else []), rest


class MarkedToolReader(ToolReader):
    """Finds calls that follow a mark, with text before and between them.

    White space around calls is not text. A subclass reads what follows the mark.
    """

    openings: tuple[str, ...] = ()

    def __init__(self, *, parallel: bool) -> None:
        super().__init__(parallel=parallel)
        self._within = False  # whether the text is of calls
        self._opened = ""  # the mark, until a call has begun; it is text if none does
        self._after_call = False  # whether only white space came since the last call

    @abstractmethod
    def _read(self, text: str, pieces: list[Piece]) -> str:
        """Reads text of calls. Returns the rest, "" after putting what it holds into `_pending`."""

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        text, self._pending = self._pending + text, ""
        while text:
            text = self._read(text, pieces) if self._within else self._outside(text, pieces)
        return pieces

    def _outside(self, text: str, pieces: list[Piece]) -> str:
        """Takes text up to where calls begin; returns the text after the mark."""
        found = [(text.find(mark), mark) for mark in self.openings if mark in text]
        if found:
            place, mark = min(found)
            self._text(text[:place].rstrip(), pieces)
            self._within, self._opened = True, mark
            return self._after(mark) + text[place + len(mark) :]
        kept = len(text) - held_back(text, *self.openings)
        kept = len(text[:kept].rstrip())
        self._text(text[:kept], pieces)
        self._pending = text[kept:]
        return ""

    def _after(self, mark: str) -> str:
        """What of the mark itself is read as text of calls."""
        return ""

    def _text(self, text: str, pieces: list[Piece]) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            pieces.append(TextPiece(text))

    def _begin(self, name: str, pieces: list[Piece]) -> None:
        """A call begins."""
        self._opened, self._after_call = "", True
        self.calls += 1
        if self._wanted:
            pieces.append(CallBegins(self.calls - 1, name))

    def _arguments(self, text: str, pieces: list[Piece]) -> None:
        """Arguments of the current call go on."""
        if text and self._wanted:
            pieces.append(CallArguments(self.calls - 1, text))

    @property
    def _wanted(self) -> bool:
        return self._parallel or self.calls <= 1

    def _give_up(self, text: str, pieces: list[Piece]) -> str:
        """What follows is no call: with the mark, it is text. Returns "" for all of it."""
        self._within = False
        if self._opened:
            self._opened, text = "", self._opened + text
            self._text(text, pieces)
            return ""
        return text

    def end(self) -> list[Piece]:
        pieces: list[Piece] = []
        held, self._pending = self._pending, ""
        cut = self._within and not self._opened  # a call keeps what there is of it
        if not cut and (self._opened + held.strip() or not self.calls):
            self._text(self._opened + held, pieces)
        self._opened = ""
        return pieces


class JsonExtent:
    """Finds the end of a JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self._nesting = Nesting()

    def end(self, text: str) -> int | None:
        """The characters of the text up to the object's end; None: it goes on."""
        for place, character in enumerate(text):
            if self._nesting.push(character) < 0 and self._nesting.depth <= 0:
                return place + 1
        return None
