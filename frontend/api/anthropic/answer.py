"""The answers of /v1/messages: whole messages, and the events of a stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from coppice.frontend.api.answers import Answers, counts
from coppice.frontend.api.anthropic.errors import error_event
from coppice.frontend.api.kept_prefixes import Prefix
from coppice.frontend.chat.dialect import Reading
from coppice.frontend.chat.pieces import (
    CallArguments,
    CallBegins,
    Piece,
    ReasoningPiece,
    TextPiece,
)
from coppice.frontend.http.ids import fresh_id
from coppice.frontend.http.json_answers import in_parts
from coppice.frontend.text.outputs import CompletionOutput, RequestOutput, TextDelta

Json = dict[str, Any]

_STATUS = {"timeout_error": 504, "server_error": 500}
_HOUR = 3600.0


class MessageAnswers(Answers):
    """The answers to one request.

    Args:
        model: its name.
        prompt_tokens: of the prompt.
        most: tokens that the client asked for.
        reading: how the text is read; None: it is nothing but text.
        wanted: the beginnings of the prompt that are to be kept in the cache.
        keep: keeps them; returns those that it could keep.
    """

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        most: int,
        reading: Reading | None,
        wanted: Sequence[Prefix],
        keep: Callable[[], Awaitable[Sequence[Prefix]]],
    ) -> None:
        self._model = model
        self._prompt = prompt_tokens
        self._most = most
        self._reading = reading
        self._reader = None if reading is None else reading.reader()
        self._wanted = wanted
        self._keep = keep
        self._kept: Sequence[Prefix] = ()
        self._blocks: list[Json] = []
        self._open = False  # whether the last block is unfinished
        self._begun = False

    async def begin(self) -> None:
        if self._wanted:
            self._kept = await self._keep()

    async def finish(self) -> None:
        """Keeps what found no room while the request ran."""
        if set(self._kept) < set(self._wanted):
            self._kept = await self._keep()

    @property
    def frames_text(self) -> bool:
        return self._reader is None and self._open

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (made,) = outputs[0].outputs
        self._push(self._pieces(made.text, last=True))
        self._close()
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        size = counts(outputs)
        usage = self._usage(size.cached, size.by_tier) | self._generated(outputs)
        return self._message(usage) | {"content": self._blocks, **self._ending(made)}

    def opening(self) -> list[Json]:
        return []  # how much of the prompt was cached is known with the first token

    def delta(self, place: int, delta: TextDelta) -> list[Json]:
        events: list[Json] = []
        if not self._begun:
            self._begun = True
            usage = self._usage(delta.cached_tokens, delta.cached_by_tier)
            usage["output_tokens"] = 0
            events = [{"type": "message_start", "message": self._message(usage)}, {"type": "ping"}]
        pieces = self._pieces(delta.text, last=delta.completion is not None)
        return events + self._push(pieces)

    def ending(self, outputs: Sequence[RequestOutput]) -> list[Json]:
        (made,) = outputs[0].outputs
        size = counts(outputs)
        usage = self._usage(size.cached, size.by_tier) | self._generated(outputs)
        del usage["cache_creation"], usage["service_tier"]
        delta = {"type": "message_delta", "delta": self._ending(made), "usage": usage}
        return [*self._close(), delta, {"type": "message_stop"}]

    def failure(self, message: str, kind: str) -> list[Json]:
        return [error_event(message, _STATUS.get(kind, 500))]

    def encoded(self, event: Json, *, large: bool = False) -> bytes:
        data = (in_parts if large else to_json)(event)
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)

    def _pieces(self, text: str, *, last: bool) -> Sequence[Piece]:
        if self._reader is None:
            return [TextPiece(text)] if text else []
        return self._reader.push(text) + (self._reader.end() if last else [])

    def _push(self, pieces: Sequence[Piece]) -> list[Json]:
        """The events for the next pieces; their text is added to the blocks."""
        events: list[Json] = []
        for piece in pieces:
            if isinstance(piece, TextPiece):
                events += self._grow({"type": "text", "text": ""}, "text", "text_delta", piece.text)
            elif isinstance(piece, ReasoningPiece):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                events += self._grow(block, "thinking", "thinking_delta", piece.text)
            elif isinstance(piece, CallBegins):
                name = f"toolu_{fresh_id()[:24]}"
                events += self._start(
                    {"type": "tool_use", "id": name, "name": piece.name, "input": {}}
                )
                self._blocks[-1]["input"] = ""  # as text, until it is whole
            elif isinstance(piece, CallArguments):
                self._blocks[-1]["input"] += piece.text
                events.append(self._delta("input_json_delta", partial_json=piece.text))
        return events

    def _grow(self, block: Json, field: str, kind: str, text: str) -> list[Json]:
        """Adds text to the last block, or to a new one if that is of another type."""
        events = []
        if not (self._open and self._blocks[-1]["type"] == block["type"]):
            events = self._start(block)
        self._blocks[-1][field] += text
        return [*events, self._delta(kind, **{field: text})]

    def _start(self, block: Json) -> list[Json]:
        events = self._close()
        self._open = True
        self._blocks.append(block)
        place = len(self._blocks) - 1
        return [
            *events,
            {"type": "content_block_start", "index": place, "content_block": {**block}},
        ]

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, kind: str, **more: str) -> Json:
        place = len(self._blocks) - 1
        return {"type": "content_block_delta", "index": place, "delta": {"type": kind, **more}}

    def _message(self, usage: Json) -> Json:
        return {
            "id": f"msg_{fresh_id()}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _ending(self, made: CompletionOutput) -> Json:
        reason, stop = "end_turn", None
        if made.finish_reason == "length":
            full = len(made.token_ids) < self._most
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(made.stop_reason, str):
            reason, stop = "stop_sequence", made.stop_reason
        elif any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _generated(self, outputs: Sequence[RequestOutput]) -> Json:
        usage: Json = {"output_tokens": counts(outputs).generated}
        if self._reading is not None:
            thought = self._reading.reasoning_tokens(outputs)
            if thought is not None:
                usage["output_tokens_details"] = {"thinking_tokens": thought}
        return usage

    def _usage(self, read: int, by_tier: Mapping[str, int] | None) -> Json:
        """The prompt's tokens: `read` from the cache, computed and kept, and the rest.

        With tiers, those that were read also `by_tier`, in a field of our own.
        """
        kept = max((each.tokens for each in self._kept), default=0)
        hour = max((each.tokens for each in self._kept if each.seconds >= _HOUR), default=0)
        created, for_an_hour = max(0, kept - read), max(0, hour - read)
        usage = {
            "input_tokens": self._prompt - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created - for_an_hour,
                "ephemeral_1h_input_tokens": for_an_hour,
            },
            "service_tier": "standard",
        }
        if by_tier is not None:
            usage["cache_read_input_tokens_by_tier"] = dict(by_tier)
        return usage


def _object(text: str) -> Any:
    """A call's input, as far as the model wrote it."""
    try:
        found = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
