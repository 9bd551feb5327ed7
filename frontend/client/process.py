"""The engine's process: starts it, waits for its end, kills it."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.util import Finalize
from typing import Any

from coppice.runtime.config import EngineConfig
from coppice.runtime.process.channel import Channel

# A fork would copy the locks of the threads that run here, in an unknown state.
_context = multiprocessing.get_context("spawn")


class EngineProcess:
    """A process that runs `engine_main`.

    Attributes:
        connection: this side's end of the pipe of calls and outputs.
        answers: of the pipe of the calls' answers.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        setup: Callable[[], None] | None = None,
        host: str | None = None,
        **more: Any,
    ) -> None:
        """Starts it; it sends `Ready` once the model is loaded.

        Args:
            config: of the engine.
            setup: called first in the new process, to configure its logs for example.
            host: the address at which others may call the engine, too (see `Ready.door`).
            more: further arguments of `Engine`. All arguments must be picklable.
        """
        self.connection, theirs = _context.Pipe()
        self.answers, their_answers = _context.Pipe()
        args = (config, setup, theirs, their_answers, more, host)
        self._process = _context.Process(
            target=_main, args=args, name="coppice-engine", daemon=True
        )
        self._reaping = threading.Lock()
        self._process.start()
        # Else Python would wait for it at its end: an engine takes no SIGTERM.
        Finalize(self, self._process.kill, exitpriority=1)
        for end in (theirs, their_answers):
            end.close()  # so that the pipe ends on this side when the process ends

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def channels(self) -> tuple[Channel, Channel]:
        """Channels of both pipes; call it once."""
        return Channel(self.connection), Channel(self.answers)

    def wait(self, timeout: float | None = None) -> str | None:
        """Waits for its end; returns why it ended, or None after `timeout` seconds."""
        if not wait_for([self._process.sentinel], timeout):
            return None
        with self._reaping:  # of two threads that join at once, one would get no exit code
            self._process.join()
        code = self._process.exitcode
        assert code is not None
        if code >= 0:
            return f"it ended with status {code}"
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"it was killed by {name}{hint}"

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()


def _main(
    config: EngineConfig,
    setup: Callable[[], None] | None,
    connection: Connection,
    answers: Connection,
    more: dict[str, Any],
    host: str | None,
) -> None:
    """What the engine's process runs."""
    # Imported here, so that the process that starts it does not load torch.
    from coppice.runtime.process.loop import engine_main

    if setup is not None:
        setup()
    engine_main(config, connection, answers, more, host)
