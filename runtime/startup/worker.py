"""A process of its own for work that may not end: lines of JSON go in, lines of JSON come out."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


class Worker:
    """Asks a script, one question at a time, from any thread.

    The script writes a line once it is ready, and then for each line that it reads one line, at
    once. Its process starts with the first question, and after each one that it did not answer.
    """

    def __init__(self, script: Path, argument: str = "", *, seconds: float) -> None:
        """`argument` is the script's; it may take `seconds` for an answer, without its start."""
        self.seconds = seconds
        self._script, self._argument = script, argument
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any) -> Any:
        """The answer. Raises TimeoutError if the process ends without one, or takes too long."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = self._start()
            answer = self._answer(process, line)
            if answer is None:
                self._end(process)
                raise TimeoutError(f"no answer within {self.seconds:g} s")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process; the next question starts another one."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _answer(self, process: subprocess.Popen[bytes], line: bytes) -> bytes | None:
        """The process's answer; None if it came to an end or gave none in time."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(self.seconds):
                return None
        return process.stdout.readline() or None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written is lost
                pipe.close()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # The script's own folder must not be on the path: it would hide modules of other names.
        code = f"import runpy; runpy.run_path({str(self._script)!r}, run_name='__main__')"
        process = subprocess.Popen(
            [sys.executable, "-c", code, self._argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
        return process
