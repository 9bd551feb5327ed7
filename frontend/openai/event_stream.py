"""One answer sent in pieces as they come, as server-sent events, to a client of any speed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from coppice.frontend.client.deltas import Deltas
from coppice.frontend.errors import RequestFailed, error_body
from coppice.frontend.http.ids import fresh_id
from coppice.frontend.http.middleware import NOTE
from coppice.frontend.openai.answers import Completion, UsageSoFar, usage
from coppice.frontend.openai.prepare import Prepared
from coppice.frontend.openai.requests import CompletionRequest
from coppice.frontend.text.outputs import RequestOutput, TextDelta

log = logging.getLogger(__name__)

STALLED_SECONDS = 120.0  # that a client may leave a full buffer unread


class EventStream:
    """The stream that answers one request.

    Args:
        request: the client's request, to whose connection the answer is written.
        shape: makes the API's chunks from deltas.
        deltas: the text that the engine generates for this request.
        asked, prepared: what the client asked for, and what the engine was given.
        too_late: makes the error for a request that has run out of time.
    """

    def __init__(
        self,
        request: web.Request,
        shape: Completion,
        deltas: Deltas,
        asked: CompletionRequest,
        prepared: Prepared,
        too_late: Callable[[], TimeoutError],
    ) -> None:
        self._request = request
        self._shape = shape
        self._deltas = deltas
        self._asked = asked
        self._choices = range(len(prepared.prompts) * asked.params.n)
        self._too_late = too_late
        self._so_far = UsageSoFar(ids for _, ids in prepared.prompts)
        self._outputs: list[RequestOutput] = []
        self._unsent: list[bytes] = []
        self._frames: dict[int, tuple[bytes, bytes] | None] = {}
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    async def run(self, deadline: float | None) -> web.StreamResponse:
        """Sends the whole answer, until the `deadline` on the event loop's clock at the latest.

        Raises ConnectionError if the client has disconnected or stopped reading.
        """
        await self._response.prepare(self._request)
        note = self._request[NOTE]
        try:
            async with asyncio.timeout_at(deadline):
                for index in self._choices:
                    self._add(self._shape.opening(index))
                await self._send()
                async for place, delta in self._deltas:
                    self._add_delta(place, delta)
                    if not self._deltas.ready:
                        await self._send()
            note.fields |= counts(usage(self._outputs))
            if self._asked.include_usage:
                self._add_event(self._shape.usage_chunk(self._outputs))
        except ConnectionError:
            raise
        except Exception as error:  # the status line is sent: only the stream can carry the error
            if isinstance(error, TimeoutError):
                body = error_body(str(self._too_late()), kind="timeout_error")
            else:
                if not isinstance(error, RequestFailed):
                    log.exception("%s failed", self._request.path)
                body = error_body(str(error), kind="server_error")
            note.fields["error"] = body["error"]["message"]
            self._add_event(body)
        self._unsent.append(b"data: [DONE]\n\n")
        await self._send(last=True)
        return self._response

    def _add_delta(self, place: int, delta: TextDelta) -> None:
        if self._asked.continuous_usage:
            self._so_far.add(place, delta)
        if delta.output is not None:
            self._outputs.append(delta.output)
        index = place * self._asked.params.n + delta.index
        if delta.is_plain and (frame := self._frame(index)):
            if delta.text:
                self._unsent.append(to_json(delta.text).join(frame))
        else:
            self._add(self._shape.chunks(index, delta))

    def _add(self, chunks: Iterable[dict[str, Any]]) -> None:
        for chunk in chunks:
            if self._asked.include_usage:
                chunk["usage"] = self._so_far.now() if self._asked.continuous_usage else None
            self._add_event(chunk)

    def _add_event(self, event: dict[str, Any]) -> None:
        self._unsent.append(b"data: %b\n\n" % to_json(event))

    def _frame(self, index: int) -> tuple[bytes, bytes] | None:
        """The bytes before and after the text in a choice's events; None if they may differ.

        Events that carry nothing but text differ in nothing else, so these bytes are made once.
        """
        try:
            return self._frames[index]
        except KeyError:
            frame = None
            mark = fresh_id()
            if self._shape.frames_text and not self._asked.continuous_usage:
                unsent, self._unsent = self._unsent, []
                self._add(self._shape.chunks(index, TextDelta("", mark, (), None)))
                before, *after = self._taken().split(to_json(mark))
                self._unsent = unsent
                frame = (before, after[0]) if len(after) == 1 else None
            self._frames[index] = frame
            return frame

    async def _send(self, *, last: bool = False) -> None:
        """Sends what is unsent; with `last` it also ends the stream."""
        if not (data := self._taken()):
            return
        write = self._response.write_eof if last else self._response.write
        transport = self._request.transport
        if transport is not None:
            low, _ = transport.get_write_buffer_limits()
            if transport.get_write_buffer_size() + len(data) <= low:  # nothing to wait for
                await write(data)
                return
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                await write(data)
        except TimeoutError:
            text = f"the client has read nothing for {STALLED_SECONDS:g} s"
            raise ConnectionError(text) from None

    def _taken(self) -> bytes:
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """The fields of a request's log line that give its size in tokens."""
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }
