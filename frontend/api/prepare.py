"""From a checked request to what the engine takes; this is slow, and runs in a thread.

Prompts become tokens; a response format and tools become one form that the text must have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coppice.frontend.api.breakpoints import Shown, prefixes
from coppice.frontend.api.kept_prefixes import Prefix
from coppice.frontend.api.request import TextRequest
from coppice.frontend.api.shortening import encode_latest
from coppice.frontend.chat.budget import bounded
from coppice.frontend.chat.dialect import Dialect, Reading
from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.messages import turns
from coppice.frontend.chat.template import Messages
from coppice.frontend.errors import BadRequest
from coppice.frontend.text.detokenizer import IncrementalDecoder
from coppice.frontend.text.params import words_as_tokens
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.frontend.text.tokens import TokenTexts
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.grammar_source import check


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is repeated before its continuations.

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
    """What the engine takes.

    Attributes:
        prompts: the text (None if it came as token ids) and the token ids of each.
        params: of the request, with the form that its tools ask for.
        beam: its beam search, if it asks for one, with the same form.
        echoes: one for each prompt, if the answer repeats prompts.
        relaxed: keywords of schemas that the text need not follow.
        reading: how the text is read; None: as it is.
        prefixes: of the prompt, that are to be kept in the cache.
    """

    prompts: Sequence[tuple[str | None, list[int]]]
    params: SamplingParams
    beam: BeamSearchParams | None = None
    echoes: Sequence[Echo] = ()
    relaxed: tuple[str, ...] = ()
    reading: Reading | None = None
    prefixes: Sequence[Prefix] = ()


def prepare(
    asked: TextRequest,
    dialect: Dialect,
    texts: TokenTexts,
    longest: int,
    tenant: str | None = None,
) -> Prepared:
    """Makes tokens of the prompts, and one form of what is asked of the text.

    Args:
        asked: the request.
        dialect: how the model writes, with its tokenizer.
        texts: of the tokenizer's tokens, for echoed prompts.
        longest: the most tokens that the model takes. Only texts far above it are refused here,
            before encoding them takes long; the engine checks the exact lengths.
        tenant: who asks; forms that were checked for others are checked again.

    Raises:
        ValueError: for what can't be done; a BadRequest where the parameter is known.
    """
    relaxed = () if asked.form is None else asked.form.check(tenant)
    params = words_as_tokens(asked.params, dialect.tokenizer)
    beam = None if asked.beam is None else words_as_tokens(asked.beam, dialect.tokenizer)
    if asked.messages:
        relaxed += _check_tools(asked, dialect, tenant)
        chat = _prepare_chat(asked, params, beam, dialect, longest)
        return replace(chat, relaxed=relaxed)
    tokenizer = dialect.tokenizer
    prompts = [
        (prompt, tokenizer.encode(prompt, longest=longest))
        if isinstance(prompt, str)
        else (None, prompt)
        for prompt in asked.prompts
    ]
    echoes = []
    if asked.echo:
        echoes = [_echo(text, ids[:longest], tokenizer, texts) for text, ids in prompts]
    return Prepared(prompts, params, beam, echoes, relaxed)


def _prepare_chat(
    asked: TextRequest,
    params: SamplingParams,
    beam: BeamSearchParams | None,
    dialect: Dialect,
    longest: int,
) -> Prepared:
    tools = None if asked.tools is None else asked.tools.for_template

    def write(messages: Messages, tools: Shown = tools) -> str:
        return dialect.write(messages, tools=tools, longest=longest, **asked.template)

    def encode(messages: Messages) -> list[int]:
        return dialect.tokenizer.encode_more(write(messages))

    if asked.shortens:
        room = min(params.max_tokens or 1, longest // 2)  # for the answer
        ids = encode_latest(encode, asked.messages, longest + 1 - room)
    else:
        ids = encode(asked.messages)
    reading = dialect.reading(ids, asked.tools, _continued(asked))
    if reading is not None and (changes := _changes(params, reading)):
        params = replace(params, **changes)
        beam = None if beam is None else replace(beam, **changes)
    params = bounded(params, reading, binds=asked.thinking_binds)
    kept: Sequence[Prefix] = ()
    if asked.breakpoints:
        kept = prefixes(write(asked.messages), asked.breakpoints, write, dialect.tokenizer)
    return Prepared([(None, ids)], params, beam, reading=reading, prefixes=kept)


def _check_tools(asked: TextRequest, dialect: Dialect, tenant: str | None) -> tuple[str, ...]:
    """The keywords of the tools' schemas that calls need not follow.

    Raises BadRequest if the tools can't be called as it is asked.
    """
    tools = asked.tools
    if tools is None:
        return ()
    if dialect.calls is None:
        raise BadRequest(
            "tools: how this model writes calls is not known; choose a tool_call_parser",
            param="tools",
        )
    relaxed = tools.check(tenant)
    try:
        form = dialect.calls.constraint(tools, Marks())  # token ids can't be tried apart
        if form is not None:
            check(form, tenant)
    except ValueError as error:
        raise BadRequest(
            f"tools must be tools whose calls can be followed: {error}", param="tools"
        ) from error
    if form is not None and asked.form is not None:
        raise BadRequest(
            f"{asked.form.field} can't be combined with tools that must be called or are strict",
            param=asked.form.field,
        )
    return relaxed


def _continued(asked: TextRequest) -> str | None:
    """The text of the message that the answer continues, if it continues one."""
    if not asked.template.get("continue_final_message"):
        return None
    return str(turns(asked.messages[-1:])[0]["content"])


def _changes(params: SamplingParams, reading: Reading) -> dict[str, Any]:
    """The changes of the parameters, of sampling or of a beam search, that the reading asks for."""
    changes: dict[str, Any] = {}
    form = reading.constraint(params.structured_outputs)
    if form is not params.structured_outputs:
        changes["structured_outputs"] = form
    if reading.needs_marks:
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
