"""One end of a two-way pipe between processes, to which any thread may write without waiting."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
from queue import SimpleQueue
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Pipe(Protocol):
    """What a channel sends and receives messages by: a `Connection`, or a `MessageSocket`."""

    def fileno(self) -> int: ...
    def send_bytes(self, message: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...
    def poll(self, timeout: float, /) -> bool: ...
    def close(self) -> None: ...


class Channel:
    """Sends and receives picklable objects, in order.

    A thread of its own pickles and writes, so that neither a large object nor a slow reader at the
    other end delays the sender; what accumulates meanwhile is sent in one write.
    """

    def __init__(self, connection: Pipe) -> None:
        self._connection = connection
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._closing = object()
        self._writer = threading.Thread(target=self._write, name="coppice-writer", daemon=True)
        self._writer.start()

    def send(self, item: Any) -> None:
        """Queues an object, which is pickled later: do not change it any more."""
        self._outbox.put(item)

    def wait(self, timeout: float) -> bool:
        """Waits for at most `timeout` seconds; returns whether `receive` would return at once."""
        try:
            return self._connection.poll(timeout)
        except OSError:
            return True

    def receive(self) -> list[Any]:
        """Waits for objects from the other end. Raises EOFError once that end is closed."""
        try:
            received: list[Any] = pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise EOFError(str(error)) from error
        return received

    @property
    def waiting(self) -> int:
        """Objects that are queued to be written."""
        return self._outbox.qsize()

    def close(self) -> None:
        """Writes what is queued, as far as the other end still reads, and closes this end."""
        self._outbox.put(self._closing)
        self._writer.join(timeout=5.0)
        # A thread that waits in `receive` keeps the pipe open beyond `close`, at both ends.
        self.cut()
        self._connection.close()

    def cut(self) -> None:
        """Ends the pipe at once, at both ends; what is queued is lost. `close` is still due."""
        self._outbox.put(self._closing)
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as pipe,
        ):
            pipe.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while True:
            items = [self._outbox.get()]
            while not self._outbox.empty():
                items.append(self._outbox.get())
            last = any(item is self._closing for item in items)
            items = [item for item in items if item is not self._closing]
            try:
                if items:
                    self._connection.send_bytes(_pickled(items))
            except OSError:  # the other end is closed; `receive` here reports it
                return
            if last:
                return


def _pickled(items: list[Any]) -> bytes:
    """The items as bytes, without those that can't be pickled, for which others must not wait."""
    try:
        return pickle.dumps(items, pickle.HIGHEST_PROTOCOL)
    except Exception:
        good = []
        for item in items:
            try:
                pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
            except Exception:
                logger.exception("an object can't be sent to another process, and is left out")
            else:
                good.append(item)
        return pickle.dumps(good, pickle.HIGHEST_PROTOCOL)
