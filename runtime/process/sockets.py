"""Whole messages over TCP, between processes that know the same key."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import threading
from collections.abc import Callable

_LENGTH = struct.Struct("!Q")
_CHALLENGE = 32  # bytes
_HANDSHAKE_SECONDS = 10.0
_CHUNK = 1 << 20
# A machine that is gone answers nothing: seconds until its connections end.
_DEAD_SECONDS = 20


class MessageSocket:
    """A connected socket as a connection of a `Channel`: one thread may send, one receive."""

    def __init__(self, raw: socket.socket) -> None:
        self._socket = raw
        self._come = bytearray()  # what is not a whole message yet
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_SECONDS // 2)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_SECONDS // 4)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_SECONDS * 1000)

    def fileno(self) -> int:
        """Of the socket, to be waited for."""
        return self._socket.fileno()

    def send_bytes(self, message: bytes) -> None:
        """Sends a message, and waits until the system has taken it. Raises OSError."""
        length = _LENGTH.pack(len(message))
        if len(message) < _CHUNK:
            self._socket.sendall(length + message)  # in one packet, if it is small
        else:
            self._socket.sendall(length)
            self._socket.sendall(message)

    def poll(self, timeout: float) -> bool:
        """Waits for something to come, or the end, for at most `timeout` seconds."""
        return bool(self._come) or bool(select.select([self._socket], [], [], timeout)[0])

    def recv_bytes(self) -> bytes:
        """Waits for the next message. Raises EOFError at the end, OSError."""
        while (message := self._next()) is None:
            self._receive(0)
        return message

    def come(self) -> list[bytes]:
        """The messages that have come, without waiting. Raises EOFError at the end, OSError."""
        with contextlib.suppress(BlockingIOError):
            self._receive(socket.MSG_DONTWAIT)
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        """Closes the socket; a message that is half sent is lost."""
        self._socket.close()

    def _receive(self, flags: int) -> None:
        some = self._socket.recv(_CHUNK, flags)
        if not some:
            raise EOFError("the other end is closed")
        self._come += some

    def _next(self) -> bytes | None:
        begin = _LENGTH.size
        if len(self._come) < begin:
            return None
        end = begin + _LENGTH.unpack_from(self._come)[0]
        if len(self._come) < end:
            return None
        message = bytes(memoryview(self._come)[begin:end])
        del self._come[:end]
        return message


def connect(address: tuple[str, int], key: bytes, timeout: float = 10.0) -> MessageSocket:
    """Connects to a `Listener` with the same key. Raises OSError."""
    raw = socket.create_connection(address, timeout)
    try:
        challenge = _exactly(raw, _CHALLENGE)
        raw.sendall(_answer(key, challenge))
        if _exactly(raw, 1) != b"\1":
            raise ConnectionRefusedError(f"{address[0]}:{address[1]} refuses the key")
        raw.settimeout(None)
        return MessageSocket(raw)
    except BaseException:
        raw.close()
        raise


class Listener:
    """Takes connections of those that know a key, each in a thread of its own.

    Attributes:
        key: 32 random bytes, which never travel: who connects shows by a hash that it has them.
        port: at which it listens.
    """

    def __init__(self, host: str, accept: Callable[[MessageSocket], None]) -> None:
        """Listens at a free port of `host`; `accept` gets each connection. Raises OSError."""
        self.key = os.urandom(32)
        self._accept = accept
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._listen, name="coppice-listener", daemon=True).start()

    def close(self) -> None:
        """Takes no connections any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                raw, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(
                target=self._greet, args=(raw,), name="coppice-handshake", daemon=True
            ).start()

    def _greet(self, raw: socket.socket) -> None:
        raw.settimeout(_HANDSHAKE_SECONDS)
        try:
            challenge = os.urandom(_CHALLENGE)
            raw.sendall(challenge)
            right = hmac.compare_digest(_exactly(raw, _CHALLENGE), _answer(self.key, challenge))
            raw.sendall(b"\1" if right else b"\0")
            if not right:
                raise ConnectionRefusedError("a wrong key")
            raw.settimeout(None)
        except OSError:
            raw.close()
            return
        self._accept(MessageSocket(raw))


def _answer(key: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, challenge, hashlib.sha256)


def _exactly(raw: socket.socket, count: int) -> bytes:
    """So many bytes. Raises OSError, also if fewer come."""
    found = b""
    while len(found) < count:
        some = raw.recv(count - len(found))
        if not some:
            raise ConnectionResetError("the other end closed while it connected")
        found += some
    return found
