"""Reading the JSON bodies of requests, so that a large one does not delay other requests.

A parser holds the interpreter's lock from beginning to end, in any thread. So a large body is read
in another thread, by the faster parser, and only if it has no more values than that parser reads in
0.1 s: streams must not stop meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic_core import from_json

from coppice.frontend.errors import BadRequest
from coppice.frontend.text.characters import check_characters

Checked = TypeVar("Checked")

LARGE_BYTES = 64 * 2**10  # from here on a body is read in another thread
MOST_VALUES = (
    2**19
)  # in a body, for example 256 prompts of 2,048 token ids; read in less than 0.1 s
_SLICE = 2**18  # bytes between two chances for other threads to run


class JsonBodies:
    """Reads bodies for one server.

    Args:
        longest: returns the most tokens that a prompt may have; each may be a value.
        timeout: seconds that a body may take to arrive.
    """

    def __init__(self, longest: Callable[[], int], timeout: float = 60.0) -> None:
        self._longest = longest
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1, "coppice-bodies")

    async def read(
        self,
        request: web.Request,
        check: Callable[[Any], Checked],
        is_long: Callable[[Any], bool] | None = None,
    ) -> tuple[Any, Checked]:
        """The body, and what `check` returns for it; in another thread if the body is large.

        `is_long`, if given, says of the value of a small one whether checking it takes long.

        Raises BadRequest if it is not JSON, has too many values or does not arrive in time, and
        what `check` raises.
        """
        raw = await self._arrived(request)
        loop = asyncio.get_running_loop()
        if len(raw) < LARGE_BYTES:
            body = _parsed(_small, raw)
            if is_long is None or not is_long(body):
                return body, check(body)
            return body, await loop.run_in_executor(self._thread, check, body)
        most = max(MOST_VALUES, 2 * self._longest())
        return await loop.run_in_executor(self._thread, _large, raw, check, most)

    async def _arrived(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                return await request.read()
        except TimeoutError:
            raise BadRequest(
                f"the body did not arrive within {self._timeout:g} s (body_timeout)", status=408
            ) from None
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise BadRequest(f"the body can't be read: {error}") from error

    def close(self) -> None:
        """Drops the large bodies that still wait to be read."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _large(raw: bytes, check: Callable[[Any], Checked], most: int) -> tuple[Any, Checked]:
    commas = sum(raw.count(b",", start, start + _SLICE) for start in range(0, len(raw), _SLICE))
    if commas >= most:  # some may be part of texts
        commas = _commas_outside_strings(raw)
    if commas >= most:
        raise BadRequest(f"the body must have at most {most:,} JSON values, got {commas + 1:,}")
    body = _parsed(_fast, raw)
    return body, check(body)


def _commas_outside_strings(raw: bytes) -> int:
    """Commas between values, if `raw` is JSON. Each byte is read a fixed number of times."""
    commas, inside, cut = 0, 0, b""  # inside: 1 after the beginning of a string, else 0
    for start in range(0, len(raw), _SLICE):
        piece = cut + raw[start : start + _SLICE]
        odd = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        piece, cut = (piece[:-1], b"\\") if odd else (piece, b"")  # an escape stays whole
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        commas += b"".join(parts[inside::2]).count(b",")
        inside = (inside + len(parts) - 1) % 2
    return commas


def _small(raw: bytes) -> Any:
    try:
        return from_json(raw)
    except ValueError:  # the other parser accepts more, and has better error messages
        return _checked_text(json.loads(raw))


def _fast(raw: bytes) -> Any:
    try:
        return from_json(raw)
    except ValueError as error:
        if "hex escape" not in str(error):
            raise
        # Half of a surrogate pair: the other parser accepts it, so that it can be named.
        return _checked_text(json.loads(raw))


def _checked_text(body: Any) -> Any:
    """The body. Raises BadRequest, which names the place, for half of a surrogate pair."""
    left = [("", body)]
    while left:
        where, value = left.pop()
        if isinstance(value, dict):
            for name, each in reversed(value.items()):
                left.append((f"{where}.{name}" if where else name, each))
                left.append((where or "a parameter's name", name))
        elif isinstance(value, list):
            left += [(f"{where}[{place}]", each) for place, each in enumerate(value)][::-1]
        elif isinstance(value, str):
            try:
                check_characters(where, value)
            except ValueError as error:
                raise BadRequest(str(error), param=where or None) from None
    return body


def _parsed(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:  # bad UTF-8 and huge integers included
        raise BadRequest(f"the body is not valid JSON: {error}") from error
