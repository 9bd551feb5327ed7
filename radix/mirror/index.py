"""An index of many replicas' trees: how much of a prompt each of them holds, found in one walk.

All replicas share one radix tree of tokens. A node has a set of those that hold its whole edge; if
one of them holds a part, the node is split there. Who holds a node holds all above it, so a walk
down the prompt meets ever smaller sets, and each replica's hit ends where it leaves them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from coppice.radix.mirror.changes import Change, Cleared, Cut, Opened, Split, Stored
from coppice.radix.tokens import TOKEN_BYTES, Tokens, common_prefix, token_bytes


class _Node:
    """Tokens from position `start` on, and the replicas that hold them, a bit for each.

    In a root `holders` is their number.
    """

    __slots__ = ("parent", "children", "edge", "start", "holders")

    def __init__(self, parent: _Node | None, edge: bytes, start: int, holders: int) -> None:
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.edge = edge
        self.start = start
        self.holders = holders

    @property
    def end(self) -> int:
        return self.start + len(self.edge) // TOKEN_BYTES


class _Place(NamedTuple):
    """Where a replica's node ends in the index, and the position at which it begins."""

    node: _Node
    start: int


class ReplicaIndex:
    """What many replicas hold, after the changes that each of them has reported.

    Replicas are numbers from 0 on. Costs: `apply` O(new tokens + nodes on their way), `hits`
    O(tokens of the longest hit at memcmp speed + nodes on the way + replicas that hold some).
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node] = {}
        self._places: dict[int, dict[int, _Place]] = {}  # of each replica's nodes, by their numbers
        self._spaces: dict[int, dict[int, Hashable]] = {}  # namespaces of its roots
        self.nodes = 0
        self.tokens = 0  # that any replica holds

    def apply(self, replica: int, change: Change) -> None:
        """Takes one change of a replica's tree.

        Raises ValueError if a change before it is missing: `leave` and begin anew then, with all
        that its tree holds.
        """
        places = self._places.setdefault(replica, {})
        bit = 1 << replica
        try:
            match change:
                case Stored(number, parent, start, tokens):
                    before = places.get(number)
                    if before is None:
                        before = _Place(places[parent].node, start)
                    if before.node.end != start:
                        raise ValueError(f"change: {change} does not begin at {before.node.end}")
                    end = self._enter(before.node, tokens, bit)
                    places[number] = _Place(end, before.start)
                case Split(number, upper, length):
                    node, start = places[number]
                    above = self._ending(node, start + length)
                    places[upper] = _Place(above, start)
                    places[number] = _Place(node, start + length)
                case Cut(number, length):
                    node, start = places[number]
                    left = self._leave(node, start + length, bit)
                    if length:
                        places[number] = _Place(left, start)
                    else:
                        del places[number]
                        if left.parent is None:
                            self._drop_space(replica, left)
                case Opened(number, namespace):
                    root = self._roots.get(namespace)
                    if root is None:
                        root = self._roots[namespace] = _Node(None, b"", 0, 0)
                    root.holders += 1
                    places[number] = _Place(root, 0)
                    self._spaces.setdefault(replica, {})[number] = namespace
                case Cleared():
                    self.leave(replica)
        except KeyError as error:
            raise ValueError(f"change: {change} is of node {error}, which is unknown") from None

    def leave(self, replica: int) -> None:
        """Forgets all that a replica holds. O(nodes on its way)."""
        bit = 1 << replica
        for node, start in self._places.pop(replica, {}).values():
            self._leave(node, start, bit)  # what lies above is in places of its own
        for namespace in self._spaces.pop(replica, {}).values():
            self._close(namespace)

    def hits(self, tokens: Tokens, namespace: Hashable = None) -> dict[int, int]:
        """How many of the first tokens of a prompt each replica holds; without those at 0."""
        return {
            replica: length
            for holders, length in self._stopping(tokens, namespace)
            for replica in _members(holders).tolist()
        }

    def raise_hits(
        self,
        lengths: np.ndarray,
        tokens: Tokens,
        namespace: Hashable = None,
        places: np.ndarray | None = None,
    ) -> None:
        """Raises a replica's number in `lengths` to the first tokens of a prompt that it holds.

        It has one for each replica; that of replica n is at `places[n]`, else at n. In few
        operations on arrays, for many replicas.
        """
        for holders, length in self._stopping(tokens, namespace):
            found = _members(holders)
            if places is not None:
                found = places[found]
            lengths[found] = np.maximum(lengths[found], length)

    def _stopping(self, tokens: Tokens, namespace: Hashable) -> list[tuple[int, int]]:
        """Where replicas stop to hold a prompt: a bit for each of them, and the tokens before."""
        query = token_bytes(tokens)
        found: list[tuple[int, int]] = []
        node, at = self._roots.get(namespace), 0
        inside: int | None = None  # who holds all up to here; None: everybody, of nothing
        while node is not None:
            child = node.children.get(query[at : at + TOKEN_BYTES])
            if child is None:
                break
            if inside is not None and (left := inside & ~child.holders):
                found.append((left, at // TOKEN_BYTES))
            inside = child.holders
            same = common_prefix(query, at, child.edge)
            same -= same % TOKEN_BYTES
            at += same
            if same < len(child.edge):
                break
            node = child
        if inside:
            found.append((inside, at // TOKEN_BYTES))
        return found

    def _enter(self, node: _Node, tokens: bytes, bit: int) -> _Node:
        """The node at which `tokens` below `node` end; a replica holds all on the way to it."""
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                child = _Node(node, tokens[at:], node.end, bit)
                node.children[child.edge[:TOKEN_BYTES]] = child
                self.nodes += 1
                self.tokens += len(child.edge) // TOKEN_BYTES
                return child
            same = common_prefix(tokens, at, child.edge)
            same -= same % TOKEN_BYTES
            if same < len(child.edge):
                child = self._split(child, same)
            child.holders |= bit
            node, at = child, at + same
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Makes the first `at` bytes of an edge a node of their own, which it returns."""
        parent = node.parent
        assert parent is not None
        upper = _Node(parent, node.edge[:at], node.start, node.holders)
        parent.children[upper.edge[:TOKEN_BYTES]] = upper
        node.edge, node.start, node.parent = node.edge[at:], upper.end, upper
        upper.children[node.edge[:TOKEN_BYTES]] = node
        self.nodes += 1
        return upper

    def _ending(self, node: _Node, end: int) -> _Node:
        """The node on the path of `node` that ends at position `end`; it may be made."""
        while node.start >= end and node.parent is not None:
            node = node.parent
        if node.end > end:
            node = self._split(node, (end - node.start) * TOKEN_BYTES)
        return node

    def _leave(self, node: _Node, end: int, bit: int) -> _Node:
        """Takes a replica out of the path of `node` beyond `end`; the node that ends there."""
        while node.parent is not None and node.end > end:
            if node.start < end:
                return self._cut(node, end, bit)
            parent = node.parent
            node.holders &= ~bit
            if not node.holders:
                self._drop(node)
            node = parent
        return node

    def _cut(self, node: _Node, end: int, bit: int) -> _Node:
        upper = self._split(node, (end - node.start) * TOKEN_BYTES)
        node.holders &= ~bit
        if not node.holders:
            self._drop(node)
        return upper

    def _drop(self, node: _Node) -> None:
        """Removes a node that nobody holds, and so nothing below it."""
        assert node.parent is not None
        key = node.edge[:TOKEN_BYTES]
        if node.parent.children.get(key) is node:
            del node.parent.children[key]
            self.nodes -= 1
            self.tokens -= len(node.edge) // TOKEN_BYTES

    def _drop_space(self, replica: int, root: _Node) -> None:
        """Forgets a replica's root when its last child has left, as the replica's tree does."""
        if any(root_child.holders >> replica & 1 for root_child in root.children.values()):
            return
        spaces, places = self._spaces.get(replica, {}), self._places[replica]
        for number in [each for each, space in spaces.items() if self._roots.get(space) is root]:
            del places[number]
            self._close(spaces.pop(number))

    def _close(self, namespace: Hashable) -> None:
        """Counts a replica's root of a namespace off, and forgets the namespace with the last."""
        root = self._roots[namespace]
        root.holders -= 1
        if not root.holders:
            del self._roots[namespace]


def _members(holders: int) -> np.ndarray:
    """The numbers whose bits are set."""
    if holders.bit_count() == 1:
        return np.array([holders.bit_length() - 1])
    bits = np.frombuffer(holders.to_bytes(holders.bit_length() // 8 + 1, "little"), np.uint8)
    return np.unpackbits(bits, bitorder="little").nonzero()[0]
