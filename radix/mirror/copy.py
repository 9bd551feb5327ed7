"""A copy of another process's tree, made of its changes: tokens alone, without pages."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator

from coppice.radix.mirror.changes import Change, Cleared, Cut, Opened, Split, Stored
from coppice.radix.tokens import TOKEN_BYTES, Tokens, common_prefix, token_bytes


class CopyNode:
    """A node of a copy: `edge` has its tokens, as int32 bytes, from position `start` on.

    `namespace` and `root_number` are those of a root; `hashes` belong to whoever keeps hashes of
    its blocks.
    """

    __slots__ = ("parent", "children", "edge", "start", "namespace", "root_number", "hashes")

    def __init__(
        self, parent: CopyNode | None, start: int, namespace: Hashable = None, root_number: int = 0
    ) -> None:
        self.parent = parent
        self.children: dict[bytes, CopyNode] = {}
        self.edge = b""
        self.start = start
        self.namespace = namespace
        self.root_number = root_number
        self.hashes: array[int] = array("Q")

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.edge) // TOKEN_BYTES

    def tokens_from(self, begin: int) -> bytes:
        """The tokens of its path from position `begin` to its end. O(those, and the path)."""
        parts, node = [], self
        while node.end > begin:
            parts.append(node.edge[max(0, begin - node.start) * TOKEN_BYTES :])
            if node.parent is None:
                break
            node = node.parent
        return b"".join(reversed(parts))


class TreeCopy:
    """What a tree holds, token by token, after the changes that were applied so far."""

    def __init__(self) -> None:
        self.nodes: dict[int, CopyNode] = {}  # by their numbers, roots included
        self.roots: dict[Hashable, CopyNode] = {}  # by namespace

    def apply(self, change: Change) -> CopyNode | None:
        """Applies one change; returns its node, of a split the lower one, None if it has left.

        O(new tokens). Raises ValueError if a change before it is missing; begin anew then with all
        that the tree holds.
        """
        try:
            match change:
                case Stored():
                    return self._store(change)
                case Split(number, upper, length):
                    return self._split(self.nodes[number], upper, length)
                case Cut(number, length):
                    return self._cut(number, length)
                case Opened(number, namespace):
                    node = self.nodes[number] = CopyNode(None, 0, namespace, number)
                    self.roots[namespace] = node
                    return node
                case Cleared():
                    self.nodes.clear()
                    self.roots.clear()
                    return None
        except KeyError as error:
            raise ValueError(f"change: {change} is of node {error}, which is unknown") from None

    def match(self, tokens: Tokens, namespace: Hashable = None) -> int:
        """How many of the first tokens of a prompt the tree holds. O(tokens at memcmp speed)."""
        query = token_bytes(tokens)
        node, at = self.roots.get(namespace), 0
        while node is not None and at < len(query):
            child = node.children.get(query[at : at + TOKEN_BYTES])
            if child is None:
                break
            same = common_prefix(query, at, child.edge)
            same -= same % TOKEN_BYTES
            at += same
            if same < len(child.edge):
                break
            node = child
        return at // TOKEN_BYTES

    def __iter__(self) -> Iterator[tuple[Hashable, bytes]]:
        """Namespace and tokens of the path to each leaf."""
        for namespace, root in self.roots.items():
            waiting = [(root, b"")]
            while waiting:
                node, prefix = waiting.pop()
                prefix += node.edge
                if not node.children and node is not root:
                    yield namespace, prefix
                waiting += [(child, prefix) for child in node.children.values()]

    def _store(self, change: Stored) -> CopyNode:
        node = self.nodes.get(change.node)
        if node is None:
            parent = self.nodes[change.parent]
            node = self.nodes[change.node] = CopyNode(parent, change.start)
            if parent.end != change.start:
                raise ValueError(f"change: node {change.parent} ends at {parent.end}, not {change}")
            parent.children[change.tokens[:TOKEN_BYTES]] = node
        if node.end != change.start:
            raise ValueError(f"change: node {change.node} ends at {node.end}, not {change.start}")
        node.edge += change.tokens
        return node

    def _split(self, lower: CopyNode, number: int, length: int) -> CopyNode:
        parent, at = lower.parent, length * TOKEN_BYTES
        if parent is None or not 0 < at < len(lower.edge):
            raise ValueError(f"change: a node of {len(lower.edge)} bytes is split at {at}")
        upper = self.nodes[number] = CopyNode(parent, lower.start)
        upper.edge, lower.edge = lower.edge[:at], lower.edge[at:]
        parent.children[upper.edge[:TOKEN_BYTES]] = upper
        lower.parent, lower.start = upper, lower.start + length
        upper.children[lower.edge[:TOKEN_BYTES]] = lower
        return lower

    def _cut(self, number: int, length: int) -> CopyNode | None:
        node = self.nodes[number]
        if length:
            node.edge = node.edge[: length * TOKEN_BYTES]
            return node
        del self.nodes[number]
        parent = node.parent
        if parent is not None:
            del parent.children[node.edge[:TOKEN_BYTES]]
            if parent.parent is None and not parent.children:
                del self.nodes[parent.root_number], self.roots[parent.namespace]
        return None
