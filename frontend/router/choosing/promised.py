"""Prompts that are on their way to replicas: what later requests will hit there."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from coppice.radix.mirror.changes import Opened, Stored
from coppice.radix.mirror.index import ReplicaIndex

_ROOT, _PROMPT = 1, 2


class Promised:
    """Prompts by the replica that computes them, until it reports them itself."""

    def __init__(self) -> None:
        self._index = ReplicaIndex()  # in which each prompt stands for a replica that holds it
        self._slots: dict[str, int] = {}  # by request
        self._replicas = np.zeros(0, np.int64)  # by slot, with room for more
        self._free: list[int] = []

    def __len__(self) -> int:
        """Prompts that are on their way."""
        return len(self._slots)

    def add(self, request: str, replica: int, prompt: bytes, namespace: Hashable) -> None:
        """Notes that a replica will hold a prompt, as int32 bytes. O(its tokens)."""
        if not self._free:
            room = len(self._replicas)
            more = max(room, 64)
            self._replicas = np.concatenate((self._replicas, np.zeros(more, np.int64)))
            self._free = list(range(room + more - 1, room - 1, -1))
        slot = self._free.pop()
        self._replicas[slot] = replica
        self._slots[request] = slot
        self._index.apply(slot, Opened(_ROOT, namespace))
        self._index.apply(slot, Stored(_PROMPT, _ROOT, 0, prompt))

    def remove(self, request: str) -> None:
        """Forgets it, if it is there. O(nodes of the index on its way)."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._index.leave(slot)
            self._free.append(slot)

    def raise_hits(self, lengths: np.ndarray, prompt: bytes, namespace: Hashable) -> None:
        """Raises a replica's number in `lengths` to the tokens of a prompt that it will hold."""
        self._index.raise_hits(lengths, prompt, namespace, self._replicas)
