"""The ingress on Ray Serve: the HTTP server of one engine, over the replicas of a hub."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

from aiohttp import web

from coppice.frontend.http import logs
from coppice.frontend.router.client import ReplicasClient
from coppice.frontend.router.cluster.door import Listening
from coppice.frontend.router.cluster.handed import take
from coppice.frontend.router.cluster.membership import MEMBERSHIP
from coppice.frontend.router.cluster.sessions import Sessions
from coppice.frontend.router.cluster.settings import ClusterSettings
from coppice.frontend.router.hub import Hub
from coppice.frontend.server.application import Server
from coppice.frontend.server.run import LAST_WORDS_SECONDS, YOUNG_OBJECTS, greeting
from coppice.frontend.text.model.loading import load_around

_MOVE_SECONDS = 0.5  # for requests on connections that are open, when it ends


class Ingress:
    """Listens, and routes. It holds a session with each replica, and connects to its engine."""

    async def __init__(self, settings: ClusterSettings, replicas: Any) -> None:  # type: ignore[misc]
        """`replicas`: Serve's handle of them. Waits for the first one, and then listens."""
        options = settings.options
        logs.configure(options.log_format, options.log_level)
        loaded = load_around(settings.config, settings.text, without_torch=True)
        self._settings = settings
        hub = Hub()
        self._sessions = Sessions(hub, replicas, settings.kind)
        self._tasks: list[asyncio.Task[None]] = []  # that run until it ends
        self._client = ReplicasClient(
            hub,
            loaded.tokenizer,
            loaded.defaults,
            longest_delay=options.max_stream_delay,
            gives_way=True,
        )
        MEMBERSHIP.watch(self._sessions.told)
        await replicas.alive.remote()  # with the first call Serve begins to tell who is there
        await self._client.start()
        await self._sessions.known(1)  # so that all get the adapters
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
        await self._sessions.known(count)
        for error in self._sessions.refused.values():
            raise error
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
        self._sessions.end()

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
