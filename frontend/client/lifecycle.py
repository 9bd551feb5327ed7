"""Starts the engine, watches it, and starts another one when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from coppice.frontend.client.watchdog import Watchdog
from coppice.frontend.errors import EngineStopped
from coppice.runtime.process.messages import PING, End, Leaving, Pulse, Ready

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart; each doubles the last
STEADY_SECONDS = 60.0  # after an engine that ran this long, the next pause is the first again
NICE = 10  # niceness of the threads that give way: a tenth of the scheduler's weight
STOP_SECONDS = 10.0  # for the step that is running when the engine is to stop, and its end
WRITING_SECONDS = 6.0  # to store what its cache has, where there are tiers, if nobody says how long


class Link(Protocol):
    """One end of a way to an engine, such as a `Channel`."""

    def send(self, item: Any, /) -> None: ...
    def wait(self, timeout: float, /) -> bool: ...
    def receive(self) -> list[Any]: ...
    def close(self) -> None: ...


class Launched(Protocol):
    """An engine at the other end of two links, such as an `EngineProcess`.

    `channels` is called once: the first link is of calls and outputs, the second of answers.
    """

    def channels(self) -> tuple[Link, Link]: ...
    def wait(self, timeout: float | None = None) -> str | None: ...
    def kill(self) -> None: ...


class EngineLifecycle(ABC):
    """Keeps an engine running; its methods run in one event loop, except those that name a thread.

    Args:
        launch: starts an engine; called again after each death.
        gives_way: whether this process leaves the processor to the engine's threads where both want
            it (Linux). A step waits for the last of its threads, so if one is displaced for a
            millisecond, all of them lose that.
        timeout: seconds after which an engine that does not answer, or whose step does not end, is
            killed and replaced; None: never, and it is not watched. An engine that loads its model
            may take any time, and its first step ten times as long.

    Attributes:
        ready: what the engine reported when its model was loaded; None before the first time.
    """

    def __init__(
        self, launch: Callable[[], Launched], *, gives_way: bool, timeout: float | None = None
    ) -> None:
        self.ready: Ready | None = None
        self._state: str | None = "the engine has not been started"  # None: it takes requests
        self._timeout = timeout
        self._watchdog: Watchdog | None = None
        self._watching: asyncio.Task[None] | None = None
        self._restarts = 0
        self._launch = launch
        self._gives_way = gives_way and sys.platform == "linux"
        # A process gets the priority of the thread that starts it, and a thread that of its parent.
        # So this thread is started before the others give way.
        self._launcher = ThreadPoolExecutor(1, "coppice-launcher")
        self._last_word: str | None = None  # why an engine is about to end
        self._stopping = False
        self._pause = FIRST_PAUSE
        self._engine: Launched | None = None
        self._channel: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[Ready] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._reader: threading.Thread | None = None

    @property
    def trouble(self) -> str | None:
        """Why no engine takes requests at present; None if one does."""
        if self._state is None and self._watchdog is not None:
            return self._watchdog.trouble
        return self._state

    @property
    def restarts(self) -> int:
        """Engines that were started after the first one."""
        return self._restarts

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self.trouble is None

    async def start(self) -> Ready:
        """Starts the engine and waits until its model is loaded; in the event loop of all calls.

        Raises what the engine raises while loading; EngineStopped if its process dies meanwhile.
        """
        self._loop = asyncio.get_running_loop()
        self._state = "the engine is loading its model"
        return await self._start()

    async def stop(self, writing: float = WRITING_SECONDS) -> None:
        """Ends the engine after its current step; requests that still run fail with a message.

        For up to `writing` seconds it stores in tiers what its cache has.
        """
        self._stopping = True
        self._state = "the server is stopping"
        for task in (self._restarting, self._watching):
            if task is not None:
                task.cancel()
        if self._channel is not None:
            self._channel.send(End(writing))
        if self._engine is not None and self._watchdog is not None and self._watchdog.silent:
            self._engine.kill()  # it would not take notice
        if self._reader is not None and self._engine is not None:
            patience = writing + STOP_SECONDS
            ended = await asyncio.to_thread(self._engine.wait, patience)
            if ended is None:
                log.warning("the engine did not end within %s seconds: killed", patience)
                self._engine.kill()
            await asyncio.to_thread(self._reader.join)
        self._launcher.shutdown(wait=False)
        self._fail_all("the engine was stopped")

    def hurry(self) -> None:
        """Ends at once an engine that `stop` waits for: it stores nothing more."""
        if self._stopping and self._engine is not None:
            self._engine.kill()

    @abstractmethod
    def _read(self, channel: Link) -> None:
        """Handles all that an engine sends until its channel ends; in a thread of its own."""

    @abstractmethod
    def _take_answer(self, number: int, failed: bool, result: Any) -> None:
        """Takes the answer of a call; in the event loop."""

    @abstractmethod
    def _fail_answers(self, reason: str) -> None:
        """Fails the calls that wait for an answer."""

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
        self._channel, answers = self._engine.channels()
        self._watchdog = None if self._timeout is None else Watchdog(self._timeout)
        self._reader = threading.Thread(
            target=self._watch,
            args=(self._engine, self._channel, answers, self._watchdog),
            name="coppice-reader",
            daemon=True,
        )
        self._reader.start()
        channel = self._channel
        self.ready = await self._loaded
        if self._channel is not channel and not self._stopping:
            raise EngineStopped("the engine died as soon as its model was loaded")
        if not self._stopping:
            self._state = None
            if self._watchdog is not None:
                watch = self._watch_over(self._engine, self._channel, self._watchdog)
                self._watching = self._loop.create_task(watch)
        return self.ready

    def _watch(
        self, engine: Launched, channel: Link, answers: Link, watchdog: Watchdog | None
    ) -> None:
        """Reads what the engine sends, and reports its end; runs in a thread for each engine."""
        begun = time.monotonic()
        thread = threading.Thread(
            target=self._read_answers, args=(answers, watchdog), name="coppice-answers", daemon=True
        )
        thread.start()
        self._read(channel)
        reason = engine.wait()
        thread.join()
        answers.close()
        channel.close()
        self._in_loop(self._ended, reason, time.monotonic() - begun)

    def _read_answers(self, answers: Link, watchdog: Watchdog | None) -> None:
        """Takes the answers of calls and pings; in a thread of its own, so that they need not wait
        until text was made of outputs that came before them."""
        with contextlib.suppress(EOFError):
            while True:
                for item in answers.receive():
                    if isinstance(item, Pulse):
                        if watchdog is not None:
                            watchdog.heard(item)
                    else:
                        self._in_loop(self._take_answer, *item)

    async def _watch_over(self, engine: Launched, channel: Link, watchdog: Watchdog) -> None:
        """Pings the engine; kills it, so that another is started, when it hangs for too long."""
        hung = False
        while self._channel is channel:
            if watchdog.answered:
                watchdog.answered = False
                channel.send(PING)
            await asyncio.sleep(watchdog.interval)
            watchdog.tick()
            trouble = watchdog.trouble
            if trouble is not None and not hung:
                log.error("%s", trouble)
            elif trouble is None and hung:
                log.warning("the engine works again")
            hung = trouble is not None
            if trouble is not None and watchdog.silent:
                self._fail_answers(trouble)
            if watchdog.hopeless:
                self._last_word = f"{trouble}, so it was killed"
                engine.kill()
                return

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
        self._watchdog = None
        if self._stopping:
            return
        last_word, self._last_word = self._last_word, None
        trouble = f"the engine died: {last_word or reason}"
        was_ready = self._state is None
        self._state = trouble
        self._fail_all(trouble)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(EngineStopped(trouble))
        elif was_ready:
            log.error("%s", trouble)
            if seconds >= STEADY_SECONDS:
                self._pause = FIRST_PAUSE
            self._restarting = asyncio.get_running_loop().create_task(self._restart(trouble))

    async def _gone(self) -> None:
        """Waits until the last engine has ended, and that was noted: it may have failed to load.

        Else its end would be taken for that of the next one.
        """
        assert self._engine is not None and self._reader is not None
        if await asyncio.to_thread(self._engine.wait, STOP_SECONDS) is None:
            self._engine.kill()
        await asyncio.to_thread(self._reader.join)

    async def _restart(self, trouble: str) -> None:
        while True:
            self._state = f"{trouble}; it is started again in {self._pause:g} s"
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            await self._gone()
            self._state = f"{trouble}; another is loading the model"
            self._restarts += 1
            try:
                await self._start()
            except Exception as error:
                trouble = f"the engine could not be started again: {error}"
                log.error("%s", trouble)
            else:
                log.warning("the engine runs again")
                return
