"""Starts the engine, watches it, and starts another one when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Protocol

from coppice.runtime.process.channel import Channel
from coppice.runtime.process.messages import Leaving, Ready

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart; each doubles the last
STEADY_SECONDS = 60.0  # after an engine that ran this long, the next pause is the first again
NICE = 10  # niceness of the threads that give way: a tenth of the scheduler's weight
STOP_SECONDS = 10.0  # for the step that is running when the engine is to stop


class Launched(Protocol):
    """An engine at the other end of a channel, such as an `EngineProcess`."""

    @property
    def connection(self) -> Connection: ...
    def wait(self, timeout: float | None = None) -> str | None: ...
    def kill(self) -> None: ...


class EngineLifecycle(ABC):
    """Keeps an engine running; its methods run in one event loop, except those that name a thread.

    Args:
        launch: starts an engine; called again after each death.
        gives_way: whether this process leaves the processor to the engine's threads where both want
            it (Linux). A step waits for the last of its threads, so if one is displaced for a
            millisecond, all of them lose that.

    Attributes:
        ready: what the engine reported when its model was loaded; None before the first time.
        trouble: why no engine takes requests at present; None if one does.
        restarts: engines that were started after the first one.
    """

    def __init__(self, launch: Callable[[], Launched], *, gives_way: bool) -> None:
        self.ready: Ready | None = None
        self.trouble: str | None = "the engine has not been started"
        self.restarts = 0
        self._launch = launch
        self._gives_way = gives_way and sys.platform == "linux"
        # A process gets the priority of the thread that starts it, and a thread that of its parent.
        # So this thread is started before the others give way.
        self._launcher = ThreadPoolExecutor(1, "coppice-launcher")
        self._last_word: str | None = None  # why an engine is about to end
        self._stopping = False
        self._pause = FIRST_PAUSE
        self._engine: Launched | None = None
        self._channel: Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[Ready] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self.trouble is None

    async def start(self) -> Ready:
        """Starts the engine and waits until its model is loaded; in the event loop of all calls.

        Raises what the engine raises while loading; RuntimeError if its process dies meanwhile.
        """
        self._loop = asyncio.get_running_loop()
        self.trouble = "the engine is loading its model"
        return await self._start()

    async def stop(self) -> None:
        """Ends the engine after its current step; requests that still run fail with a message."""
        self._stopping = True
        self.trouble = "the server is stopping"
        if self._restarting is not None:
            self._restarting.cancel()
        if self._channel is not None:
            self._channel.send(None)
        if self._reader is not None and self._engine is not None:
            ended = await asyncio.to_thread(self._engine.wait, STOP_SECONDS)
            if ended is None:
                log.warning("the engine did not end within %s seconds: killed", STOP_SECONDS)
                self._engine.kill()
            await asyncio.to_thread(self._reader.join)
        self._launcher.shutdown(wait=False)
        self._fail_all("the engine was stopped")

    @abstractmethod
    def _read(self, channel: Channel) -> None:
        """Handles all that an engine sends until its channel ends; in a thread of its own."""

    @abstractmethod
    def _fail_all(self, reason: str) -> None:
        """Fails all that waits for an engine that has ended."""

    def _in_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Calls the function in the event loop, soon; from any thread."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    async def _start(self) -> Ready:
        assert self._loop is not None
        self._loaded = self._loop.create_future()
        self._engine = await self._loop.run_in_executor(self._launcher, self._launch)
        if self._gives_way:
            self._gives_way = False
            os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))
        self._channel = Channel(self._engine.connection)
        self._reader = threading.Thread(
            target=self._watch,
            args=(self._engine, self._channel),
            name="coppice-reader",
            daemon=True,
        )
        self._reader.start()
        self.ready = await self._loaded
        if not self._stopping:
            self.trouble = None
        return self.ready

    def _watch(self, engine: Launched, channel: Channel) -> None:
        """Reads what the engine sends, and reports its end; runs in a thread for each engine."""
        begun = time.monotonic()
        self._read(channel)
        reason = engine.wait()
        channel.close()
        self._in_loop(self._ended, reason, time.monotonic() - begun)

    def _take_state(self, item: Any) -> None:
        """Takes from the engine that its model is or cannot be loaded, or why it ends."""
        if isinstance(item, Leaving):
            self._last_word = item.reason
        elif self._loaded is not None and not self._loaded.done():
            if isinstance(item, Ready):
                self._loaded.set_result(item)
            else:
                self._loaded.set_exception(item)

    def _ended(self, reason: str, seconds: float) -> None:
        """Fails what waits for an engine that has ended, and starts another one."""
        self._channel = None
        if self._stopping:
            return
        last_word, self._last_word = self._last_word, None
        trouble = f"the engine died: {last_word or reason}"
        was_ready = self.trouble is None
        self.trouble = trouble
        self._fail_all(trouble)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(RuntimeError(trouble))
        elif was_ready:
            log.error("%s", trouble)
            if seconds >= STEADY_SECONDS:
                self._pause = FIRST_PAUSE
            self._restarting = asyncio.get_running_loop().create_task(self._restart(trouble))

    async def _restart(self, trouble: str) -> None:
        while True:
            self.trouble = f"{trouble}; it is started again in {self._pause:g} s"
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self.trouble = f"{trouble}; another is loading the model"
            self.restarts += 1
            try:
                await self._start()
            except Exception as error:
                trouble = f"the engine could not be started again: {error}"
                log.error("%s", trouble)
            else:
                log.warning("the engine runs again")
                return
