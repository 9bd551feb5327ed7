"""Conversations to token ids, by the chat template of the model."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, TypeAlias

from coppice.frontend.chat.messages import Message, MessageBody, turns
from coppice.frontend.chat.request_template import RequestTemplates
from coppice.frontend.chat.tools.described import described
from coppice.frontend.chat.tools.format import ToolFormat
from coppice.frontend.chat.tools.hermes import HermesFormat
from coppice.frontend.text.tokenizer import Tokenizer

Messages: TypeAlias = Sequence[Message] | Sequence[MessageBody]


def encode_chat(tokenizer: Tokenizer, messages: Messages, **more: Any) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins.

    Arguments are those of `write_chat`. Raises ValueError as it does.
    """
    return tokenizer.encode_more(write_chat(tokenizer, messages, **more))


def write_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    longest: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    format: ToolFormat | None = None,
    apart: RequestTemplates | None = None,
) -> str:
    """The text of a conversation, marks included, up to where the assistant's answer begins.

    Args:
        tokenizer: of the model, with its chat template.
        messages: of the OpenAI API's roles; `content` is a string, or a list of parts of type
            "text", which are joined.
        longest: messages of far more tokens are refused (see `check_length`).
        tools: the tools that the model may call, as the API writes them.
        add_generation_prompt: whether the beginning of an answer is added at the end.
        continue_final_message: leave the last message open, so that the answer continues it.
        template_arguments: more variables for the chat template.
        chat_template: used in place of the model's.
        format: how calls are written where the template has no place for tools.
        apart: fills `chat_template`, which comes from a request, with bounds.

    Raises:
        ValueError: the model has no chat template, the template refuses the conversation, or a
            message has an unknown role, an unknown key or content that is not text.
    """
    template = chat_template or tokenizer.chat_template
    written = str(template or "")
    taken = turns(messages, developer="developer" in written)
    if longest is not None:
        for turn in taken:
            tokenizer.check_length("messages", turn["content"], longest)
    if not template:
        raise ValueError("messages: this model's tokenizer has no chat template")
    _fit(taken, written)
    shown = list(tools or ())
    taken = described(taken, shown, written, format or HermesFormat())
    more = dict(template_arguments or {})
    for name in more:
        if name in _template_options() or not name.isidentifier():
            raise ValueError(f"chat_template_kwargs must not have {name!r}")

    wanted = shown if shown and "tools" in written else None

    def fill(turns: Sequence[Mapping[str, Any]]) -> str:
        if apart is not None:
            return apart.fill(
                messages=[{k: v for k, v in turn.items() if v is not None} for turn in turns],
                tools=wanted,
                chat_template=written,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**tokenizer.wrapped.special_tokens_map, **more},
            )
        text = tokenizer.wrapped.apply_chat_template(
            turns,
            tools=wanted,
            chat_template=template if isinstance(template, str) else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **more,
        )
        return str(text)

    try:
        try:
            return fill(taken)
        except TypeError:
            if not any("tool_calls" in turn for turn in taken):
                raise
            return fill(_with_texts(taken))
    except Exception as error:  # a template is a program and may raise anything
        raise ValueError(f"messages: the chat template refuses them: {error}") from error


def _with_texts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The turns with arguments as JSON text: DeepSeek's templates add them to other texts."""
    made = copy.deepcopy([dict(turn) for turn in turns])
    for turn in made:
        for call in turn.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return made


def _fit(turns: list[dict[str, Any]], template: str) -> None:
    """Names reasoning and ids as this template wants them."""
    short = re.search(r"!=\s*9\b", template) is not None  # Mistral's ids have nine characters
    thinking = "reasoning_content" not in template and re.search(
        r"""message(\.|\[['"])thinking""", template
    )
    for turn in turns:
        if thinking and "reasoning_content" in turn:
            reasoning = turn.pop("reasoning_content")
            if not (turn.get("tool_calls") and turn["content"]):  # gpt-oss takes one of them
                turn["thinking"] = reasoning
        if short:
            for call in turn.get("tool_calls", ()):
                call["id"] = _short(call["id"])
            if "tool_call_id" in turn:
                turn["tool_call_id"] = _short(turn["tool_call_id"])


def _short(name: str) -> str:
    """The id itself if it has nine letters and digits; else nine that follow from it."""
    if re.fullmatch(r"[a-zA-Z0-9]{9}", name):
        return name
    return sha256(name.encode(errors="replace")).hexdigest()[:9]


@cache
def _template_options() -> frozenset[str]:
    """Names that variables for a template may not have: the arguments of filling it."""
    from transformers import PreTrainedTokenizerBase

    options = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(("messages", *options))
