"""Commands that run a cluster, and the processes that come from them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

COMMAND = "import sys; from coppice.frontend.commands import main; sys.exit(main.main())"
BIN = Path(sys.executable).parent  # of the commands of packages
_GONE_SECONDS = 30.0  # until the last process of a command that has ended is gone


class Family:
    """Processes that come from one command, by a mark in their environment.

    Attributes:
        environ: for the command.
    """

    def __init__(self) -> None:
        name, value = "COPPICE_TEST", str(uuid.uuid4())
        self._mark = f"{name}={value}".encode()
        self.environ: dict[str, str] = os.environ | {name: value}

    def pids(self, title: str = "") -> list[int]:
        """Its processes that run, of which the command line contains `title`."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(folder.name)
                marked = self._mark in (folder / "environ").read_bytes()
                if marked and title.encode() in (folder / "cmdline").read_bytes():
                    found.append(pid)
        return found

    @property
    def ingresses(self) -> list[int]:
        """The processes of ingresses."""
        return self.pids("ServeReplica:coppice:ingress")

    @property
    def replicas(self) -> list[int]:
        """The processes of the actors of replicas."""
        return self.pids("ServeReplica:coppice:replicas")

    @property
    def engines(self) -> list[int]:
        """The processes of the engines: children of the actors of replicas."""
        actors = self.replicas
        return [pid for pid in self.pids("multiprocessing-fork") if parent(pid) in actors]

    def check_gone(self) -> None:
        """Checks that nothing is left of a command that has ended; that may take a moment.

        What is left is killed, so that it is not in the way of other tests.
        """
        deadline = time.monotonic() + _GONE_SECONDS
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.2)
        titles = [(pid, title(pid)) for pid in left]
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        assert not left, titles


class Cluster(Family):
    """A command `coppice serve --replicas`, from when it takes requests."""

    def __init__(self, checkpoint: Path, *options: str) -> None:
        super().__init__()
        limits = ["--port", "0", "--kv-cache-tokens", "4096", "--max-num-seqs", "8"]
        limits += ["--drain-grace", "0", "--served-model-name", "tiny"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", checkpoint, *limits, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environ,
        )
        self.url, self.lines = "", list[str]()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("url "):
                self.url = line.split()[1]
            if line.startswith("report "):
                break
        assert self.url, "".join(self.lines)

    def stop(self) -> str:
        """Ends it in order, and checks that nothing is left; returns what it printed."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> str:
        """Waits for its end, once it was told to end; otherwise as `stop`."""
        left, _ = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, left
        self.check_gone()
        return "".join(self.lines) + left


def refused(*options: str, model: str | Path = "demo", **environ: str) -> str:
    """What `coppice serve` says to options that it refuses; checks that nothing is left of it."""
    family = Family()
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, "serve", model, "--port", "0", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**family.environ, **environ},
    )
    assert ran.returncode != 0
    family.check_gone()
    return ran.stderr + ran.stdout


def parent(pid: int) -> int:
    """The process that started it; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def title(pid: int) -> str:
    """Its command line, or as it has named itself; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
