"""Changes of a tree as operations on its nodes: what a copy of it in another process applies.

A node has a number, which is never used again. An operation carries the tokens that are new, and
nothing that follows from earlier ones: a prompt of 100,000 tokens of which ten are new costs as
much as ten.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

from coppice.radix.namespace import encode_namespace
from coppice.radix.node import Node, Root
from coppice.radix.state import TreeListener
from coppice.radix.tokens import TOKEN_BYTES
from coppice.radix.tree import RadixTree


class Opened(NamedTuple):
    """`node` is the root of a namespace, which has no tokens yet."""

    node: int
    namespace: Hashable


class Stored(NamedTuple):
    """`node` ends with `tokens` from position `start` on, as int32 bytes; it may be new."""

    node: int
    parent: int
    start: int
    tokens: bytes


class Split(NamedTuple):
    """The first `length` tokens of the edge of `node` are now a node of their own, `upper`."""

    node: int
    upper: int
    length: int


class Cut(NamedTuple):
    """`node` has its first `length` tokens alone; with 0 it has left the tree."""

    node: int
    length: int


class Cleared(NamedTuple):
    """The tree is empty. Also the first change of a stream that restarts after a loss."""


Change: TypeAlias = Opened | Stored | Split | Cut | Cleared


class TreeChanges(TreeListener):
    """A bounded stream of a tree's changes, for one reader.

    It begins with what the tree holds. A reader that is too slow loses nothing silently: when more
    than `limit` changes wait they are dropped, and the next drain gives `Cleared` and all that the
    tree holds.

    Attributes:
        restarts: times that changes were dropped.

    Raises ValueError for a limit below 1, and for a namespace in the tree that has no encoding that
    is the same everywhere; while the stream is attached, the tree refuses locks in such a one.
    """

    def __init__(self, tree: RadixTree, *, limit: int = 100_000) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        for namespace in tree.roots:
            encode_namespace(namespace)
        self.restarts = 0
        self._tree, self._limit = tree, limit
        self._changes: list[Change] = []
        self._numbers = 0
        self._known: dict[Node, tuple[int, int]] = {}  # number and end of each node
        self._anew = bool(tree.num_nodes)
        tree.add_listener(self)

    def __len__(self) -> int:
        """Changes that wait to be drained."""
        return len(self._changes)

    def drain(self) -> list[Change]:
        """All changes since the last call, in order. O(their number), or O(tree) after a loss."""
        if self._anew:
            self._anew = False
            return self.everything()
        changes, self._changes = self._changes, []
        return changes

    def everything(self) -> list[Change]:
        """`Cleared` and all that the tree holds, under new numbers. O(tree)."""
        self._changes = [Cleared()]
        self._known.clear()
        for root in self._tree.roots.values():
            self._open(root)
            for node in root.subtree():
                if node is not root:
                    self._store(node)
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """Ends the stream."""
        self._tree.remove_listener(self)
        self._changes.clear()
        self._known.clear()

    # -- hooks of the tree -------------------------------------------------------------------

    def opened(self, root: Root) -> None:
        """Raises ValueError if the namespace has no encoding."""
        encode_namespace(root.namespace)

    def stored(self, node: Node) -> None:
        """Tokens were entered at the end of `node`. O(its new tokens)."""
        if self._anew:
            return
        if len(self._changes) >= self._limit:
            self._changes.clear()
            self._known.clear()
            self._anew = True
            self.restarts += 1
            return
        self._store(node)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has taken the first tokens of `lower`."""
        if self._anew:
            return
        number, end = self._known[lower]
        self._known[upper] = self._number(), upper.end
        self._known[lower] = number, end
        self._changes.append(Split(number, self._numbers, upper.length))

    def evicted(self, node: Node, length: int) -> None:
        """`node` is about to be cut to `length` tokens."""
        if self._anew:
            return
        number, _ = self._known[node]
        self._changes.append(Cut(number, length))
        if length:
            self._known[node] = number, node.start + length
        else:
            del self._known[node]

    def cleared(self) -> None:
        """The tree was emptied on purpose."""
        self._known.clear()
        self._anew = False
        self._changes = [Cleared()]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _open(self, root: Root) -> int:
        number = self._number()
        self._known[root] = number, 0
        self._changes.append(Opened(number, root.namespace))
        return number

    def _store(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        if isinstance(parent, Root) and parent not in self._known:
            self._forget_roots()
            self._open(parent)
        number, known = self._known.get(node, (0, node.start))
        if not number:
            number = self._number()
        tokens = node.edge[(known - node.start) * TOKEN_BYTES : node.length * TOKEN_BYTES]
        self._known[node] = number, node.end
        if tokens:
            self._changes.append(Stored(number, self._known[parent][0], known, tokens))

    def _forget_roots(self) -> None:
        """Forgets the roots that the tree has dropped, which nothing reports."""
        roots = [node for node in self._known if node.parent is None]
        if len(roots) > 2 * len(self._tree.roots) + 16:
            for root in roots:
                assert isinstance(root, Root)
                if self._tree.roots.get(root.namespace) is not root:
                    del self._known[root]
