"""Threads for the tokenizer, so that long work delays neither the event loop nor short work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

LONG_BYTES = 256 * 2**10
"""The size above which a text is long work: half a second or more."""

VERY_LONG_BYTES = 2 * 2**20
"""The size above which it is very long work: from seconds up to a minute."""


class TokenizerThreads:
    """A thread each for short, long and very long work.

    Work waits only for work of its own kind. A tokenizer can't be interrupted, and a text can't be
    cut for it: where tokens end depends on what follows. So a text of 32 MB holds its thread for a
    minute, and texts that take a second must have another one.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "coppice-tokenizer")
        self._long = ThreadPoolExecutor(1, "coppice-tokenizer-long")
        self._very_long = ThreadPoolExecutor(1, "coppice-tokenizer-very-long")

    async def run(
        self, function: Callable[..., Result], *args: Any, size: int = 0, long: bool = False
    ) -> Result:
        """The function's result. Raises what it raises.

        `size` is what it reads, in bytes of text; `long`: it may take seconds even if that is
        small.
        """
        if size > VERY_LONG_BYTES:
            threads = self._very_long
        else:
            threads = self._long if long or size > LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, function, *args)

    def close(self) -> None:
        """Drops what has not begun, and waits for nothing."""
        for threads in (self._short, self._long, self._very_long):
            threads.shutdown(wait=False, cancel_futures=True)
