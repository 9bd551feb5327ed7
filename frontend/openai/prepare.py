"""From a checked request to what the engine is given; the slow part, which runs in a thread.

Prompts become tokens, and what is asked of the form of the text becomes one form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coppice.frontend.errors import BadRequest
from coppice.frontend.openai.requests import CompletionRequest
from coppice.frontend.openai.tools.choice import Tools
from coppice.frontend.openai.tools.formats import ToolFormat
from coppice.frontend.text.conversation import check_characters
from coppice.frontend.text.detokenizer import IncrementalDecoder
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.frontend.text.tokens import TokenTexts
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.beam_search import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it stands before its continuations.

    Attributes:
        text: the prompt.
        offsets: characters before each of its tokens.
        tokens: the text of each.
    """

    text: str
    offsets: tuple[int, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the engine is given.

    Attributes:
        prompts: text (if there was one) and token ids of each.
        params: the request's, with the form that its tools ask for.
        beam: its beam search, if it asks for one, with the same.
        echoes: of each prompt, if they are wanted.
    """

    prompts: Sequence[tuple[str | None, list[int]]]
    params: SamplingParams
    beam: BeamSearchParams | None = None
    echoes: Sequence[Echo] = ()


def prepare(
    asked: CompletionRequest,
    tokenizer: Tokenizer,
    texts: TokenTexts,
    format: ToolFormat | None,
    longest: int,
) -> Prepared:
    """`longest` is the most tokens that the model takes.

    Raises ValueError, a BadRequest where the parameter is known, for what can't be done.
    """
    for prompt in asked.prompts:
        if isinstance(prompt, str):
            check_characters("prompt", prompt)
            tokenizer.check_length("prompt", prompt, longest)
        elif len(prompt) >= longest:
            raise BadRequest(
                f"prompt must be shorter than {longest} tokens (max_model_len), so that there is "
                f"room for at least one more, got {len(prompt)}",
                param="prompt",
            )
    for index, message in enumerate(asked.messages):
        for text in _texts(message.get("content")):
            check_characters(f"messages[{index}].content", text)
            tokenizer.check_length("messages", text, longest)
    if asked.form is not None:
        asked.form.check()
    params, beam = asked.params, asked.beam
    if asked.tools is not None:
        changes = _with_tools(asked, asked.tools, tokenizer, format)
        params = replace(params, **changes)
        beam = None if beam is None else replace(beam, **changes)
    if asked.messages:
        tools = None if asked.tools is None else asked.tools.for_template
        ids = tokenizer.encode_chat(asked.messages, tools=tools, **asked.template)
        return Prepared([(None, ids)], params, beam)
    prompts = [
        (prompt, tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
        for prompt in asked.prompts
    ]
    echoes = []
    if asked.echo:
        echoes = [_echo(text, ids, tokenizer, texts) for text, ids in prompts]
    return Prepared(prompts, params, beam, echoes)


def _texts(content: Any) -> list[str]:
    """The texts of a message, whatever else is in it."""
    parts = content if isinstance(content, list) else [content]
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in found if isinstance(text, str)]


def _with_tools(
    asked: CompletionRequest, tools: Tools, tokenizer: Tokenizer, format: ToolFormat | None
) -> dict[str, Any]:
    """The parameters that the tools ask for, of sampling and beam search alike."""
    if format is None:
        raise BadRequest(
            "tools: how this model writes calls is not known; choose a tool_call_parser",
            param="tools",
        )
    tools.check()
    changes: dict[str, Any] = {}
    form = format.constraint(tools)
    if form is not None:
        if asked.form is not None:
            raise BadRequest(
                f"{asked.form.field} can't be combined with tools that must be called or are "
                f"strict",
                param=asked.form.field,
            )
        changes["structured_outputs"] = form
    if set(format.marks) & tokenizer.special_tokens:
        changes["skip_special_tokens"] = False
    return changes


def _echo(text: str | None, ids: list[int], tokenizer: Tokenizer, texts: TokenTexts) -> Echo:
    vocabulary = tokenizer.vocabulary
    known = [token for token in ids if 0 <= token < vocabulary]  # others are refused later
    decoder = IncrementalDecoder(partial(tokenizer.decode, skip_special_tokens=True))
    offsets, length = [], 0
    for token in known:
        piece, own = decoder.push((token,)), texts.text(token)
        length += len(piece)
        offsets.append(length - (len(own) if own and piece.endswith(own) else len(piece)))
    if text is None:
        text = tokenizer.decode(known)
    return Echo(text, tuple(offsets), tuple(map(texts.text, known)))
