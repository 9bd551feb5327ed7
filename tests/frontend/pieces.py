"""Streams whose texts must come in pieces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sized
from typing import TypeVar

T = TypeVar("T")

# The engine of a test is a thread beside its server. Where the machine gives the server no time for
# a while, all that was generated since goes into one piece, as it should; then the stream is asked
# for again.
TRIES = 10


def in_pieces(ask: Callable[[], T], pieces: Callable[[T], Sized], least: int = 2) -> T:
    """What `ask` returns, once `pieces` of it are at least `least`."""
    for _ in range(TRIES):
        answer = ask()
        if len(pieces(answer)) >= least:
            return answer
    raise AssertionError(f"{TRIES} streams came in fewer than {least} pieces, the last: {answer}")


async def in_pieces_async(
    ask: Callable[[], Awaitable[T]], pieces: Callable[[T], Sized], least: int = 2
) -> T:
    """The same of a coroutine."""
    for _ in range(TRIES):
        answer = await ask()
        if len(pieces(answer)) >= least:
            return answer
    raise AssertionError(f"{TRIES} streams came in fewer than {least} pieces, the last: {answer}")
