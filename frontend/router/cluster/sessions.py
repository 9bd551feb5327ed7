"""The sessions of an ingress, one with each replica: through them a hub gets its replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from functools import partial
from typing import Any

from coppice.frontend.router.cluster.settings import Kind
from coppice.frontend.router.hub import Hub

log = logging.getLogger(__name__)

_PAUSE = 0.5  # seconds before a session that has ended by itself is tried again
_KNOWN_SECONDS = 10.0  # for replicas that are there to say what they are


class Sessions:
    """Has replicas join, drain and leave a hub, as Serve tells who is there.

    While an update replaces all replicas there may be some of other settings, for which there is
    another ingress: these are left alone.

    Attributes:
        refused: replicas of these settings that are not like the others all the same, and why.
    """

    def __init__(self, hub: Hub, replicas: Any, kind: Kind) -> None:
        """`replicas`: Serve's handle of them; `kind`: that of the ingress's settings.

        Must be called in the event loop of the ingress.
        """
        self._hub, self._replicas, self._kind = hub, replicas, kind
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._names: frozenset[str] = frozenset()  # replicas that Serve has told of
        self._others: set[str] = set()  # those of other settings
        self.refused: dict[str, ValueError] = {}

    def told(self, names: frozenset[str]) -> None:
        """Takes the names of all replicas that are there; from any thread."""
        self._loop.call_soon_threadsafe(self.attend_to, names)

    def attend_to(self, names: frozenset[str]) -> None:
        """Begins and ends sessions, so that there is one with each of these replicas."""
        self._names = names
        self._others &= names
        self.refused = {name: why for name, why in self.refused.items() if name in names}
        for name in names - self._running.keys() - self._others:
            session = self._loop.create_task(self._session(name))
            self._running[name] = session
            session.add_done_callback(partial(self._ended, name))
        self._drain()

    async def known(self, count: int) -> None:
        """Waits until it is known of those that are there, at least `count`, what they are."""
        deadline = self._loop.time() + _KNOWN_SECONDS
        while self._loop.time() < deadline:
            known = {*self._hub.names, *self.refused}
            if len(known) >= count and not (self._running.keys() & self._names) - known:
                return
            await asyncio.sleep(0.1)

    def end(self) -> None:
        """Ends all sessions, so that replicas may end."""
        self._names = frozenset()
        for session in self._running.values():
            session.cancel()

    def _drain(self) -> None:
        """Has replicas that are to end drain, unless nobody else takes this ingress's requests yet.

        The last one goes on while the others are of other settings, or are still unknown: it ends
        with this ingress then, or when another one has joined.
        """
        to_come = self._names - self.refused.keys()
        if to_come and not to_come & set(self._hub.names):
            return
        for name in self._running.keys() - self._names:
            session = self._running[name]
            # From a thread of the hub, when the last request of the replica has ended.
            self._hub.drain(name, partial(self._loop.call_soon_threadsafe, session.cancel))

    def _ended(self, name: str, session: asyncio.Task[None]) -> None:
        del self._running[name]
        if name in self._names - self._others and not session.cancelled():
            self._loop.call_later(_PAUSE, lambda: self.attend_to(self._names))

    async def _session(self, name: str) -> None:
        """One replica, from its first address to its end."""
        reason = "its session ended"
        stream: Any = None
        over = threading.Event()
        try:
            if await self._replicas.kind.remote(name) != self._kind:
                log.info("replica %s has other settings: another ingress sends it requests", name)
                self._others.add(name)
                return
            stream = self._replicas.options(stream=True).session.remote(name, self._hub.name)
            async for host, door in stream:
                self._hub.leave(name, "its engine was started again")
                await self._join(name, host, door, over)
                self._drain()
        except asyncio.CancelledError:
            reason = "it was drained"
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            over.set()
            self._hub.leave(name, reason)
            if stream is not None:
                with contextlib.suppress(Exception):
                    stream.cancel()

    async def _join(self, name: str, host: str, door: Any, over: threading.Event) -> None:
        try:
            await asyncio.to_thread(self._connect, name, host, door, over)
        except (OSError, ValueError) as error:
            log.error("replica %s gets no requests: %s", name, error)
            if isinstance(error, ValueError):
                self.refused[name] = error
        else:
            self.refused.pop(name, None)

    def _connect(self, name: str, host: str, door: Any, over: threading.Event) -> None:
        """In a thread, which goes on when its session ends: `over` is set then."""
        self._hub.join(name, host, door)
        if over.is_set():
            self._hub.drain(name, lambda: None)  # else it would count as one that has died
            self._hub.leave(name, "it was drained")
