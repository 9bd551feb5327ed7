"""What replicas have been asked and have not answered."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from coppice.frontend.router.replica import Replica


class Calls:
    """Calls of replicas, each with what waits for its answer: a request, say. Not thread-safe."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Replica, object]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        """Calls that wait for an answer."""
        return len(self._calls)

    def send(
        self,
        replica: Replica,
        waits: object | None,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Sends a call to a replica; None waits for an answer that nobody wants."""
        number = next(self._numbers)
        if waits is not None:
            self._calls[number] = replica, waits
        replica.send((number, method, args, kwargs))

    def answered(self, number: int) -> tuple[Replica, object] | None:
        """Who has answered the call of that number, and what waited for it; None: nothing did."""
        return self._calls.pop(number, None)

    def drop(self, which: Callable[[Replica, object], bool]) -> list[tuple[Replica, object]]:
        """Waits no more for answers to those calls, which it returns in their order."""
        dropped = {number: each for number, each in self._calls.items() if which(*each)}
        for number in dropped:
            del self._calls[number]
        return list(dropped.values())
