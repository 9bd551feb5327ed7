"""What other tiers know of the nodes of a tree: pages that were written, hits that were told."""

from __future__ import annotations

from collections.abc import Iterator

from coppice.radix.node import Node
from coppice.radix.state import TreeListener


class Uses(TreeListener):
    """Collects the nodes that were hit, and how often since they were taken last.

    A page that is in a tree is not loaded from a tier, so a tier does not see how often it is used:
    without this it would drop what is used most, and not find it after a restart.
    """

    def __init__(self) -> None:
        self._hit: dict[Node, None] = {}
        self._told: dict[Node, int] = {}  # hits of nodes that were told already

    def __bool__(self) -> bool:
        """Whether something was hit."""
        return bool(self._hit)

    def hit(self, node: Node) -> None:
        """Notes that a node was hit."""
        self._hit[node] = None

    def take(self) -> Iterator[tuple[Node, int]]:
        """The nodes that were hit, each with how often; they are taken one by one."""
        while self._hit:
            node = next(iter(self._hit))
            del self._hit[node]
            times = node.hits - self._told.get(node, 0)
            if times > 0:
                self._told[node] = node.hits
                yield node, times

    def again(self, node: Node, times: int) -> None:
        """Takes back that a node was taken with so many hits."""
        self._told[node] = self._told.get(node, 0) - times
        self._hit[node] = None

    def split(self, upper: Node, lower: Node) -> None:
        if lower in self._told:
            self._told[upper] = self._told[lower]
        if lower in self._hit:
            self._hit[upper] = None

    def evicted(self, node: Node, length: int) -> None:
        if not length:
            self._hit.pop(node, None)
            self._told.pop(node, None)

    def cleared(self) -> None:
        self._hit.clear()
        self._told.clear()


class Following(TreeListener):
    """Keeps what is known of nodes true while the tree changes."""

    def __init__(self, page_size: int, again: dict[Node, None], written: dict[Node, int]) -> None:
        self._size, self._again, self._written = page_size, again, written

    def split(self, upper: Node, lower: Node) -> None:
        # What was written is known by name: it is only looked at again.
        if self._written.pop(lower, None) is not None or lower in self._again:
            self._again[upper] = self._again[lower] = None

    def evicted(self, node: Node, length: int) -> None:
        if not length:
            self._again.pop(node, None)
            self._written.pop(node, None)
        elif node in self._written:
            kept = -(-(node.start + length) // self._size) - node.start // self._size
            self._written[node] = min(self._written[node], kept)

    def cleared(self) -> None:
        self._again.clear()
        self._written.clear()
