"""Tool calls as GLM 4.5 to 4.7 write them: a name, and a tag for each key and each value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coppice.frontend.chat.marks import Marks
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
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_LONGEST_NAME = 200  # characters


class GlmFormat(ToolFormat):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.

    Values that are text stand as they are, all others as JSON.

    Args:
        lines: whether each tag has a line of its own, as until GLM 4.6.
    """

    marks = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    def __init__(self, *, lines: bool) -> None:
        self._break = "\n" if lines else ""

    def reader(self, tools: Tools) -> GlmReader:
        return GlmReader(tools)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        made, line = [], self._break
        for name, arguments in calls:
            parameters = "".join(
                f"{KEY}{key}{KEY_END}{line}{VALUE}"
                f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
                f"{VALUE_END}{line}"
                for key, value in json.loads(arguments).items()
            )
            made.append(f"{OPEN}{name}{line}{parameters}{CLOSE}")
        return "\n".join(made)

    def call(self, tool: Tool, marks: Marks) -> str:
        schema = schema_of(tool)
        properties = schema.get("properties")
        required = schema.get("required", ())
        parts, rules = [json.dumps(tool.function.name + self._break)], dict[str, str]()
        line = json.dumps(self._break) if self._break else ""
        for key, each in (properties if isinstance(properties, dict) else {}).items():
            part = (
                f"{marks.term(KEY)} {json.dumps(key)} {marks.term(KEY_END)} {line} "
                f"{marks.term(VALUE)} {_value(each, schema, marks, rules)} {line}"
            )
            parts.append(part if key in required else f"({part})?")
        return "\n".join([" ".join(parts), *rules.values()])

    def after(self, call: str, parallel: bool, marks: Marks) -> str:
        opening, closing = marks.term(OPEN), marks.term(CLOSE)
        more = r' ("\n" tagged)*' if parallel else ""
        return (
            f"after: body{more}\ntagged: {opening} body\nbody: {call} {closing}\n"
            f"{marks.until('value', VALUE_END)}"
        )


def _value(schema: Any, root: Mapping[str, Any], marks: Marks, rules: dict[str, str]) -> str:
    """What matches a value and the tag after it; adds the terminals that it needs to the rules."""
    closing = marks.term(VALUE_END)
    schema = resolved(schema, root)
    if (texts := choices(schema)) is not None:
        return f"({' | '.join(map(json.dumps, texts))}) {closing}"
    if not is_text(schema, root) and isinstance(schema, dict):
        return f"{json_of(schema, root)} {closing}"
    expression = text_expression(schema)
    if expression is None:
        return "value"
    if marks.id(VALUE_END) is None:
        name, rules[name] = terminal(expression, VALUE_END)
        return name
    name, rules[name] = terminal(expression, "")
    return f"{name} {closing}"


class GlmReader(TaggedReader):
    """Reads calls; their arguments become JSON, parameter by parameter, texts as they come."""

    openings = (OPEN,)
    value_end = VALUE_END
    _key: str | None = None  # of a value whose tag has not come

    def _read(self, text: str, pieces: list[Piece]) -> str:
        if self._text_value is not None:
            return self._in_value(text, pieces)
        if not self._in_call:
            return self._head(text, pieces)
        bare = text.lstrip()
        if self._key is not None:
            if bare.startswith(VALUE):
                self._begin_value(self._key, pieces)
                self._key = None
                return bare[len(VALUE) :]
        elif bare.startswith(KEY):
            key, end, rest = bare[len(KEY) :].partition(KEY_END)
            if end:
                self._key = key.strip()
                return rest
            if len(key) <= _LONGEST_NAME:
                self._pending = bare
                return ""
        if bare.startswith(CLOSE):
            self._key = None
            self._close(pieces)
            self._within = False
            return bare[len(CLOSE) :]
        if any(mark.startswith(bare) for mark in (KEY, VALUE, CLOSE)):
            self._pending = bare
            return ""
        return after_no_tag(bare)

    def _head(self, text: str, pieces: list[Piece]) -> str:
        """Reads the name of a call, up to the first tag or line break."""
        bare = text.lstrip()
        places = [place for mark in ("\n", KEY, CLOSE) if (place := bare.find(mark)) >= 0]
        name = bare[: min(places, default=0)].strip()
        if name and len(name) <= _LONGEST_NAME and not set(name) & set('{"<'):
            self._begin_call(name, pieces)
            return bare[min(places) :]
        if places or len(bare) > _LONGEST_NAME + len(CLOSE):
            return self._give_up(text, pieces)
        self._pending = text
        return ""
