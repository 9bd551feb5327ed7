"""A node of the radix tree, and the two handles that point into it: Match and Hold."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from coppice.radix.tokens import TOKEN_BYTES

new_tuple = tuple.__new__  # takes half the time of a named tuple's own constructor


class Node:
    """The edge that leads to it (its tokens) and the pages that hold their KV.

    With page size 4, a node of the tokens at positions 6 .. 13 covers three pages, the first and
    the last in part; the first may be its parent's last page (the parent ends at 6 and wrote the
    slots before) or a copy of it (the tree branched at 6):

        positions   4 5 6 7 | 8 9 10 11 | 12 13 . .
        parent      # #     |           |
        this node       # # | # #  #  # | #  #
    """

    __slots__ = ("parent", "children", "edge", "start", "length", "pages", "own_pages", "locks",
                 "stamp", "hits", "draft", "wanted", "policy_data", "borders")  # fmt: skip

    def __init__(self, parent: Node | None, edge: bytes, start: int, pages: array[int]) -> None:
        self.parent = parent
        # Children by the first token of their edge (its four bytes).
        self.children: dict[bytes, Node] = {}
        # A leaf's may run past `length` after a partial eviction, since cutting it would copy it.
        self.edge = edge
        self.start = start  # position of the edge's first token
        self.length = len(edge) // TOKEN_BYTES
        self.pages = pages  # pages of the positions start .. end - 1, in order
        self.own_pages = len(pages)  # pages that no node above covers: all, or all but the first
        self.locks = 0  # sequences that hold this node or one below it
        self.stamp = 0  # the tree's clock when it was last used
        self.hits = 0  # locks that matched this node to its end
        # Entered by sequences that may be discarded, such as beams, and used by no other so far: it
        # leaves the tree with the last of them. All nodes below a draft are drafts.
        self.draft = False
        self.wanted = 0  # calls of `RadixTree.want` in force; then it is not dropped or extended
        self.policy_data: Any = None  # what the eviction policy knows about it
        # uint64 hashes of the prefixes that end at block borders, from the root on, for accounting.
        # None until a hit that ended here was processed. Nodes that were hit do not grow, but an
        # eviction may leave more hashes than there are borders.
        self.borders: array[int] | None = None

    @property
    def end(self) -> int:
        """Position after the edge's last token: the length of the prefix that ends here."""
        return self.start + self.length

    def ending(self, length: int) -> Node:
        """The node on this one's path in whose edge the first `length` tokens end.

        Splits leave a node the lower part of its edge, so the end of an earlier match may be above.
        """
        node = self
        while length <= node.start and node.parent is not None:
            node = node.parent
        return node

    def shares(self, page: int, border: int) -> bool:
        """Whether this node or one above covers `page`, the one of the positions from `border` on.

        It need not be the parent: a writer in the grandparent's tail may find that another sequence
        has inserted the next tokens with a copy of that page, and branch off below.
        """
        node: Node | None = self
        while node is not None and node.end > border:
            if node.pages[-1] == page:
                return True
            node = node.parent
        return False

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def prefix(self) -> bytes:
        """The tokens from the root to this node's end."""
        return b"".join(node.edge[: node.length * TOKEN_BYTES] for node in self.path())


class Root(Node):
    """The top of a namespace's tree: no edge, no pages."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, b"", 0, array("i"))
        self.namespace = namespace


class Match(NamedTuple):
    """The longest cached prefix of some tokens: `length` tokens, ending in `node`.

    Valid until the tree changes; `RadixTree.lock` refuses a stale one.
    """

    namespace: Hashable
    node: Node | None  # None: nothing of this namespace is cached
    length: int
    epoch: int

    def exact(self) -> Node | None:
        """The node that ends with the match; None if it is inside an edge."""
        node = self.node and self.node.ending(self.length)
        return node if node is not None and node.end == self.length else None


class Hold:
    """A sequence's lock on the path of its first `length` tokens; it moves on as it inserts.

    This lock keeps the pages of the sequence's table before index `length // page_size`; the
    sequence itself references the later ones (see `RadixTree`).
    """

    __slots__ = ("namespace", "node", "length")

    def __init__(self, namespace: Hashable, node: Node | None, length: int) -> None:
        self.namespace = namespace
        self.node = node  # the one that ends with the held tokens; None after unlock
        self.length = length


class Inserted(NamedTuple):
    """What an insert did."""

    new_tokens: int  # tokens that were not in the tree before
    duplicate_tokens: int  # tokens that another sequence had inserted meanwhile
