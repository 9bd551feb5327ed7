"""The body of /v1/responses: every parameter is followed, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from coppice.frontend.api.openai.requests import (
    MAX_LOGPROBS,
    Stop,
    ThinkingBudget,
    TokenIds,
    bounded,
)
from coppice.frontend.api.openai.response_formats import (
    JsonObjectFormat,
    StructuredOutputs,
    TextFormat,
)
from coppice.frontend.api.openai.responses.items import Item
from coppice.frontend.strict import Body, Lenient, Name, Only, between, must_be


class FunctionTool(Lenient):
    """A function that the model may call. Only `strict` true makes its calls fit the schema."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, Only(False)] = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None
    output_schema: Annotated[Any, Only()] = None


class FunctionChoice(Lenient):
    """The function that must be called, or may be."""

    type: Literal["function"]
    name: str


class AllowedChoice(Lenient):
    """Which of the functions that the model is shown it may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1)


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice,
    must_be(
        '"none", "auto", "required", an object that names a function, or one of type '
        '"allowed_tools"'
    ),
]


class TextSchema(Lenient):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Lenient):
    """What the text must be like."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | TextSchema, Field(discriminator="type")] | None
    ) = None
    verbosity: Annotated[Any, Only("medium")] = None


class Reasoning(Lenient):
    """How much the model thinks before it answers; it is returned as it is, not summarised."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Annotated[Any, Only("auto")] = None
    generate_summary: Annotated[Any, Only("auto")] = None
    context: Annotated[Any, Only("auto")] = None
    mode: Annotated[Any, Only("standard")] = None


class EventOptions(Lenient):
    """What a stream contains beside the events."""

    include_obfuscation: Annotated[Any, Only(False)] = None


def _listed(given: Any) -> Any:
    """A text stands for one message of the user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class InputBody(Body):
    """What the prompt is made of."""

    model: str | None = None
    input: Annotated[
        list[Item],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_listed, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    conversation: Annotated[Any, Only()] = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's


class ResponsesBody(InputBody):
    """The body of /v1/responses."""

    stream: bool = False
    stream_options: EventOptions | None = None
    max_output_tokens: Annotated[int, bounded("max_tokens")] | None = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    top_logprobs: Annotated[int, between(0, MAX_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None  # reasoning is text, which needs no encryption to come back
    )
    store: bool = True

    # They name, tag or group requests; the answer does not depend on them.
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    background: Annotated[Any, Only(False)] = None
    context_management: Annotated[Any, Only([])] = None
    max_tool_calls: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    # The cache finds every shared prefix by itself, and lives as long as the process.
    prompt_cache_options: Annotated[Any, Only({"mode": "implicit"})] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None

    # Extensions, under the names of the other endpoints.
    top_k: Annotated[int, bounded("top_k")] | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Annotated[int, bounded("min_tokens")] | None = None
    thinking_token_budget: ThinkingBudget | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: int = 0
