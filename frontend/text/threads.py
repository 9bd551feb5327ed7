"""Threads for the tokenizer, so that long work delays neither the event loop nor short work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class TokenizerThreads:
    """One thread for texts that take milliseconds, and one for those that may take seconds.

    Attributes:
        long: the second one.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "coppice-tokenizer")
        self.long = ThreadPoolExecutor(1, "coppice-tokenizer-long")

    async def run(self, function: Callable[..., Result], *args: Any, long: bool = False) -> Result:
        """The function's result. Raises what it raises."""
        threads = self.long if long else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, function, *args)

    def close(self) -> None:
        """Drops what has not begun, and waits for nothing."""
        for threads in (self._short, self.long):
            threads.shutdown(wait=False, cancel_futures=True)
