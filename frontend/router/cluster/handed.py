"""A listening socket that outlives the process which accepts from it.

The process that holds it gives it to any ingress that asks, through a Unix socket. So connections
that come while one ingress has ended and the next is not there yet wait, instead of being refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading

_SECONDS = 5.0


class Holder:
    """Holds a listening socket, and gives it away, until it is closed.

    Attributes:
        name: of the abstract Unix socket (Linux) where `take` gets it; only this user's processes
            do.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.name = f"\0coppice-{secrets.token_hex(8)}"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(self.name)
        self._door.listen()
        threading.Thread(target=self._serve, name="coppice-holder", daemon=True).start()

    def close(self) -> None:
        """Gives it away no more, and closes it."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._door.accept()
            except OSError:
                return
            with asking, contextlib.suppress(OSError):
                asking.settimeout(_SECONDS)
                if _user_of(asking) == os.getuid():
                    socket.send_fds(asking, [b"\1"], [self._listener.fileno()])


def take(name: str) -> socket.socket | None:
    """The socket that a `Holder` of this machine holds; None if there is none."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_SECONDS)
            asking.connect(name)
            _, found, _, _ = socket.recv_fds(asking, 1, 1)
    except OSError:
        return None
    return socket.socket(fileno=found[0]) if found else None


def _user_of(peer: socket.socket) -> int:
    """The user whose process is at the other end (Linux)."""
    pid_uid_gid = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(pid_uid_gid[4:8], "little")
