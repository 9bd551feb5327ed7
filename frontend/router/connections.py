"""All connections to replicas, for the one thread that reads from them."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque

from coppice.frontend.router.replica import Replica


class Connections:
    """Waits for what any replica sends. Other threads may only `add` and `wake`."""

    def __init__(self) -> None:
        self._joining: deque[Replica] = deque()  # to be read from now on
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)

    def add(self, replica: Replica) -> None:
        """Has a replica read from, once the thread is woken and asks who has `joined`."""
        self._joining.append(replica)

    def wake(self) -> None:
        """Ends `wait`."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def joined(self) -> Replica | None:
        """One that was added and has not been asked for yet; None: there is none."""
        return self._joining.popleft() if self._joining else None

    def watch(self, replica: Replica) -> None:
        """Has `wait` return for what it sends, too."""
        self._selector.register(replica, selectors.EVENT_READ, replica)

    def forget(self, replica: Replica) -> None:
        """Undoes `watch`, if that was called."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(replica)

    def wait(self, timeout: float | None) -> list[Replica]:
        """The replicas that have sent something, as soon as there is one; [] after `wake`."""
        found = []
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                found.append(key.data)
        return found

    def close(self) -> None:
        """Closes those that it watches, and itself."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()
