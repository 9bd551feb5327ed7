"""One answer sent in pieces as they come, as server-sent events, to a client of any speed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from coppice.frontend.api.answers import Answers, counts
from coppice.frontend.client.deltas import Deltas
from coppice.frontend.errors import RequestFailed
from coppice.frontend.http.ids import fresh_id
from coppice.frontend.http.json_answers import LARGE_VALUES, JsonAnswers
from coppice.frontend.http.middleware import NOTE
from coppice.frontend.text.outputs import RequestOutput, TextDelta

log = logging.getLogger(__name__)

STALLED_SECONDS = 120.0  # that a client may leave a full buffer unread
_AT_ONCE = 2**18  # bytes of events that are encoded before others may run


class EventStream:
    """The stream that answers one request.

    Args:
        request: the client's request, to whose connection the answer is written.
        answers: writes the events, as the client's API has them.
        deltas: the text that the engine generates for this request.
        too_late: makes the error for a request that has run out of time.
        apart: makes and encodes large events outside the event loop.
    """

    def __init__(
        self,
        request: web.Request,
        answers: Answers,
        deltas: Deltas,
        too_late: Callable[[], TimeoutError],
        apart: JsonAnswers,
    ) -> None:
        self._request = request
        self._answers = answers
        self._deltas = deltas
        self._too_late = too_late
        self._apart = apart
        self._outputs: list[RequestOutput] = []
        self._unsent: list[bytes] = []
        self._frames: dict[tuple[int, int], tuple[bytes, bytes] | None] = {}
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
                await self._add_opening()
                await self._send()
                async for place, delta in self._deltas:
                    if delta.output is not None:
                        self._outputs.append(delta.output)
                    if not self._add_framed(place, delta):
                        events = partial(self._answers.delta, place, delta)
                        if self._answers.delta_values(delta) < LARGE_VALUES:
                            self._add(events())
                        else:
                            await self._add_large(events)
                    if not self._deltas.ready:
                        await self._send()
                await self._answers.finish()
            note.fields |= counts(self._outputs).for_log()
            events = partial(self._answers.ending, self._outputs)
            if self._answers.ending_values(self._outputs) < LARGE_VALUES:
                self._add(events())
            else:
                await self._add_large(events)
        except ConnectionError:
            raise
        except Exception as error:  # the status line is sent: only the stream can carry the error
            if isinstance(error, TimeoutError):
                message, kind = str(self._too_late()), "timeout_error"
            else:
                if not isinstance(error, RequestFailed):
                    log.exception("%s failed", self._request.path)
                message, kind = str(error), "server_error"
            note.fields["error"] = message
            self._deltas.close()  # a client that does not read must not keep the request running
            self._add(self._answers.failure(message, kind))
        self._unsent.append(self._answers.last)
        await self._send(last=True)
        return self._response

    async def _add_opening(self) -> None:
        """Adds the events before any text: with an echo, each of many may have all of a prompt."""
        added = 0
        for event in self._answers.opening():
            self._unsent.append(self._answers.encoded(event))
            added += len(self._unsent[-1])
            if added >= _AT_ONCE:
                added = 0
                await asyncio.sleep(0)

    def _add_framed(self, place: int, delta: TextDelta) -> bool:
        """Adds the event of a delta that is nothing but text; False if it needs a new event."""
        if not delta.is_plain or not (frame := self._frame(place, delta.index)):
            return False
        if delta.text:
            self._unsent.append(to_json(delta.text).join(frame))
        return True

    def _add(self, events: Iterable[dict[str, Any]]) -> None:
        self._unsent += map(self._answers.encoded, events)

    async def _add_large(self, make: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Adds events that are made and encoded outside the event loop."""

        def encoded() -> list[bytes]:
            return [self._answers.encoded(event, large=True) for event in make()]

        self._unsent += await self._apart.run(encoded)

    def _frame(self, place: int, choice: int) -> tuple[bytes, bytes] | None:
        """The bytes before and after the text in a choice's events; None if they may differ.

        Events that carry nothing but text differ in nothing else, so these bytes are made once.
        """
        key = (place, choice)
        try:
            return self._frames[key]
        except KeyError:
            if not self._answers.frames_text:
                return None
            mark = fresh_id()
            events = self._answers.delta(place, TextDelta("", mark, (), None, index=choice))
            before, *after = b"".join(map(self._answers.encoded, events)).split(to_json(mark))
            frame = self._frames[key] = (before, after[0]) if len(after) == 1 else None
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
            if transport is not None:
                transport.abort()  # closed in order, it would wait for what nobody reads
            text = f"the client has read nothing for {STALLED_SECONDS:g} s"
            raise ConnectionError(text) from None

    def _taken(self) -> bytes:
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data
