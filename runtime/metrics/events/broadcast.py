"""Sends the changes of a tree to whoever listens, and answers those who missed some.

ZeroMQ drops what a listener does not take; it sees that by the numbers of the messages, and asks
for them, or for all that the tree holds.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from coppice.radix.mirror.blocks import Blocks
from coppice.radix.mirror.changes import Cleared, Opened, Stored, Translator
from coppice.radix.mirror.records import EMPTY_TREE, Records
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.metrics.events.options import Published
from coppice.runtime.metrics.events.wire import block_batch, change_batch, change_item, load_item

logger = logging.getLogger(__name__)

#: What a request for all that the tree holds has in place of a number.
SNAPSHOT = b"snapshot"
#: The number after the last message of an answer.
END = (-1).to_bytes(8, "big", signed=True)

_KEPT_BYTES = 64 << 20  # of each topic, to be sent again


class _Topic:
    """The messages of one topic: their numbers, and the last ones to be sent again."""

    def __init__(self, name: str, kept: int) -> None:
        self.name = name.encode()
        self._most = kept
        self.number = -1  # of the last message
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def add(self, payload: bytes) -> tuple[bytes, bytes, bytes]:
        """The frames of the next message."""
        self.number += 1
        self._kept.append((self.number, payload))
        self._bytes += len(payload)
        while len(self._kept) > self._most or self._bytes > _KEPT_BYTES:
            self._bytes -= len(self._kept.popleft()[1])
        return self.name, self.number.to_bytes(8, "big"), payload

    def since(self, number: int) -> list[tuple[int, bytes]] | None:
        """The messages from that one on; None if some of them are not kept any more."""
        first = self._kept[0][0] if self._kept else self.number + 1
        if number < first:
            return None
        return [each for each in self._kept if each[0] >= number]


class Broadcast:
    """Publishes one engine's changes and load; not thread-safe.

    Attributes:
        requests: the socket at which requests arrive, for a poll; None: there is none.
    """

    def __init__(self, published: Published) -> None:
        """Binds the sockets, and says that all before is void.

        Raises ValueError, naming the option, for an address that can't be bound.
        """
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        kept, exact = published.kept_batches, published.exact_topic
        self._pub = self._bound(
            zmq.PUB, "kv_events_endpoint", published.endpoint, published.waiting_batches
        )
        self.requests = None
        if published.replay_endpoint is not None:
            name = "kv_events_replay_endpoint"
            # The longest answer fits, whose messages would be dropped else: all, and the end.
            self.requests = self._bound(zmq.ROUTER, name, published.replay_endpoint, kept + 1)
        self._topic = _Topic(published.topic, kept)
        self._exact = None if exact is None else _Topic(exact, kept)
        self._size, self._maps = published.block_size, published.maps
        self._instance = secrets.token_hex(8)
        self._blocks = Blocks(published.block_size)
        self._translator = Translator()
        self.publish(EMPTY_TREE, None)  # who heard an engine before this one begins anew

    def close(self) -> None:
        """Closes the sockets; what was published just now may still leave."""
        for socket in self._sockets:
            socket.close(linger=200)
        self._context.term()

    def _bound(self, kind: int, name: str, endpoint: str, waiting: int) -> zmq.Socket[bytes]:
        """A socket at which so many messages wait for each peer before some are dropped."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(waiting)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            for each in self._sockets:
                each.close(linger=0)
            self._context.term()
            raise ValueError(
                f"{name} is {endpoint!r}; it must be an address of this machine that is free: "
                f"{error.strerror}"
            ) from None
        return socket

    def publish(self, records: Records, load: Load | None) -> None:
        """Sends what the records of a `TreeLog`, which follow the last ones, stand for."""
        now, events = time.time(), []
        changes = self._translator.translate(records)
        for change in changes:
            event = self._blocks.take(change)
            if event is not None:
                events.append(event)
        if events:
            batch = block_batch(now, events, self._size, maps=self._maps)
            self._send(self._topic.add(batch))
        if self._exact is not None and (changes or load is not None):
            items = [change_item(change) for change in changes]
            if load is not None:
                items.append(load_item(load))
            self._send(self._exact.add(change_batch(now, self._instance, items)))

    def _send(self, frames: Sequence[bytes]) -> None:
        with suppress(zmq.Again):
            self._pub.send_multipart(frames, zmq.NOBLOCK)

    def answer(self) -> None:
        """Answers all requests that are there."""
        router = self.requests
        while router is not None and router.poll(0):
            sender, *frames = router.recv_multipart()
            try:
                found = self._asked_for(frames)
            except ValueError as error:
                logger.warning("kv_events_replay_endpoint: %s", error)
                found = []
            for number, payload in found:
                self._reply(router, sender, number.to_bytes(8, "big"), payload)
            self._reply(router, sender, END, b"")

    @staticmethod
    def _reply(router: zmq.Socket[bytes], sender: bytes, number: bytes, payload: bytes) -> None:
        with suppress(zmq.Again):
            router.send_multipart((sender, b"", number, payload), zmq.NOBLOCK)

    def _asked_for(self, frames: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """The answer to a request: an empty frame, the topic unless it is vLLM's, a number."""
        exact = self._exact
        match frames:
            case [b"", number]:
                topic = self._topic
            case [b"", name, number] if exact is not None and name == exact.name:
                topic = exact
            case _:
                raise ValueError(f"a request has frames {frames}; it must have an empty one, "
                                 "the topic, and a number of 8 bytes or 'snapshot'")  # fmt: skip
        if number != SNAPSHOT and len(number) != 8:
            raise ValueError(f"a request has number {number!r}; it must have 8 bytes")
        kept = None if number == SNAPSHOT else topic.since(int.from_bytes(number, "big"))
        if kept is not None:
            return kept
        return [(max(topic.number, 0), self._everything(topic))]

    def _everything(self, topic: _Topic) -> bytes:
        """A message with all that the tree holds."""
        now = time.time()
        if topic is self._topic:
            events = self._blocks.everything()
            return block_batch(now, events, self._size, maps=self._maps)
        return change_batch(now, self._instance, self._all_changes())

    def _all_changes(self) -> list[list[Any]]:
        copy = self._blocks.copy
        numbers = {node: number for number, node in copy.nodes.items()}
        items = [change_item(Cleared())]
        waiting = list(copy.roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is None:
                items.append(change_item(Opened(numbers[node], node.namespace)))
            else:
                place = numbers[node], numbers[node.parent]
                items.append(change_item(Stored(*place, node.start, node.edge)))
            waiting += node.children.values()
        return items
