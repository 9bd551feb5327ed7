"""The tools of a chat, and which of them the model may or must call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from coppice.frontend.errors import BadRequest
from coppice.frontend.strict import Body, Name, must_be
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.grammar_source import check


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    @property
    def schema_text(self) -> str:
        """JSON Schema of its arguments, which are always an object."""
        return json.dumps({"type": "object"} | (self.function.parameters or {}))


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(Body):
    """Which of the tools that the model is shown it may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice,
    must_be(
        '"none", "auto", "required", an object that names a function, or one of type '
        '"allowed_tools"'
    ),
]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        offered: the tools that the model is shown.
        allowed: those of them that it may call. It is shown the others all the same, so that
            requests that differ in this alone share their prompt's prefix.
        forced: those of which it must call one; none: it may call any, or none.
        parallel: whether one answer may have several calls.
    """

    offered: Sequence[Tool]
    allowed: Sequence[Tool]
    forced: Sequence[Tool]
    parallel: bool

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates expect them."""
        return [tool.model_dump(exclude_none=True) for tool in self.offered]

    @property
    def strict(self) -> bool:
        """Whether calls must fit the schemas even if no call is forced."""
        return any(tool.function.strict for tool in self.allowed)

    @property
    def held(self) -> bool:
        """Whether the text must follow a grammar of calls."""
        return bool(self.forced) or self.strict or len(self.allowed) < len(self.offered)

    def check(self, tenant: str | None = None) -> tuple[str, ...]:
        """The keywords of schemas that calls must fit which they need not follow; see `check`.

        Raises BadRequest if a schema that must be followed can't be. May take seconds.
        """
        relaxed: dict[str, None] = {}
        held = {tool.function.name for tool in self.forced or self.allowed} if self.held else ()
        for index, tool in enumerate(self.offered):
            if tool.function.name not in held:
                continue
            field = f"tools[{index}].function.parameters"
            try:
                strict = bool(tool.function.strict)
                form = StructuredOutputsParams(json=tool.schema_text, strict=strict)
                found = check(form, tenant)
            except ValueError as error:
                raise BadRequest(f"{field} {str(error).partition(' ')[2]}", param=field) from error
            relaxed |= dict.fromkeys(found)
        return tuple(relaxed)


def tools_of(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> Tools | None:
    """The tools of a request; None: the model is shown no tools. Raises BadRequest."""
    if not tools:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return None
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            field = f"tools[{index}].function.name"
            raise BadRequest(f"{field} must be unique, got {name!r} again", param=field)
        names.add(name)
    if choice == "none":
        return None
    allowed: Sequence[Tool] = tools
    forced: Sequence[Tool] = tools if choice == "required" else ()
    if isinstance(choice, NamedTool):
        forced = _named(tools, [choice], "tool_choice.function.name")
    if isinstance(choice, AllowedToolsChoice):
        field = "tool_choice.allowed_tools.tools"
        allowed = _named(tools, choice.allowed_tools.tools, field)
        forced = allowed if choice.allowed_tools.mode == "required" else ()
    one_only = parallel is False or isinstance(choice, NamedTool)
    return Tools(tuple(tools), tuple(allowed), tuple(forced), not one_only)


def _named(tools: Sequence[Tool], chosen: Sequence[NamedTool], field: str) -> list[Tool]:
    """The chosen tools, in the order of `tools`. Raises BadRequest."""
    names = dict.fromkeys(tool.function.name for tool in tools)
    wanted = {each.function.name: None for each in chosen}
    for name in wanted:
        if name not in names:
            raise BadRequest(
                f"{field} must be one of {', '.join(names)}, got {name!r:.80}", param=field
            )
    return [tool for tool in tools if tool.function.name in wanted]
