"""A log of a tree's changes that costs the tree next to nothing; others read it.

A record has numbers, and the bytes of an edge, which are replaced and never changed. Nothing is
counted, copied or looked up here, and `marshal` can send it to another process as it is.
"""

from __future__ import annotations

from typing import Any

from coppice.radix.namespace import encode_namespace
from coppice.radix.node import Node, Root
from coppice.radix.state import TreeListener, TreeState


class TreeLog(TreeListener):
    """Records of a tree's changes, in order:

        (node, edge, start, length, parent)    tokens were entered at the end of a node
        (node, edge, start, length, root, namespace)    of one below a root
        (upper, lower, length)                 a node was split
        (node, length)                         a node was cut, or has left the tree with 0
        ()                                     the tree is empty

    Nodes are their `id`: no two in the tree have the same, but a new one may have that of one that
    has left. A namespace is the fields of a `Namespace`, or None.

    It begins with what the tree holds. When more than `limit` records wait they are dropped, and
    the next ones are that the tree is empty, and all that it holds.

    Attributes:
        restarts: times that records were dropped.
    """

    def __init__(self, tree: TreeState, limit: int) -> None:
        self.restarts = 0
        self._tree = tree
        self._limit = limit
        self._records: list[tuple[Any, ...]] = []
        self._anew = tree.num_nodes > 0

    def __len__(self) -> int:
        """Records that wait to be drained."""
        return len(self._records)

    def drain(self) -> list[tuple[Any, ...]]:
        """All records since the last call. O(1), or O(nodes) after a loss."""
        if self._anew:
            self._anew = False
            self._records = self.everything()
        records = self._records
        self._records = []
        return records

    def everything(self) -> list[tuple[Any, ...]]:
        """Records of a tree that is empty and then gets all that it holds. O(nodes)."""
        found: list[tuple[Any, ...]] = [()]
        for root in self._tree.roots.values():
            for node in root.subtree():
                if node.parent is not None:
                    found.append(_stored(node, node.parent))
        return found

    def opened(self, root: Root) -> None:
        """Raises ValueError if the namespace has no encoding."""
        encode_namespace(root.namespace)

    def stored(self, node: Node) -> None:
        """Tokens were entered at the end of `node`."""
        if len(self._records) >= self._limit:
            self._records = []
            if not self._anew:
                self._anew = True
                self.restarts += 1
        if not self._anew and node.parent is not None:
            self._records.append(_stored(node, node.parent))

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has taken the first tokens of `lower`."""
        if not self._anew:
            self._records.append((id(upper), id(lower), upper.length))

    def evicted(self, node: Node, length: int) -> None:
        """`node` is about to be cut to `length` tokens."""
        if not self._anew:
            self._records.append((id(node), length))

    def cleared(self) -> None:
        """The tree was emptied on purpose."""
        self._anew = False
        self._records = [()]


def _stored(node: Node, parent: Node) -> tuple[Any, ...]:
    """The record that `node` ends with the tokens of its edge."""
    if not isinstance(parent, Root):
        return id(node), node.edge, node.start, node.length, id(parent)
    namespace: Any = parent.namespace
    fields = None if namespace is None else tuple(namespace)
    return id(node), node.edge, node.start, node.length, id(parent), fields
