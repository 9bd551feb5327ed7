"""From the body of /v1/messages to the request that the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice.frontend.api.anthropic.blocks import AnswerTurn, TextBlock
from coppice.frontend.api.anthropic.body import (
    AnyChoice,
    MessagesBody,
    NoChoice,
    PromptBody,
    ToolNameChoice,
)
from coppice.frontend.api.anthropic.conversation import Conversation, mark_last
from coppice.frontend.api.breakpoints import Breakpoint
from coppice.frontend.api.openai.response_formats import Formed, form_of
from coppice.frontend.api.renaming import renamed
from coppice.frontend.api.request import TextRequest
from coppice.frontend.chat.tools.choice import (
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
    tools_of,
)
from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.strict import read
from coppice.frontend.text.model.generation_config import GenerationDefaults
from coppice.runtime.requests.sampling_params import SamplingParams

MOST_MARKS = 4

# What other modules call the parts of a request, and what this API calls them.
NAMES: Mapping[str, str] = {
    "response_format.json_schema": "output_config.format",
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
}

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos")


def parse_messages(body: Any, defaults: GenerationDefaults) -> TextRequest:
    """The body of /v1/messages, with `defaults` for what it does not set. Raises BadRequest."""
    asked = read(MessagesBody, body)
    values = {"max_tokens": asked.max_tokens} | asked.given(*_SAMPLING)
    if asked.stop_sequences:
        values["stop"] = asked.stop_sequences
    thinking = asked.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
        values["thinking_token_budget"] = thinking.budget_tokens
    if asked.max_tokens == 0:
        if asked.stream:
            raise BadRequest("max_tokens may be 0 only without stream", param="max_tokens")
        values |= {"max_tokens": 1}
    return _request(
        asked,
        body,
        defaults.fill(values),
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        stream=asked.stream,
        nothing_new=asked.max_tokens == 0,
    )


def parse_count(body: Any, defaults: GenerationDefaults) -> TextRequest:
    """The body of /v1/messages/count_tokens. Raises BadRequest."""
    return _request(read(PromptBody, body), body, {})


def _request(asked: PromptBody, body: Any, values: dict[str, Any], **more: Any) -> TextRequest:
    mark_last(asked)
    conversation = Conversation(asked)
    if len(conversation.marks) > MOST_MARKS:
        raise BadRequest(
            f"cache_control may mark at most {MOST_MARKS} blocks, got {len(conversation.marks)}",
            param="cache_control",
        )
    try:
        form = form_of(_formed(asked))
        if form is not None:
            values["structured_outputs"] = form.params
        tools = _tools(asked, conversation.tools)
    except BadRequest as error:
        raise renamed(error, NAMES) from error
    try:
        params = SamplingParams(**values)
    except ValueError as error:
        raise bad_value(error, body) from error
    last = asked.messages[-1]
    continues = isinstance(last, AnswerTurn) and all(
        isinstance(block, TextBlock) for block in last.content
    )
    return TextRequest(
        model=asked.model,
        prompts=(),
        messages=tuple(conversation.messages),
        params=params,
        form=form,
        tools=tools,
        template={
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
            "template_arguments": asked.chat_template_kwargs or {},
            "reasoning_effort": _effort(asked),
        },
        text_field="prompt",
        names=NAMES,
        thinking_binds=False,  # clients must send a budget
        breakpoints=tuple(_breakpoints(asked, conversation, tools is not None)),
        **more,
    )


def _effort(asked: PromptBody) -> str | None:
    """How much the model thinks, as the OpenAI API has it; None: as the model does by itself."""
    effort = asked.output_config.effort if asked.output_config is not None else None
    thinking = "adaptive" if asked.thinking is None else asked.thinking.type
    if thinking == "disabled":
        return "none"
    if thinking == "enabled" and effort is None:
        return "medium"
    return "xhigh" if effort == "max" else effort


def _breakpoints(
    asked: PromptBody, conversation: Conversation, shows_tools: bool
) -> list[Breakpoint]:
    found = []
    for place, mark in enumerate(conversation.marks):
        other = Conversation(asked, place)
        tools = [tool.model_dump(exclude_none=True) for tool in other.tools]
        found.append(
            Breakpoint(mark.seconds, tuple(other.messages), tools if shows_tools else None)
        )
    return found


def _formed(asked: PromptBody) -> Formed:
    """What is asked of the text's form, as the OpenAI API has it."""
    given: dict[str, Any] = {}
    wanted = asked.output_config.format if asked.output_config is not None else None
    if wanted is not None:
        schema = {"name": "output", "schema": wanted.schema_}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(asked, MessagesBody):
        given["structured_outputs"] = asked.structured_outputs
    return Formed.model_validate(given)


def _tools(asked: PromptBody, tools: list[Tool]) -> Tools | None:
    choice, parallel = asked.tool_choice, True
    wanted: ToolChoice | None = None
    if isinstance(choice, NoChoice):
        wanted = "none"
    elif isinstance(choice, AnyChoice):
        wanted = "required" if choice.type == "any" else "auto"
        parallel = not choice.disable_parallel_tool_use
    elif isinstance(choice, ToolNameChoice):
        wanted = NamedTool(type="function", function=NamedFunction(name=choice.name))
    return tools_of(tools, wanted, parallel)
