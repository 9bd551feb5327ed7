"""From the body of /v1/responses to the request that the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice.frontend.api.openai.response_formats import Formed, form_of
from coppice.frontend.api.openai.responses.body import (
    AllowedChoice,
    FunctionChoice,
    InputBody,
    ResponsesBody,
    TextSchema,
)
from coppice.frontend.api.openai.responses.items import ItemReference, messages_of, named
from coppice.frontend.api.openai.responses.memory import Json, Remembered, ResponseMemory
from coppice.frontend.api.renaming import renamed
from coppice.frontend.api.request import TextRequest
from coppice.frontend.chat.tools.choice import (
    AllowedTools,
    AllowedToolsChoice,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    Tools,
    tools_of,
)
from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.http.json_bodies import LARGE_BYTES
from coppice.frontend.strict import read
from coppice.frontend.text.model.generation_config import GenerationDefaults
from coppice.runtime.requests.sampling_params import SamplingParams

# What other modules call the parts of a request, and what /v1/responses calls them.
NAMES: Mapping[str, str] = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    ".function.": ".",
    "tool_choice.allowed_tools": "tool_choice",
}

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
    "thinking_token_budget",
)  # fmt: skip


class Call:
    """One request to /v1/responses.

    Attributes:
        body: the checked body, once it was parsed.
        input: its input items, each with an id.
        before: the response that it continues.
    """

    body: ResponsesBody
    input: list[Json]
    before: Remembered | None

    def __init__(self, memory: ResponseMemory, owner: str) -> None:
        """`owner` is the name of the client's key, whose responses it may continue."""
        self._memory = memory
        self._owner = owner
        self._read_bytes = 0  # of what is remembered

    def parse(self, body: Any, defaults: GenerationDefaults) -> TextRequest:
        """The request for the engine, with `defaults` for what is not set. Raises BadRequest."""
        self.body = asked = read(ResponsesBody, body)
        if asked.stream_options is not None and not asked.stream:
            raise BadRequest("stream_options needs stream to be true", param="stream_options")
        values = {"max_tokens": asked.max_output_tokens} | asked.given(*_SAMPLING)
        if asked.top_logprobs is not None or "message.output_text.logprobs" in (
            asked.include or ()
        ):
            values["logprobs"] = asked.top_logprobs or 0
        return self._request(
            asked,
            body,
            defaults.fill(values),
            cache_salt=asked.cache_salt,
            priority=asked.priority,
            stream=asked.stream,
        )

    def is_long(self, body: Any) -> bool:
        """Whether what is remembered, and goes on here, is so much that reading it takes long.

        The body is not checked yet.
        """
        if not isinstance(body, dict):
            return False
        size, before = 0, body.get("previous_response_id")
        if isinstance(before, str) and (found := self._memory.get(self._owner, before)):
            size = found.whole
        items = body.get("input")
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict) and isinstance(name := item.get("id"), str):
                if "role" in item or item.get("type") not in (None, "item_reference"):
                    continue
                holder = self._memory.holder(self._owner, name)
                size += 0 if holder is None else holder.size
        return size >= LARGE_BYTES

    def parse_count(self, body: Any, defaults: GenerationDefaults) -> TextRequest:
        """The request whose input tokens are to be counted. Raises BadRequest."""
        return self._request(read(InputBody, body), body, {})

    def _request(
        self, asked: InputBody, body: Any, values: dict[str, Any], **more: Any
    ) -> TextRequest:
        try:
            form = form_of(_formed(asked))
            if form is not None:
                values["structured_outputs"] = form.params
            tools = _tools(asked)
        except BadRequest as error:
            raise renamed(error, NAMES) from error
        try:
            params = SamplingParams(**values)
        except ValueError as error:
            raise bad_value(error, body) from error
        return TextRequest(
            model=asked.model,
            prompts=(),
            messages=tuple(self._messages(asked)),
            params=params,
            beam=None,
            form=form,
            tools=tools,
            template={
                "template_arguments": asked.chat_template_kwargs or {},
                "reasoning_effort": asked.reasoning.effort if asked.reasoning is not None else None,
            },
            text_field="input",
            names=NAMES,
            remembered_bytes=self._read_bytes,
            shortens=asked.truncation == "auto",
            **more,
        )

    def _messages(self, asked: InputBody) -> list[Json]:
        self.input, self.before, earlier = [], None, []
        if asked.previous_response_id is not None:
            self.before = self._memory.get(self._owner, asked.previous_response_id)
            if self.before is None:
                raise BadRequest(
                    f"previous_response_id: no response {asked.previous_response_id!r:.80} is "
                    f"remembered; send its input and output again",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            earlier = self.before.conversation()
            self._read_bytes += self.before.whole
        remembered: dict[str, Json] = {}  # items that were referred to, and those beside them
        for place, item in enumerate(asked.input):
            if isinstance(item, ItemReference):
                if item.id not in remembered:
                    holder = self._memory.holder(self._owner, item.id)
                    if holder is None:
                        raise BadRequest(
                            f"input[{place}].id: no item {item.id!r:.80} is remembered; send the "
                            f"item itself",
                            param=f"input[{place}].id",
                        )
                    remembered |= holder.own_items()
                    self._read_bytes += holder.size
                self.input.append(remembered[item.id])
            else:
                self.input.append(named(item))
        messages = messages_of([*earlier, *self.input])
        if asked.instructions is not None:
            messages.insert(0, {"role": "system", "content": asked.instructions})
        return messages


def _formed(asked: InputBody) -> Formed:
    """What is asked of the text's form, as the other endpoints have it."""
    given: dict[str, Any] = {}
    wanted = asked.text.format if asked.text is not None else None
    if isinstance(wanted, TextSchema):
        schema = wanted.model_dump(by_alias=True, exclude={"type"})
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted is not None:
        given["response_format"] = wanted.model_dump()
    if isinstance(asked, ResponsesBody):
        given["structured_outputs"] = asked.structured_outputs
    return Formed.model_validate(given)


def _tools(asked: InputBody) -> Tools | None:
    tools = [
        Tool(type="function", function=Function(**tool.given(*Function.model_fields)))
        for tool in asked.tools or ()
    ]
    choice = asked.tool_choice
    if isinstance(choice, FunctionChoice):
        return tools_of(tools, _named(choice), asked.parallel_tool_calls)
    if isinstance(choice, AllowedChoice):
        allowed = AllowedTools(mode=choice.mode, tools=list(map(_named, choice.tools)))
        some = AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
        return tools_of(tools, some, asked.parallel_tool_calls)
    return tools_of(tools, choice, asked.parallel_tool_calls)


def _named(choice: FunctionChoice) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=choice.name))
