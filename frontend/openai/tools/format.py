"""What a way of writing tool calls consists of: a grammar for the model, a reader for its text.

A format for another family of models is a module beside `hermes.py`, and one line in `registry.py`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

from coppice.frontend.openai.tools.call_object import CallObject, Piece
from coppice.frontend.openai.tools.choice import Tool, Tools
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

# White space as models are trained on it: what json.dumps writes.
_AS_TRAINED = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class ToolFormat(ABC):
    """One family's way of writing calls.

    Attributes:
        marks: what must stay in the text for calls to be found, even where it is a special token.
        arguments_key: name of the arguments in a call's object.
    """

    marks: tuple[str, ...] = ()
    arguments_key = "arguments"

    @abstractmethod
    def reader(self, tools: Tools) -> ToolReader:
        """A new reader, for one continuation of a request."""

    @abstractmethod
    def forced(self, calls: str, parallel: bool) -> str:
        """Lark rules of a text that is a call, or several; `calls` is any one call's object."""

    @abstractmethod
    def optional(self, calls: str, parallel: bool) -> str:
        """Lark rules of a text that may be, or have in it, calls."""

    def constraint(self, tools: Tools) -> StructuredOutputsParams | None:
        """What holds the text to the tools' schemas; None: nothing needs to."""
        if not tools.held:
            return None
        wanted = tools.forced or tools.allowed
        calls = " | ".join(f"call_{index}" for index in range(len(wanted)))
        write = self.forced if tools.forced else self.optional
        rules = [write(f"({calls})", tools.parallel)]
        rules += [f"call_{index}: {self._call(tool)}" for index, tool in enumerate(wanted)]
        return StructuredOutputsParams(grammar="\n".join(rules) + "\n")

    def _call(self, tool: Tool) -> str:
        name = json.dumps(tool.function.name)
        head = json.dumps(f'{{"name": {name}, "{self.arguments_key}": ')
        schema = json.loads(tool.schema_text) | {"x-guidance": _AS_TRAINED}
        return f'{head} %json {json.dumps(schema)} "}}"'


class ToolReader(ABC):
    """Reads one continuation.

    Attributes:
        calls: calls that have begun.
    """

    def __init__(self, *, parallel: bool) -> None:
        self.calls = 0
        self._parallel = parallel
        self._object: CallObject | None = None
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
