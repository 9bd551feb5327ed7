"""The engine in a thread of its own, with a face for asyncio.

The thread takes commands from a queue between steps, and hands each step's results to the event
loop in one call. Nothing else touches the engine.

    event loop   submit -> [commands] -> thread: add, step, step, ...
                 queue of each request <- [deltas of a step] <-'
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeVar

from coppice.frontend.text_engine import TextEngine
from coppice.frontend.texts import TextDelta
from coppice.runtime.beam_search import BeamSearchParams
from coppice.runtime.sampling_params import SamplingParams

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class RequestFailed(RuntimeError):
    """A request ended because a step failed."""


class EngineStopped(RequestFailed):
    """The engine takes no requests any more, or was stopped before this one ended."""


class EngineThread:
    """Runs a `TextEngine` and lets coroutines of one event loop use it.

    A step that raises fails the requests that were running, each with the error's message, and
    the thread goes on with the next ones.
    """

    def __init__(self, text_engine: TextEngine) -> None:
        self.text_engine = text_engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._names = count()
        self._queues: dict[str, asyncio.Queue[TextDelta | RequestFailed]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="coppice-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; call from the event loop that will use it."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its current step; requests that still run fail with a message."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._thread.is_alive() and not self._stopping

    @property
    def running(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._queues)

    async def submit(
        self,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        beam: BeamSearchParams | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> DeltaStream:
        """Queues a request; its deltas come from the stream, the last one with `output` set.

        Raises:
            ValueError: the engine refuses the request.
            EngineStopped: the engine is stopping; from the stream, RequestFailed if a step failed.
        """
        request_id = f"request-{next(self._names)}"
        queue: asyncio.Queue[TextDelta | RequestFailed] = asyncio.Queue()
        self._queues[request_id] = queue
        try:
            await self.call(
                lambda: self.text_engine.add(
                    request_id,
                    prompt,
                    prompt_token_ids,
                    params,
                    beam=beam,
                    cache_salt=cache_salt,
                    priority=priority,
                )
            )
        except BaseException:  # refused, or cancelled while the engine was busy with a step
            self._abandon(request_id)
            raise
        return DeltaStream(self, request_id, queue)

    async def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` in the engine's thread, between two steps.

        Raises:
            EngineStopped: the engine is stopping; besides, whatever the function raises.
        """
        future: Future[Result] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        with self._wake:
            if not self.alive:
                raise EngineStopped("the engine is not running")
            self._commands.append(run)
            self._wake.notify()
        return await asyncio.wrap_future(future)

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a public method of the engine by its name, between two steps.

        So the server reaches the engine wherever that runs: arguments and results are plain data
        that can be pickled.

        Raises:
            ValueError: the engine has no such public method.
            EngineStopped: the engine is stopping; besides, whatever the method raises.
        """
        engine = self.text_engine.engine
        function = None if method.startswith("_") else getattr(engine, method, None)
        if not callable(function):
            raise ValueError(f"method must be a public method of the engine, got {method!r}")
        return await self.call(lambda: function(*args, **kwargs))

    def _abandon(self, request_id: str) -> None:
        """Forgets a request that nobody waits for any more, and aborts it before the next step."""
        if self._queues.pop(request_id, None) is None:
            return
        with self._wake:
            self._commands.append(lambda: self._abort(request_id))
            self._wake.notify()

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self.text_engine.has_unfinished():
                    self._step()
        finally:
            with self._wake:
                self._stopping = True  # whatever ended the loop, nothing can be submitted now
            self._fail_all(EngineStopped, "the engine was stopped")

    def _step(self) -> None:
        try:
            deltas = self.text_engine.step()
        except Exception as error:
            log.exception("a step failed")
            message = f"a step of the engine failed: {type(error).__name__}: {error}"
            self._fail_all(RequestFailed, message)
        else:
            self._hand_over([(delta.request_id, delta) for delta in deltas])

    def _abort(self, request_id: str) -> None:
        try:
            self.text_engine.abort(request_id)
        except Exception:  # whoever else waits must not suffer from it
            log.exception("request %s could not be aborted", request_id)

    def _take_commands(self) -> bool:
        """Runs all commands, waiting for one if there is nothing to step; False: time to end."""
        with self._wake:
            while not (self._commands or self._stopping or self.text_engine.has_unfinished()):
                self._wake.wait()
            stopping = self._stopping
        while True:
            with self._wake:
                if not self._commands:
                    return not stopping
                command = self._commands.popleft()
            command()

    def _fail_all(self, failure: type[RequestFailed], message: str) -> None:
        failed: list[tuple[str, TextDelta | RequestFailed]] = []
        for request_id in self.text_engine.unfinished():
            self._abort(request_id)
            failed.append((request_id, failure(message)))
        self._hand_over(failed)

    def _hand_over(self, items: Sequence[tuple[str, TextDelta | RequestFailed]]) -> None:
        if items and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, items)

    # In the event loop again.

    def _deliver(self, items: Sequence[tuple[str, TextDelta | RequestFailed]]) -> None:
        for request_id, item in items:
            queue = self._queues.get(request_id)
            if queue is not None:  # somebody still waits for it
                queue.put_nowait(item)


class DeltaStream(AsyncIterator[TextDelta]):
    """The deltas of one request as they come, for `async with` and `async for`.

    Leaving the `async with` before the end, cancellation included, aborts the request and gives
    its pages back.
    """

    def __init__(
        self,
        owner: EngineThread,
        request_id: str,
        queue: asyncio.Queue[TextDelta | RequestFailed],
    ) -> None:
        self._owner = owner
        self._request_id = request_id
        self._queue = queue
        self._ended = False

    async def __aenter__(self) -> DeltaStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ended = True
        self._owner._abandon(self._request_id)

    async def __anext__(self) -> TextDelta:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, RequestFailed):
            self._end()
            raise item
        if item.output is not None:
            self._end()
            for completion in item.output.outputs:
                if completion.finish_reason == "error":
                    raise RequestFailed(str(completion.stop_reason))
        return item

    def _end(self) -> None:
        self._ended = True
        self._owner._queues.pop(self._request_id, None)
