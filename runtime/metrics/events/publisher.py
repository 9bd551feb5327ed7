"""Has a process of its own publish what a tree stores and removes, and how busy its engine is.

Hashes, messages and sockets are that process's. Here a thread writes the tree's log into a pipe,
most of which needs no lock of Python's. What the process does not take in time waits, within
bounds: then the log begins anew with all that the tree holds.
"""

from __future__ import annotations

import fcntl
import logging
import marshal
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from coppice.radix.mirror.records import Records, begin_anew
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.metrics.events.options import Published
from coppice.runtime.metrics.events.process import LENGTH_BYTES

logger = logging.getLogger(__name__)

_WAITING = 10_000  # batches
# Seconds between two looks for changes; longer the longer there are none. To be woken would cost
# the engine's thread a system call a step, more than all that the log costs.
_PAUSE, _LONGEST_PAUSE = 0.01, 0.05
_PIPE_BYTES = 1 << 20
_START_SECONDS, _END_SECONDS = 60.0, 5.0
# Seconds before a process that has ended is started again, if it did not live long; each time more.
_SHORT_LIFE, _FIRST_DELAY, _LONGEST_DELAY = 30.0, 0.5, 30.0


class Publisher:
    """The engine's end of the process that publishes its events.

    A process that ends by itself is started again. Its messages have numbers from 0 on and another
    instance; `broken` asks for all that the tree holds then.

    Attributes:
        asks: whether what was put is on its way, and more is wanted.
        broken: whether all that the tree holds is to be put.
        when_broken: is called, in another thread, when it becomes so.
    """

    def __init__(
        self, published: Published, when_broken: Callable[[], None] = lambda: None
    ) -> None:
        """Starts the process. Raises ValueError, naming the option, if it can't bind an address."""
        self.asks, self.broken = True, False
        self.when_broken = when_broken
        self._published = published
        self._queue: deque[tuple[Records, Load | None]] = deque()
        self._closing = threading.Event()
        self._process, self._pipe = self._start()
        self._started, self._delay = time.monotonic(), 0.0
        self._down = False  # there is no process now
        self._anew = False  # what comes is void until a batch begins with an empty tree
        self._thread = threading.Thread(target=self._run, name="coppice-kv-events", daemon=True)
        self._thread.start()

    @property
    def process_id(self) -> int:
        """Of the process that publishes."""
        return self._process.pid

    @property
    def waiting(self) -> int:
        """How many calls of `put` have not been handed to the process yet."""
        return len(self._queue)

    @property
    def behind(self) -> bool:
        """Whether so much waits to be sent that more should be kept back."""
        return self._down or self.waiting > _WAITING

    def put(self, records: Records, load: Load | None) -> None:
        """Has the records of a `TreeLog`, in order, and a load sent; from the engine's thread."""
        self.asks = False
        self._queue.append((records, load))
        if self.broken and begin_anew(records):
            self.broken = False

    def close(self) -> None:
        """Sends what waits, and ends the process, which frees the addresses."""
        self._closing.set()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():  # the process takes nothing
            self._process.kill()
            self._thread.join()
        self._end()

    # -- the process -----------------------------------------------------------------------------

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        """A process that has bound its addresses, and the pipe to it."""
        theirs, ours = os.pipe()
        heard, told = os.pipe()
        with suppress(AttributeError, OSError):  # Linux has it, up to the system's limit
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        options = marshal.dumps(tuple(self._published)).hex()
        code = (
            "from coppice.runtime.metrics.events.process import main; "
            f"main({theirs}, {told}, {os.getpid()}, {options!r})"
        )
        try:
            process = subprocess.Popen(
                # Without the current folder on the path, whose folders may hide packages.
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs, told),
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it computes nothing
            )
        except BaseException:
            for each in (theirs, ours, heard, told):
                os.close(each)
            raise
        os.close(theirs)
        os.close(told)
        reason = self._reason(process, heard)
        os.close(heard)
        if reason:
            os.close(ours)
            process.kill()
            process.wait()
            raise ValueError(reason)
        return process, ours

    @staticmethod
    def _reason(process: subprocess.Popen[bytes], heard: int) -> str:
        """Why the process can't publish; empty: it can."""
        said, deadline = b"", time.monotonic() + _START_SECONDS
        while select.select([heard], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(heard, 1 << 16)
            said += part
            if not part:
                break
        if said:
            return said.decode()[1:]
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(1.0)
            return f"kv_events_endpoint: the process that publishes ended with status {code}"
        return f"kv_events_endpoint: the process that publishes took over {_START_SECONDS:.0f} s"

    def _end(self) -> None:
        """Ends the process, after it has sent what it was given."""
        os.close(self._pipe)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        pause, ending = _PAUSE, False
        while not ending:
            ending = self._closing.wait(pause)  # then what has come before is still sent
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                while self._queue:
                    pause = _PAUSE
                    self._send(*self._queue[0])
                    self._queue.popleft()
                self.asks = True
                if self._process.poll() is not None:
                    raise BrokenPipeError("it has ended")
            except Exception as error:
                if not isinstance(error, BrokenPipeError):
                    logger.exception("events of the cache can't be handed over")
                if not ending:
                    self._start_again()

    def _send(self, records: Records, load: Load | None) -> None:
        if self._anew and not begin_anew(records):
            return  # they follow what was lost
        self._anew = False
        # Version 2 spares the search for objects that come twice.
        batch = records, None if load is None else tuple(load)
        frame = marshal.dumps(batch, 2)
        length = len(frame).to_bytes(LENGTH_BYTES, "little")
        sent = os.writev(self._pipe, (length, frame))
        if sent < LENGTH_BYTES + len(frame):
            rest = memoryview(length + frame)[sent:]
            while rest:
                rest = rest[os.write(self._pipe, rest) :]

    def _start_again(self) -> None:
        """Starts another process after the end of this one, however often that takes."""
        self._down = self._anew = True
        self.asks = False
        self._process.kill()
        code = self._process.wait()
        logger.error("the process that publishes events ended with status %d; another starts", code)
        os.close(self._pipe)
        if time.monotonic() - self._started > _SHORT_LIFE:
            self._delay = 0.0
        while not self._closing.wait(self._delay):
            self._delay = min(max(2 * self._delay, _FIRST_DELAY), _LONGEST_DELAY)
            try:
                self._process, self._pipe = self._start()
            except Exception as error:
                logger.warning("events of the cache are not published: %s", error)
                continue
            self._started = time.monotonic()
            self.asks = self.broken = True
            self._down = False
            self.when_broken()
            return
        self._pipe = os.open(os.devnull, os.O_WRONLY)  # `_end` closes it
