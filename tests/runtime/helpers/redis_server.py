"""A Redis or Valkey server for tests, on a port of this machine that was free."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
_SECONDS = 20


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class RedisServer:
    """Runs as long as it is not ended; `start` begins it again, empty, on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options, self.port = folder, options, free_port()
        self.socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        for _ in range(3):  # another program may have taken the port meanwhile
            with (self.folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [str(PROGRAM), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                     "--unixsocket", str(self.socket), "--dir", str(self.folder), *self.options],
                    stdout=log,
                    stderr=log,
                )  # fmt: skip
            if self._answers():
                return
            self.end()
            self.port = free_port()
        raise RuntimeError((self.folder / "log").read_text(errors="replace"))

    def _answers(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as found:
                    found.sendall(b"PING\r\n")
                    # With a password the answer is that one is needed.
                    if found.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                        return self._process.poll() is None
            except OSError:
                pass
            time.sleep(0.02)
        return False

    def pause(self) -> None:
        """It takes connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kills it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None
