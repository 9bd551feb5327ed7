"""A log of a tree's changes that costs the tree next to nothing; others read it.

Between two steps an engine reads all weights, and so neither what the log writes nor its code is in
the processor's caches: it writes few numbers, side by side, and has few lines. A record of tokens
is 16 bytes, where a tuple of its fields would be 200. It keeps the bytes of an edge, which are
replaced and never changed. Nothing is counted, copied or looked up.
"""

from __future__ import annotations

from typing import Any

from coppice.radix.mirror.numbers import BytesWriter, i64, write_i64_le
from coppice.radix.mirror.records import (
    CLEARED,
    CUT,
    KIND_BITS,
    SPLIT,
    STORED,
    STORED_BELOW_ROOT,
    STORED_BYTES,
    Records,
    unpack,
)
from coppice.radix.namespace import encode_namespace
from coppice.radix.node import Node, Root
from coppice.radix.state import TreeListener, TreeState
from coppice.radix.tokens import TOKEN_BYTES


class TreeLog(TreeListener):
    """Records a tree's changes, in order (see `records`).

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
        self._most: i64 = limit * STORED_BYTES
        self._anew = tree.num_nodes > 0
        self._forget()

    def _forget(self) -> None:
        """Begins with no record."""
        self._numbers = BytesWriter()
        self._edges: list[bytes] = []
        self._namespaces: list[Any] = []

    def __len__(self) -> int:
        """Records that wait to be drained. O(those)."""
        return sum(1 for _ in unpack(self._waiting()))

    def drain(self) -> Records:
        """All records since the last call. O(their numbers), or O(nodes) after a loss."""
        if self._anew:
            return self.everything()
        waiting = self._waiting()
        self._forget()
        return waiting

    def everything(self) -> Records:
        """Records of a tree that is empty and gets all that it holds, instead of what waits.

        O(nodes).
        """
        self.cleared()
        most, self._most = self._most, 1 << 62
        for root in self._tree.roots.values():
            for node in root.subtree():
                self.stored(node)
                if len(node.edge) > node.length * TOKEN_BYTES:  # it was cut since
                    self._edges[-1] = node.edge[: node.length * TOKEN_BYTES]
        self._most = most
        return self.drain()

    def _waiting(self) -> Records:
        return self._numbers.getvalue(), self._edges, self._namespaces

    # -- what the tree calls ---------------------------------------------------------------------

    def opened(self, root: Root) -> None:
        """Raises ValueError if the namespace has no encoding."""
        encode_namespace(root.namespace)

    def stored(self, node: Node) -> None:
        """Tokens were entered at the end of `node`."""
        numbers = self._numbers
        if len(numbers) >= self._most:
            self._lose()
        parent = node.parent
        if self._anew or parent is None:
            return
        key: i64 = id(node)
        kind: i64 = STORED
        if isinstance(parent, Root):
            kind = STORED_BELOW_ROOT
            self._add_namespace(parent)
        write_i64_le(numbers, key << KIND_BITS | kind)
        write_i64_le(numbers, id(parent))
        self._edges.append(node.edge)

    def _lose(self) -> None:
        """Drops what waits, since it is too much."""
        self._forget()
        if not self._anew:
            self._anew = True
            self.restarts += 1

    def _add_namespace(self, root: Root) -> None:
        namespace: Any = root.namespace
        self._namespaces.append(None if namespace is None else tuple(namespace))

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has taken the first tokens of `lower`."""
        if not self._anew:
            numbers = self._numbers
            key: i64 = id(upper)
            write_i64_le(numbers, key << KIND_BITS | SPLIT)
            write_i64_le(numbers, id(lower))
            write_i64_le(numbers, upper.length)

    def evicted(self, node: Node, length: int) -> None:
        """`node` is about to be cut to `length` tokens."""
        if not self._anew:
            numbers = self._numbers
            key: i64 = id(node)
            write_i64_le(numbers, key << KIND_BITS | CUT)
            write_i64_le(numbers, length)

    def cleared(self) -> None:
        """The tree was emptied on purpose."""
        self._anew = False
        self._forget()
        write_i64_le(self._numbers, CLEARED)
