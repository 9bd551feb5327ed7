"""Several streams of deltas as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from coppice.frontend.engine_thread import DeltaStream, RequestFailed
from coppice.frontend.texts import TextDelta


class Merged(AsyncIterator[tuple[int, TextDelta]]):
    """The deltas of several streams as they come, each with the number of its stream."""

    def __init__(self, streams: Sequence[DeltaStream]) -> None:
        self._streams = streams
        self._queue: asyncio.Queue[tuple[int, TextDelta | Exception | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._open = len(streams)

    async def __aenter__(self) -> Merged:
        self._tasks = [
            asyncio.create_task(self._pump(index, stream))
            for index, stream in enumerate(self._streams)
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __anext__(self) -> tuple[int, TextDelta]:
        while self._open:
            index, item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return index, item
            self._open -= 1
        raise StopAsyncIteration

    async def _pump(self, index: int, stream: DeltaStream) -> None:
        try:
            async for delta in stream:
                self._queue.put_nowait((index, delta))
        except RequestFailed as error:
            self._queue.put_nowait((index, error))
        else:
            self._queue.put_nowait((index, None))
