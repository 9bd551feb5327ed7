"""The actor that holds the listening socket of an ingress, so that the next ingress gets it, too.

Serve replaces an ingress that has died, or that an update changes, by another one. In between
connections wait at the socket. The actor ends when no ingress has called for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coppice.frontend.router.cluster.handed import Holder, take

log = logging.getLogger(__name__)

SECONDS = 30.0  # without an ingress, after which the socket is closed
_NAMESPACE = "coppice"
_TRIES = 5


class Door:
    """Binds the socket. Raises OSError if the address is in use."""

    def __init__(self, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._holder = Holder(socket.create_server(address[:2], family=family))
        self._seen = time.monotonic()
        threading.Thread(target=self._watch, name="coppice-door", daemon=True).start()

    def name(self) -> str:
        """Where `take` gets the socket; also says that an ingress is there."""
        self._seen = time.monotonic()
        return self._holder.name

    def _watch(self) -> None:
        while time.monotonic() - self._seen < SECONDS:
            time.sleep(1.0)
        self._holder.close()
        os._exit(0)


class Listening:
    """The listening socket of an ingress, from the door of its address on this node.

    Attributes:
        socket: it listens.
    """

    def __init__(self, door: Any, listener: socket.socket) -> None:
        self._door, self.socket = door, listener

    @classmethod
    async def at(cls, host: str, port: int) -> Listening:
        """Makes the door, unless it is there. Raises ValueError if the address can't be bound."""
        here = ray.get_runtime_context().get_node_id()
        actor = ray.remote(Door).options(
            name=f"door-{host}:{port}",
            namespace=_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=here, soft=False),
        )
        for _ in range(_TRIES):
            door = actor.remote(host, port)
            try:
                listener = take(await door.name.remote())
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                failure = ValueError(f"host, port: {host}:{port} can't be listened at: {reason}")
            else:
                if listener is not None:
                    return cls(door, listener)
                failure = ValueError(f"port: the door of {host}:{port} is on another machine")
                ray.kill(door)  # of an ingress that was there before
            await asyncio.sleep(1.0)
        raise failure

    async def keep(self) -> None:
        """Keeps the door, until it is cancelled."""
        while True:
            await asyncio.sleep(SECONDS / 6)
            try:
                await self._door.name.remote()
            except ray.exceptions.RayError as error:
                log.warning("the listening socket is not kept for the next ingress: %s", error)
                return
