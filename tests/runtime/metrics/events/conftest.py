"""Addresses, and listeners to what an engine publishes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")


@pytest.fixture
def address() -> Callable[[], str]:
    """Makes an address that nobody uses."""

    def make() -> str:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{found.getsockname()[1]}"

    return make


class Listener:
    """Hears the messages of one topic; `most`: so many wait for it at most, but for 0."""

    def __init__(self, context: Any, endpoint: str, topic: bytes, most: int = 0) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.set_hwm(most)
        if most:
            self._socket.setsockopt(zmq.RCVBUF, 4096)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def next(self, seconds: float = 20) -> tuple[int, bytes]:
        """Number and content of the next message."""
        assert self._socket.poll(1000 * seconds), "no message came"
        _, number, payload = self._socket.recv_multipart()
        return int.from_bytes(number, "big"), payload

    def until_quiet(self, seconds: float = 0.4) -> list[tuple[int, bytes]]:
        """All messages until none comes for a while."""
        found = []
        while self._socket.poll(1000 * seconds):
            found.append(self.next())
        return found

    def up_to_now(
        self, context: Any, replay: str, *request: bytes, after: int = -1
    ) -> list[tuple[int, bytes]]:
        """The messages after that number, up to the last one that can be asked for.

        A busy machine may bring some late. Empty if it has not subscribed yet.
        """
        found = self.until_quiet()
        last = found[-1][0] if found else after
        if last >= 0:
            late = ask(context, replay, *request, (last + 1).to_bytes(8, "big"))
            found += [self.next() for _ in late]
        return found


def ask(context: Any, endpoint: str, *frames: bytes) -> list[tuple[int, bytes]]:
    """The messages that a request is answered with, without the end."""
    client = context.socket(zmq.REQ)
    client.connect(endpoint)
    client.send_multipart(frames)
    found = []
    while True:
        assert client.poll(20_000), "no answer"
        number, payload = client.recv_multipart()
        if number == (-1).to_bytes(8, "big", signed=True):
            client.close()
            return found
        found.append((int.from_bytes(number, "big"), payload))
        # A REQ socket takes one answer for a request; the others come to it as parts of the same.
        client.close()
        return [*found, *_rest(context, endpoint, frames, len(found))]


def _rest(
    context: Any, endpoint: str, frames: tuple[bytes, ...], known: int
) -> list[tuple[int, bytes]]:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", *frames])
    found = []
    end = time.monotonic() + 20
    while time.monotonic() < end:
        assert dealer.poll(20_000), "no answer"
        _, number, payload = dealer.recv_multipart()
        if number == (-1).to_bytes(8, "big", signed=True):
            dealer.close()
            return found[known:]
        found.append((int.from_bytes(number, "big"), payload))
    raise AssertionError("the answer did not end")


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)
