"""The ingress on Ray Serve: the HTTP server of one engine, over the replicas of a hub."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from functools import partial
from typing import Any

from aiohttp import web

from coppice.frontend.http import logs
from coppice.frontend.router.client import ReplicasClient
from coppice.frontend.router.cluster.door import Listening
from coppice.frontend.router.cluster.handed import take
from coppice.frontend.router.cluster.membership import MEMBERSHIP
from coppice.frontend.router.cluster.settings import ClusterSettings
from coppice.frontend.router.hub import Hub
from coppice.frontend.server.application import Server
from coppice.frontend.server.run import LAST_WORDS_SECONDS, YOUNG_OBJECTS, greeting
from coppice.frontend.text.model.loading import load_around

log = logging.getLogger(__name__)

_PAUSE = 0.5  # seconds before a session that has ended by itself is tried again
_ALIKE_SECONDS = 10.0  # for replicas that are there to say what they are
_MOVE_SECONDS = 0.5  # for requests on connections that are open, when it ends


class Ingress:
    """Listens, and routes. It holds a session with each replica, and connects to its engine."""

    async def __init__(self, settings: ClusterSettings, replicas: Any) -> None:  # type: ignore[misc]
        """`replicas`: Serve's handle of them. Waits for the first one, and then listens."""
        options = settings.options
        logs.configure(options.log_format, options.log_level)
        loaded = load_around(settings.config, settings.text, without_torch=True)
        self._settings, self._replicas = settings, replicas
        self._loop = asyncio.get_running_loop()
        self._hub = Hub()
        self._sessions: dict[str, asyncio.Task[None]] = {}
        self._names: frozenset[str] = frozenset()  # replicas that Serve has told of
        self._refused: dict[str, ValueError] = {}  # replicas that are not like the others
        self._tasks: list[asyncio.Task[None]] = []  # that run until it ends
        self._client = ReplicasClient(
            self._hub,
            loaded.tokenizer,
            loaded.defaults,
            longest_delay=options.max_stream_delay,
            gives_way=True,
        )
        MEMBERSHIP.watch(self._told)
        await replicas.alive.remote()  # with the first call Serve begins to tell who is there
        await self._client.start()
        await self._check_alike(1)
        if loaded.tokenizer.chat_template is not None:
            loaded.tokenizer.load_wrapped_soon()
        self._server = Server(self._client, settings.config.model, options)
        await self._server.load_adapters()
        self._ends = False
        application = self._server.application()
        application.on_response_prepare.append(self._close_connection)
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=options.drain_timeout + LAST_WORDS_SECONDS,
        )
        await self._runner.setup()
        listener = await self._listener()
        await web.SockSite(self._runner, listener, ssl_context=options.tls()).start()
        self._address = listener.getsockname()[:2]
        assert self._runner.server is not None
        watching = self._server.connections.watch(self._runner.server)
        self._tasks.append(asyncio.create_task(watching))
        gc.freeze()  # what is loaded stays: no garbage collection needs to visit it
        gc.set_threshold(YOUNG_OBJECTS, 20, 20)

    async def describe(self, count: int) -> str:
        """The lines that a server prints when it is ready, with so many replicas.

        Raises ValueError if one of them is not like the others.
        """
        await self._check_alike(count)
        model, options = self._settings.config.model, self._settings.options
        return greeting(self._client, model, options, *self._address)

    async def running(self) -> int:
        """Requests that have not ended."""
        return self._client.running

    async def check_health(self) -> None:
        """The ingress works if this is answered."""

    async def drain(self) -> None:
        """Refuses new requests from now on, with an answer, so that a load balancer sees why."""
        self._server.drain()
        await asyncio.sleep(self._settings.options.drain_grace)

    async def __del__(self) -> None:
        """Ends in order: it takes no new connections, and requests that run may end.

        Another ingress may take the new ones already, so none is refused. A client may be about to
        send a request on one that is open: for a moment it is answered, as the last one there.
        """
        if not hasattr(self, "_runner"):
            return
        self._ends = True
        for task in self._tasks:
            task.cancel()
        for site in list(self._runner.sites):
            await site.stop()
        await asyncio.sleep(_MOVE_SECONDS)
        closing = asyncio.create_task(self._runner.cleanup())
        await asyncio.wait({closing}, timeout=self._settings.options.drain_timeout)
        await self._client.stop()
        await closing
        self._names = frozenset()
        for session in list(self._sessions.values()):
            session.cancel()

    async def _close_connection(self, _: web.Request, response: web.StreamResponse) -> None:
        """Has a client that is answered now make a new connection, to the next ingress."""
        if self._ends:
            response.headers["Connection"] = "close"
            response.force_close()

    async def _listener(self) -> socket.socket:
        """The socket that was handed to it, or that of the door."""
        settings = self._settings
        if settings.handed is not None:
            handed = take(settings.handed)
            if handed is not None:
                return handed
        listening = await Listening.at(settings.host, settings.port)
        self._tasks.append(asyncio.create_task(listening.keep()))
        return listening.socket

    async def _check_alike(self, count: int) -> None:
        """Raises ValueError if a replica was refused, of those that are there: at least `count`."""
        deadline = self._loop.time() + _ALIKE_SECONDS
        while self._loop.time() < deadline:
            known = {*self._hub.names, *self._refused}
            if len(known) >= count and not self._sessions.keys() - known:
                break
            await asyncio.sleep(0.1)
        for error in self._refused.values():
            raise error

    # -- sessions with replicas ------------------------------------------------------------------

    def _attend_to(self, names: frozenset[str]) -> None:
        """Begins and ends sessions, so that there is one with each of these replicas."""
        self._names = names
        for name in names - self._sessions.keys():
            session = self._loop.create_task(self._session(name))
            self._sessions[name] = session
            session.add_done_callback(partial(self._ended, name))
        for name in self._sessions.keys() - names:
            session = self._sessions[name]
            # From a thread of the hub, when the last request of the replica has ended.
            self._hub.drain(name, partial(self._loop.call_soon_threadsafe, session.cancel))

    def _told(self, names: frozenset[str]) -> None:
        self._loop.call_soon_threadsafe(self._attend_to, names)

    def _ended(self, name: str, session: asyncio.Task[None]) -> None:
        del self._sessions[name]
        self._refused.pop(name, None)
        if name in self._names and not session.cancelled():
            self._loop.call_later(_PAUSE, lambda: self._attend_to(self._names))

    async def _session(self, name: str) -> None:
        """One replica, from its first address to its end."""
        reason = "its session ended"
        stream = self._replicas.options(stream=True).session.remote(name, self._hub.name)
        try:
            async for host, door in stream:
                self._hub.leave(name, "its engine was started again")
                await self._join(name, host, door)
        except asyncio.CancelledError:
            reason = "it was drained"
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            self._hub.leave(name, reason)
            with contextlib.suppress(Exception):
                stream.cancel()

    async def _join(self, name: str, host: str, door: Any) -> None:
        try:
            await asyncio.to_thread(self._hub.join, name, host, door)
        except (OSError, ValueError) as error:
            log.error("replica %s gets no requests: %s", name, error)
            if isinstance(error, ValueError):
                self._refused[name] = error
