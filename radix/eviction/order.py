"""The order of eviction: the interface of a policy, and the heap of leaves that policies use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from coppice.radix.compiled import mypyc_attr
from coppice.radix.node import Node


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionOrder(ABC):
    """Keeps the unlocked leaves of a tree in the order in which they are to be evicted.

    The tree evicts leaves only, from their tails, and only as many pages as it needs; a policy
    decides which leaf is next. It may keep what it knows about a node in `node.policy_data`. All
    hooks but `add` and `pop` may be left as they are: they do nothing. Each must be O(log leaves)
    amortised, plus the depth of the path for `used`.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens

    @abstractmethod
    def __iter__(self) -> Iterator[Node]:
        """The leaves that `pop` may return, each once, in no order."""

    @abstractmethod
    def add(self, leaf: Node) -> None:
        """Enters a leaf that has no lock; called again when it was used since."""

    @abstractmethod
    def pop(self) -> Node | None:
        """Takes out the leaf to evict next; None if there is no unlocked leaf.

        The tree evicts from its tail, and adds it again if something is left.
        """

    def tail(self, leaf: Node) -> int:
        """Tokens at the end of a popped leaf that may be evicted before `pop` is called again.

        At least 1 and at most its length, the default: all of it shares one place in the order.
        """
        return leaf.length

    def used(self, node: Node, clock: int) -> None:  # noqa: B027
        """A request has hit the tokens up to the end of `node`; it is not stamped yet.

        Args:
            node: end of the path that was hit; the root after a miss.
            clock: the tree's logical time, which the path's stamps become.
        """

    def inserted(self, node: Node, tokens: int) -> None:  # noqa: B027
        """`tokens` new tokens have been entered at the end of `node`, which is new or has grown."""

    def evicted(self, node: Node, tokens: int) -> None:  # noqa: B027
        """The last `tokens` tokens of `node` will be evicted now; `node`, too, if they are all."""

    def split(self, upper: Node, lower: Node) -> None:  # noqa: B027
        """`upper` has taken the first tokens of `lower`, and has the same `policy_data`."""

    def cleared(self) -> None:  # noqa: B027
        """The tree was emptied on purpose: a policy learns nothing from these evictions."""


class LeafHeap:
    """Unlocked leaves by a key, kept up to date as they change and never rebuilt to evict.

    An entry is live while its node still is an unlocked leaf with the stamp it was entered with.
    Locking a leaf or giving it children costs nothing here: the entry is dead from then on, and is
    dropped when it surfaces, or when dead ones outnumber the others. Every operation is O(log
    leaves), amortised.
    """

    __slots__ = ("_entries", "_limit", "_serial")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, int, Node]] = []  # key, serial number, stamp, leaf
        self._serial = 0
        self._limit = 64

    def __len__(self) -> int:
        """Entries, dead ones included."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Node]:
        """The live leaves, each once, in no order."""
        return iter({id(entry[3]): entry[3] for entry in self._entries if _live(entry)}.values())

    def add(self, key: Any, leaf: Node) -> None:
        """Enters an unlocked leaf; keys of one heap must be comparable."""
        self._serial += 1
        entries = self._entries
        heappush(entries, (key, self._serial, leaf.stamp, leaf))
        if len(entries) > self._limit:
            self._compact()

    def pop(self) -> Node | None:
        """Takes out the leaf with the least key; None if no entry is live."""
        entries = self._entries
        while entries:
            _, _, stamp, node = heappop(entries)
            # The same test as `_live`.
            if node.stamp == stamp and not (node.locks or node.children or node.parent is None):
                return node
        return None

    def _compact(self) -> None:
        """Drops dead and double entries. O(1) for each addition since the last time."""
        entries = {id(entry[3]): entry for entry in self._entries if _live(entry)}
        self._entries = list(entries.values())
        heapify(self._entries)
        self._limit = 64 + 4 * len(entries)


def _live(entry: tuple[Any, int, int, Node]) -> bool:
    _, _, stamp, node = entry
    return node.stamp == stamp and not node.locks and not node.children and node.parent is not None
