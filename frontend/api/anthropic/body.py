"""The bodies of /v1/messages and of /v1/messages/count_tokens: followed, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from coppice.frontend.api.anthropic.blocks import CacheControl, Texts, Turn
from coppice.frontend.api.openai.requests import bounded
from coppice.frontend.api.openai.response_formats import StructuredOutputs
from coppice.frontend.strict import Body, Lenient, Only, between
from coppice.runtime.requests.sampling_params import MAX_STOP_STRINGS

_ToolName: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class ClientTool(Lenient):
    """A tool that the client runs; `strict` makes its calls fit the schema."""

    type: Literal["custom"] = "custom"
    name: _ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool = False
    eager_input_streaming: bool = True  # the input is always streamed as it comes
    defer_loading: Annotated[Any, Only(False)] = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None
    input_examples: Annotated[Any, Only([])] = None


class AnyChoice(Lenient):
    """Whether, and which of, the tools must be called."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class ToolNameChoice(Lenient):
    """The tool that must be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(Lenient):
    """No tool may be called."""

    type: Literal["none"]


class Thinking(Lenient):
    """Whether the model thinks before it answers, if it can, and at most how long.

    The budget is held where the marks of the model's reasoning are tokens, and else without effect.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Annotated[Any, Only("summarized")] = None  # it is returned as it is


class OutputSchema(Lenient):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    """What the text must be like."""

    format: OutputSchema | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Lenient):
    """Who asks; the answer does not depend on it."""

    user_id: str | None = None


class PromptBody(Body):
    """What the prompt is made of: the body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[ClientTool], Field(fail_fast=True)] | None = None
    tool_choice: (
        Annotated[AnyChoice | ToolNameChoice | NoChoice, Field(discriminator="type")] | None
    ) = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None  # marks the last block that can be marked
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # an extension, as vLLM names it
    context_management: Annotated[Any, Only({"edits": []})] = None
    mcp_servers: Annotated[Any, Only([])] = None
    speed: Annotated[Any, Only("standard")] = None
    user_profile_id: Annotated[Any, Only()] = None
    workspace_id: Annotated[Any, Only()] = None


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, between(0, 2**31 - 1)]  # 0: only the cache is filled
    stream: bool = False
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)]
        | None
    ) = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_k: Annotated[int, bounded("top_k")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    metadata: Metadata | None = None
    container: Annotated[Any, Only()] = None
    diagnostics: Annotated[Any, Only()] = None
    inference_geo: Annotated[Any, Only()] = None
    service_tier: Annotated[Any, Only("auto", "standard_only")] = None

    # Extensions, under the names of the other endpoints.
    min_p: Annotated[float, bounded("min_p")] | None = None
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: int = 0
