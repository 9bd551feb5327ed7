"""The process that publishes an engine's events: reads records from a pipe, and owns the sockets.

It lives as long as its engine: it ends when the other end of the pipe is closed, after it has sent
what came before.
"""

from __future__ import annotations

import logging
import marshal
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from coppice.runtime.metrics.events.load import Load
from coppice.runtime.metrics.events.options import Published

#: Bytes before a frame: its length, little-endian.
LENGTH_BYTES = 8

_AT_ONCE = 4 << 20  # bytes that are read between two looks for requests
_LOOK = 1000  # milliseconds between two looks for the parent
# Lower than the engine's: whose threads wait for each other, and so for one that is kept waiting.
_NICENESS = 5


class Frames:
    """The frames that come by a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._read = bytearray()
        self.ended = False

    def take(self) -> Iterator[Any]:
        """What has come, as `marshal` reads it, until nothing is left or very much was read."""
        taken = 0
        while taken < _AT_ONCE and not self.ended:
            try:
                part = os.read(self._descriptor, 1 << 20)
            except BlockingIOError:
                return
            self.ended = not part
            self._read += part
            taken += len(part)
            yield from self._whole()

    def _whole(self) -> Iterator[Any]:
        begin = 0
        while len(self._read) - begin >= LENGTH_BYTES:
            first = begin + LENGTH_BYTES
            end = first + int.from_bytes(self._read[begin:first], "little")
            if end > len(self._read):
                break
            yield marshal.loads(self._read[first:end])
            begin = end
        del self._read[:begin]


def main(descriptor: int, status: int, parent: int, options: str) -> None:
    """The main function of the process.

    Args:
        descriptor: of a pipe that brings records and loads.
        status: of a pipe that takes one message, of why the sockets can't be bound, or nothing.
        parent: the engine's process.
        options: a `Published` as hexadecimal digits of `marshal`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # those of a whole group; its engine decides
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    published = Published(*marshal.loads(bytes.fromhex(options)))
    try:  # its libraries are needed by those alone who ask for events
        import zmq

        from coppice.runtime.metrics.events.broadcast import Broadcast

        broadcast = Broadcast(published)
    except ImportError as error:
        _refuse(
            status,
            f"kv_events_endpoint is {published.endpoint!r}; it needs the packages pyzmq and "
            f"msgspec: pip install 'coppice[events]' ({error})",
        )
        return
    except ValueError as error:
        _refuse(status, str(error))
        return
    _refuse(status, "")
    frames, poller = Frames(descriptor), zmq.Poller()
    poller.register(descriptor, zmq.POLLIN)
    if broadcast.requests is not None:
        poller.register(broadcast.requests, zmq.POLLIN)
    # A process that the engine has forked may keep the pipe open.
    while not frames.ended and os.getppid() == parent:
        poller.poll(_LOOK)
        for records, load in frames.take():
            broadcast.publish(records, None if load is None else Load(*load))
        broadcast.answer()  # with what has come before
    broadcast.close()


def _refuse(status: int, reason: str) -> None:
    """Tells the engine that the sockets are bound, or why they are not."""
    with suppress(BrokenPipeError):
        os.write(status, b"\n" + reason.encode())
    os.close(status)
