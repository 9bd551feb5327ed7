"""The tools that a chat may use, and which of them the model may or must call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from coppice.frontend.bodies import BadRequest, Body, says
from coppice.runtime.grammars import check
from coppice.runtime.structured_outputs import StructuredOutputsParams


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    @property
    def schema_text(self) -> str:
        """JSON Schema of its arguments, which are an object whatever it says."""
        return json.dumps({"type": "object"} | (self.function.parameters or {}))


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    says('"none", "auto", "required" or an object that names a function'),
]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        offered: what the model is told of; those that it may call.
        forced: those of which it must call one; none: it calls what it likes.
        parallel: whether it may call several in one answer.
    """

    offered: Sequence[Tool]
    forced: Sequence[Tool]
    parallel: bool

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates expect them."""
        return [tool.model_dump(exclude_none=True) for tool in self.offered]

    @property
    def strict(self) -> bool:
        """Whether calls must fit the schemas even if none is forced."""
        return any(tool.function.strict for tool in self.offered)

    @property
    def held(self) -> bool:
        """Whether the text is held to a grammar of calls."""
        return bool(self.forced) or self.strict

    def check(self) -> None:
        """Raises BadRequest if a schema that is to be followed can't be; may take a second."""
        for index, tool in enumerate(self.offered):
            if not (tool in self.forced or self.strict):
                continue
            field = f"tools[{index}].function.parameters"
            try:
                check(StructuredOutputsParams(json=tool.schema_text))
            except ValueError as error:
                raise BadRequest(f"{field} {str(error).partition(' ')[2]}", param=field) from error


def tools_of(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> Tools | None:
    """What a request asks for; None: the model is told of no tools. Raises BadRequest."""
    if not tools:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            field = f"tools[{index}].function.name"
            raise BadRequest(f"{field} must be unique, got {name!r} again", param=field)
    if choice == "none":
        return None
    forced: Sequence[Tool] = tools if choice == "required" else ()
    if isinstance(choice, NamedTool):
        forced = [tool for tool in tools if tool.function.name == choice.function.name]
        if not forced:
            field = "tool_choice.function.name"
            raise BadRequest(
                f"{field} must be one of {', '.join(names)}, got {choice.function.name!r:.80}",
                param=field,
            )
    one_only = parallel is False or isinstance(choice, NamedTool)
    return Tools(tuple(tools), tuple(forced), not one_only)
