"""The two ends that an `EngineClient` holds of a hub, where it would hold those of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Outputs:
    """The client's end of calls and outputs."""

    def __init__(self, take: Callable[[Any], None], kill: Callable[[], None]) -> None:
        """`take` gets each message of the client, `kill` is called when it closes this end."""
        self._take, self._kill = take, kill
        self._items: list[Any] = []
        self._ended = False
        self._come = threading.Condition()

    def put(self, item: Any) -> None:
        """Gives the client an item; from any thread."""
        with self._come:
            self._items.append(item)
            self._come.notify()

    def end(self) -> None:
        """Nothing comes any more."""
        with self._come:
            self._ended = True
            self._come.notify()

    def send(self, item: Any) -> None:
        self._take(item)

    def wait(self, timeout: float) -> bool:
        with self._come:
            return bool(self._come.wait_for(lambda: self._items or self._ended, timeout))

    def receive(self) -> list[Any]:
        with self._come:
            self._come.wait_for(lambda: self._items or self._ended)
            found, self._items = self._items, []
        if not found:
            raise EOFError("it was closed")
        return found

    def close(self) -> None:
        self._kill()


class Answers:
    """The client's end of answers."""

    def __init__(self) -> None:
        self._answers: SimpleQueue[Any] = SimpleQueue()

    def answer(self, number: int | None, failed: bool, result: Any) -> None:
        """Answers a call of the client, unless nobody waits for that; from any thread."""
        if number is not None:
            self._answers.put((number, failed, result))

    def put(self, item: Any) -> None:
        """Gives the client something else than an answer; None: nothing comes any more."""
        self._answers.put(item)

    def send(self, item: Any) -> None:
        raise ValueError("item: nothing is sent to where answers come from")

    def wait(self, timeout: float) -> bool:
        return not self._answers.empty()

    def receive(self) -> list[Any]:
        item = self._answers.get()
        if item is None:
            raise EOFError("it was closed")
        return [item]

    def close(self) -> None:
        pass
