"""What the engine makes of the prompts of one HTTP request, as it comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from coppice.frontend.outputs import RequestOutput
from coppice.frontend.texts import TextDelta


class RequestFailed(RuntimeError):
    """A request ended because a step failed."""


class EngineStopped(RequestFailed):
    """The engine takes no requests at present, or ended before this one did."""


class Deltas(AsyncIterator[tuple[int, TextDelta]]):
    """Deltas of several requests, each with the place of its prompt, for `async with`.

    Leaving the `async with` before the end, cancellation included, aborts what still runs and gives
    its pages back. What comes faster than it is taken is joined, so that a slow reader gets larger
    pieces and not a growing backlog of small ones.
    """

    def __init__(self, names: Sequence[str], abandon: Callable[[str], None]) -> None:
        """`names` are the engine's, in the order of the prompts; `abandon` ends one of them."""
        self._places = {name: place for place, name in enumerate(names)}
        self._running = set(names)
        self._abandon = abandon
        self._arrived: dict[tuple[str, int], TextDelta] = {}  # in the order of arrival
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._taken: deque[TextDelta] = deque()

    async def __aenter__(self) -> Deltas:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what still runs."""
        for name in self._running:
            self._abandon(name)
        self._running.clear()

    def put(self, item: TextDelta | RequestFailed) -> None:
        """Takes what the engine made; in the event loop's thread."""
        if isinstance(item, RequestFailed):
            self._failure = item
        else:
            key = (item.request_id, item.index)
            before = self._arrived.get(key)
            self._arrived[key] = item if before is None else _joined(before, item)
        self._news.set()

    async def __anext__(self) -> tuple[int, TextDelta]:
        while not self._taken:
            if self._arrived:
                self._taken.extend(self._arrived.values())
                self._arrived.clear()
                break
            if self._failure is not None:
                raise self._failure
            if not self._running:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        delta = self._taken.popleft()
        if delta.output is not None:
            self._running.discard(delta.request_id)
            self._abandon(delta.request_id)  # it has ended: this only forgets it
            for completion in delta.output.outputs:
                if completion.finish_reason == "error":
                    raise RequestFailed(str(completion.stop_reason))
        return self._places[delta.request_id], delta

    async def outputs(self) -> list[RequestOutput]:
        """The whole results, in the order of the prompts. Raises RequestFailed."""
        found: dict[int, RequestOutput] = {}
        async for place, delta in self:
            if delta.output is not None:
                found[place] = delta.output
        return [found[place] for place in sorted(found)]


def _joined(first: TextDelta, second: TextDelta) -> TextDelta:
    """Two deltas of one continuation, the second right behind the first."""
    return replace(
        second,
        text=first.text + second.text,
        new_token_ids=first.new_token_ids + second.new_token_ids,
        logprobs=first.logprobs + second.logprobs,
        text_offsets=first.text_offsets + second.text_offsets,
        best_so_far=second.best_so_far or first.best_so_far,
    )
