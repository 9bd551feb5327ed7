"""The order of eviction: unlocked leaves, least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from coppice.radix.node import Node


class LeastRecentlyUsed:
    """A heap of leaves by their stamp, maintained as they come and go and never rebuilt to evict.

    An entry is live while its node still is an unlocked leaf with the stamp it was entered with.
    Locking a leaf or giving it children costs nothing here: the entry goes dead and is dropped
    when it surfaces, or when dead ones outnumber the others. Every operation is O(log leaves),
    amortised.
    """

    __slots__ = ("_entries", "_limit", "_serial")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Node]] = []  # stamp, serial number, leaf
        self._serial = 0
        self._limit = 64

    def __len__(self) -> int:
        """Entries, dead ones included."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Node]:
        """The leaves that `pop` may return, in no order."""
        return (entry[2] for entry in self._entries if self._live(entry))

    def add(self, leaf: Node) -> None:
        """Enters an unlocked leaf; call again when it was used since."""
        self._serial += 1
        heapq.heappush(self._entries, (leaf.stamp, self._serial, leaf))
        if len(self._entries) > self._limit:
            self._compact()

    def pop(self) -> Node | None:
        """Takes out the leaf that was used least recently; None if there is no unlocked leaf."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            if self._live(entry):
                return entry[2]
        return None

    @staticmethod
    def _live(entry: tuple[int, int, Node]) -> bool:
        stamp, _, node = entry
        return (
            node.stamp == stamp and not node.locks and not node.children and node.parent is not None
        )

    def _compact(self) -> None:
        """Drops dead and double entries; as many additions as are left paid for it."""
        entries = {id(entry[2]): entry for entry in self._entries if self._live(entry)}
        self._entries = list(entries.values())
        heapq.heapify(self._entries)
        self._limit = 64 + 4 * len(entries)
