"""Writing the JSON of answers, so that a large one does not delay other requests.

What makes an answer, and what encodes it, hold the event loop for a microsecond or so a value: for
seconds where an answer has millions of logprobs, numbers of vectors or token ids. So a large answer
is made and encoded in another thread. An encoder also holds the interpreter's lock from beginning
to end, in any thread, so there it encodes one part after another, and others run between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from pydantic_core import to_json

Result = TypeVar("Result")

LARGE_VALUES = 2**13
"""JSON values from which an answer is written in another thread. About 10 ms of work."""

CHARACTERS = 64  # of a text that take as long as a value
_PART = 2**13  # most values that are encoded at once; less than 2 ms
_SHORT = {int, float, bool, type(None)}  # whose JSON is short
_THREADS = 2  # one very large answer delays no other; more would only share one lock


class JsonAnswers:
    """Writes answers for one server."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "coppice-answers")

    async def write(self, make: Callable[[], Any], values: int) -> web.Response:
        """An answer with what `make` returns, in which there are at most about `values` values.

        `make` runs in another thread if these are many. Raises what it raises.
        """
        if values < LARGE_VALUES:
            return web.json_response(make())
        body = await self.run(lambda: in_parts(make()))
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def run(self, function: Callable[[], Result]) -> Result:
        """What the function returns in another thread.

        It has ended, or will never begin, when this ends, by cancellation too.
        """
        work = self._threads.submit(function)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if not work.cancelled():
                await asyncio.wait([asyncio.wrap_future(work)])
            raise

    def close(self) -> None:
        """Drops the answers that still wait to be written."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def in_parts(value: Any) -> bytes:
    """The JSON of a value, encoded in parts between which other threads run."""
    return b"".join(_parts(value))


def _parts(value: Any) -> Iterator[bytes]:
    """The JSON of a value in parts of at most `_PART` values each."""
    if isinstance(value, str):
        step = _PART * CHARACTERS
        yield b'"'
        for at in range(0, len(value), step):
            yield to_json(value[at : at + step])[1:-1]
        yield b'"'
    elif isinstance(value, dict):
        yield b"{"
        yield from _members(list(value.items()), named=True)
        yield b"}"
    elif isinstance(value, list | tuple):
        yield b"["
        yield from _members(value, named=False)
        yield b"]"
    else:
        yield to_json(value)


def _members(members: list[Any] | tuple[Any, ...], *, named: bool) -> Iterator[bytes]:
    """The JSON between the brackets of an array, or with names of an object, in parts."""
    at, step = 0, _PART
    while at < len(members):
        some = members[at : at + step]
        values = _count([each for _, each in some] if named else some)
        if values > _PART and len(some) > 1:
            step = len(some) // 2
            continue
        if at:
            yield b","
        if values <= _PART:
            yield to_json(dict(some) if named else some)[1:-1]
        else:
            if named:
                yield to_json(some[0][0]) + b":"
            yield from _parts(some[0][1] if named else some[0])
        at += len(some)
        if 4 * values <= _PART:  # so that twice as many are sure not to be counted in vain
            step = min(2 * step, _PART)


def _count(members: list[Any] | tuple[Any, ...]) -> int:
    """The values in an array, long texts as several; more than `_PART` stand for any number."""
    count, left = 0, [members]
    while left:
        some = left.pop()
        count += len(some)
        if count > _PART:
            break
        kinds = set(map(type, some))
        if kinds <= _SHORT:
            continue
        for each in some:
            if isinstance(each, str):
                count += len(each) // CHARACTERS
            elif isinstance(each, dict):
                left.append(tuple(each.values()))
            elif isinstance(each, list | tuple):
                left.append(each)
    return count
