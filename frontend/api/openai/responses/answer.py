"""The answers of /v1/responses: whole responses, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from coppice.frontend.api.answers import Answers, counts
from coppice.frontend.api.openai.logprobs import Place, chat_logprobs
from coppice.frontend.api.openai.responses.body import ResponsesBody
from coppice.frontend.api.openai.responses.output import Output
from coppice.frontend.api.openai.responses.text_logprobs import TextLogprobs
from coppice.frontend.api.prepare import Prepared
from coppice.frontend.chat.pieces import Piece, TextPiece
from coppice.frontend.http.ids import fresh_id
from coppice.frontend.http.json_answers import CHARACTERS, in_parts
from coppice.frontend.text.outputs import RequestOutput, TextDelta
from coppice.frontend.text.tokens import TokenTexts

Json = dict[str, Any]

_REPEATS = 4  # events at the end of a stream that have the whole text and its logprobs
_REPEATED = 16  # values of a text that ends within a stream that take as long as one that is made


class ResponseAnswers(Answers):
    """The answers to one request."""

    def __init__(
        self,
        model: str,
        asked: ResponsesBody,
        prepared: Prepared,
        texts: TokenTexts,
        keep: Callable[[Json], None],
        *,
        caching: bool = True,
        body_bytes: int = 0,
    ) -> None:
        """`keep` is given the response once it has ended, in any thread.

        `caching`: whether there is a cache; `body_bytes`: of the client's body.
        """
        self._asked = asked
        self._texts = texts
        self._reading = prepared.reading
        reader = None if self._reading is None else self._reading.reader()
        self._reader = reader
        self._finds = None
        if reader is not None and prepared.params.logprobs is not None:
            self._finds = TextLogprobs(reader)
        self._keep = keep
        self._caching = caching
        self._output = Output()
        self._numbers = 0
        self._input_values = body_bytes // CHARACTERS
        self._values = 0  # of all deltas so far
        self._top = prepared.params.logprobs
        self._response = _begun(model, asked, prepared)

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (made,) = outputs[0].outputs
        self._push(made.text, made.logprobs or (), made.text_offsets or (), last=True)
        return self._ended(outputs)[0]

    def opening(self) -> list[Json]:
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self._response} for kind in kinds])

    def delta(self, place: int, delta: TextDelta) -> list[Json]:
        last = delta.completion is not None
        events = self._push(delta.text, delta.logprobs, delta.text_offsets, last=last)
        return self._numbered(events)

    def ending(self, outputs: Sequence[RequestOutput]) -> list[Json]:
        response, events = self._ended(outputs)
        events.append({"type": f"response.{response['status']}", "response": response})
        return self._numbered(events)

    def failure(self, message: str, kind: str) -> list[Json]:
        error = {"code": "server_error", "message": message}
        failed = self._response | {
            "status": "failed",
            "error": error,
            "output": self._output.items,
        }
        return self._numbered([{"type": "response.failed", "response": failed}])

    def values(self, outputs: Sequence[RequestOutput]) -> int:
        # All of it is written once more to be remembered, and so is the input.
        return 2 * super().values(outputs) + self._input_values

    def delta_values(self, delta: TextDelta) -> int:
        values = super().delta_values(delta)
        self._values += values
        # The text may end here, if others follow; then its logprobs are repeated. It is so seldom
        # that a text need not be very long before each delta is looked at in another thread.
        return values if self._finds is None else max(values, self._values // _REPEATED)

    def ending_values(self, outputs: Sequence[RequestOutput]) -> int:
        return _REPEATS * self.values(outputs)

    def encoded(self, event: Json, *, large: bool = False) -> bytes:
        data = (in_parts if large else to_json)(event)
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)

    def _push(
        self, text: str, logprobs: Sequence[Place], offsets: Sequence[int], *, last: bool
    ) -> list[Json]:
        """The events for the next piece of text."""
        if self._finds is not None:
            found = self._finds.push(text, logprobs, offsets, last=last)
            events = [self._output.push([piece], self._written(own)) for piece, own in found]
            return [event for some in events for event in some]
        pieces: list[Piece] = []
        if self._reader is not None:
            pieces = self._reader.push(text) + (self._reader.end() if last else [])
        elif text:
            pieces = [TextPiece(text)]
        return self._output.push(pieces, self._written(logprobs))

    def _written(self, logprobs: Sequence[Place]) -> list[Json]:
        if not logprobs:
            return []
        content = chat_logprobs(logprobs, self._top or 0, self._texts)["content"]
        return [_with_bytes(entry) for entry in content]

    def _ended(self, outputs: Sequence[RequestOutput]) -> tuple[Json, list[Json]]:
        """The whole response, and the events that end its last item."""
        (made,) = outputs[0].outputs
        cut = made.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        events = self._output.end(status)
        size = counts(outputs)
        response = self._response | {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": {
                "input_tokens": size.prompt,
                "input_tokens_details": {
                    **size.cached_details(),
                    "cache_write_tokens": size.prompt - size.cached if self._caching else 0,
                },
                "output_tokens": size.generated,
                "output_tokens_details": {"reasoning_tokens": self._thought(outputs)},
                "total_tokens": size.prompt + size.generated,
            },
        }
        self._keep(response)
        return response, events

    def _thought(self, outputs: Sequence[RequestOutput]) -> int:
        """The tokens of the reasoning, as far as they can be counted."""
        if self._reading is None:
            return 0
        return self._reading.reasoning_tokens(outputs) or 0

    def _numbered(self, events: Iterable[Json]) -> list[Json]:
        numbered = [
            event | {"sequence_number": self._numbers + i} for i, event in enumerate(events)
        ]
        self._numbers += len(numbered)
        return numbered


def _begun(model: str, asked: ResponsesBody, prepared: Prepared) -> Json:
    """The response before there is any output; it repeats what was asked."""
    text, reasoning = asked.text, asked.reasoning
    wanted = text.format if text is not None else None
    choice = asked.tool_choice or "auto"
    return {
        "id": f"resp_{fresh_id()}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": None,
        },
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.store,
        "temperature": prepared.params.temperature,
        "text": {
            "format": {"type": "text"}
            if wanted is None
            else wanted.model_dump(by_alias=True, exclude_none=True),
            "verbosity": "medium",
        },
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": bool(tool.strict),
            }
            for tool in asked.tools or ()
        ],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": prepared.params.top_p,
        "truncation": asked.truncation,
        "usage": None,
        "user": asked.user,
    }


def _with_bytes(entry: Json) -> Json:
    """A token's logprob with lists of bytes where none are known."""
    tops = [top | {"bytes": top["bytes"] or []} for top in entry["top_logprobs"]]
    return entry | {"bytes": entry["bytes"] or [], "top_logprobs": tops}
