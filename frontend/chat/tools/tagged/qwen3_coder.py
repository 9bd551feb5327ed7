"""Tool calls as Qwen3-Coder writes them: a tag for the function, and one for each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coppice.frontend.chat.marks import Marks, pattern
from coppice.frontend.chat.pieces import Piece
from coppice.frontend.chat.tools.choice import Tool, Tools
from coppice.frontend.chat.tools.format import ToolFormat, json_of, schema_of
from coppice.frontend.chat.tools.tagged.reader import TaggedReader, after_no_tag
from coppice.frontend.chat.tools.tagged.values import (
    choices,
    is_text,
    resolved,
    terminal,
    text_expression,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"([^>\n]*+)>")


class Qwen3CoderFormat(ToolFormat):
    """Values of parameters that are text stand as they are, all others as JSON."""

    marks = (OPEN, CLOSE)

    def reader(self, tools: Tools) -> Qwen3CoderReader:
        return Qwen3CoderReader(tools)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        made = []
        for name, arguments in calls:
            parameters = "".join(
                f"{_PARAMETER}{key}>\n"
                f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
                f"{_PARAMETER_END}\n"
                for key, value in json.loads(arguments).items()
            )
            made.append(f"{OPEN}\n{_FUNCTION}{name}>\n{parameters}{_FUNCTION_END}\n{CLOSE}")
        return "\n".join(made)

    def call(self, tool: Tool, marks: Marks) -> str:
        schema = schema_of(tool)
        properties = schema.get("properties")
        required = schema.get("required", ())
        parts, rules = [], dict[str, str]()
        for key, each in (properties if isinstance(properties, dict) else {}).items():
            head = json.dumps(f"{_PARAMETER}{key}>\n")
            part = f"{head} {_value(each, schema, rules)}"
            parts.append(part if key in required else f"({part})?")
        head, tail = json.dumps(f"{_FUNCTION}{tool.function.name}>\n"), json.dumps(_FUNCTION_END)
        return "\n".join([" ".join([head, *parts, tail]), *rules.values()])

    def after(self, call: str, parallel: bool, marks: Marks) -> str:
        opening, closing = map(marks.term, self.marks)
        more = r' ("\n" tagged)*' if parallel else ""
        end = pattern(f"\n{_PARAMETER_END}\n")
        return (
            f'after: function{more}\ntagged: {opening} function\n'
            f'function: "\\n" {call} "\\n" {closing}\nvalue[lazy]: /(.|\\n)*{end}/'
        )  # fmt: skip


def _value(schema: Any, root: Mapping[str, Any], rules: dict[str, str]) -> str:
    """What matches a value and the tag after it; adds the terminals that it needs to the rules."""
    closing = f"\n{_PARAMETER_END}\n"
    schema = resolved(schema, root)
    if (texts := choices(schema)) is not None:
        return f"({' | '.join(map(json.dumps, texts))}) {json.dumps(closing)}"
    if not is_text(schema, root) and isinstance(schema, dict):
        return f"{json_of(schema, root)} {json.dumps(closing)}"
    expression = text_expression(schema)
    if expression is None:
        return "value"
    name, rules[name] = terminal(expression, closing)
    return name


class Qwen3CoderReader(TaggedReader):
    """Reads calls; their arguments become JSON, parameter by parameter, texts as they come."""

    openings = (OPEN, _FUNCTION)  # some answers leave the outer tag out

    value_end, framed = _PARAMETER_END, True

    def _after(self, mark: str) -> str:
        return _FUNCTION if mark == _FUNCTION else ""

    def _read(self, text: str, pieces: list[Piece]) -> str:
        if self._text_value is not None:
            return self._in_value(text, pieces)
        bare = text.lstrip()
        if not self._in_call:
            return self._between(bare, text, pieces)
        if bare.startswith(_PARAMETER):
            name = _NAME.match(bare, len(_PARAMETER))
            if name is not None:
                self._begin_value(name[1], pieces)
                return bare[name.end() :]
        elif bare.startswith(_FUNCTION_END):
            self._close(pieces)
            return bare[len(_FUNCTION_END) :]
        elif not any(mark.startswith(bare) for mark in (_PARAMETER, _FUNCTION_END)):
            return after_no_tag(bare)
        self._pending = bare
        return ""

    def _between(self, bare: str, text: str, pieces: list[Piece]) -> str:
        """Reads tags of calls, outside any."""
        if bare.startswith(_FUNCTION):
            name = _NAME.match(bare, len(_FUNCTION))
            if name is not None:
                self._begin_call(name[1].strip(), pieces)
                return bare[name.end() :]
        elif bare.startswith(CLOSE) and not self._opened:
            self._within = False
            return bare[len(CLOSE) :]
        elif not any(mark.startswith(bare) for mark in (_FUNCTION, CLOSE)):
            return self._give_up(text, pieces)
        self._pending = text
        return ""
