"""One answer that is sent in pieces, as server-sent events, to whoever reads it, however slowly."""

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

    What comes while the client keeps up is written by whoever brings it. Only the first piece and
    the end take a turn of the request's own task, and what comes while there is something unread.

    Args:
        request: of the client.
        shape: makes chunks of deltas.
        deltas: what the engine makes.
        asked, prepared: what the client asked for, and what the engine was given.
        too_late: makes the error that says that the time is over.
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
        self._chunked = False  # whether HTTP's chunks are around what is written
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    async def run(self, deadline: float | None) -> web.StreamResponse:
        """Sends all of it, by the `deadline` of the event loop's clock.

        Raises ConnectionError if the client is gone or has stopped reading.
        """
        await self._response.prepare(self._request)
        self._chunked = "chunked" in self._response.headers.get("Transfer-Encoding", "")
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
                        self._deltas.take_by(self._write)
            note.fields |= counts(usage(self._outputs))
            if self._asked.include_usage:
                self._add_event(self._shape.usage_chunk(self._outputs))
        except ConnectionError:
            raise
        except Exception as error:  # the status line is out; the stream itself must tell
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
        self._add(self._shape.chunks(place * self._asked.params.n + delta.index, delta))

    def _add(self, chunks: Iterable[dict[str, Any]]) -> None:
        for chunk in chunks:
            if self._asked.include_usage:
                chunk["usage"] = self._so_far.now() if self._asked.continuous_usage else None
            self._add_event(chunk)

    def _add_event(self, event: dict[str, Any]) -> None:
        self._unsent.append(b"data: %b\n\n" % to_json(event))

    def _write(self, place: int, delta: TextDelta) -> bool:
        """Sends a delta at once, if the client has read all before it; False: it did nothing."""
        transport = self._request.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        if delta.is_plain and (frame := self._frame(place * self._asked.params.n + delta.index)):
            data = to_json(delta.text).join(frame) if delta.text else b""
        else:
            self._add_delta(place, delta)
            data = self._taken()
        if data:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return True

    def _frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and behind the text of a choice's event; None: it is not always so.

        It says the same in every event with nothing but text, so it is made once.
        """
        try:
            return self._frames[index]
        except KeyError:
            frame = None
            mark = fresh_id()
            if self._shape.frames_text and not self._asked.continuous_usage:
                self._add(self._shape.chunks(index, TextDelta("", mark, (), None)))
                before, *after = self._taken().split(to_json(mark))
                frame = (before, after[0]) if len(after) == 1 else None
            self._frames[index] = frame
            return frame

    async def _send(self, *, last: bool = False) -> None:
        """Sends what is unsent, and the `last` of it with the end of the stream."""
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
    """What the log tells of a request's size."""
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }
