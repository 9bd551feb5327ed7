"""Events: what a tree stored and removed, page by page, for a consumer that mirrors it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from coppice.radix.mirror.page_hashes import extend_chain, root_hash
from coppice.radix.node import Node, Root
from coppice.radix.state import TreeListener
from coppice.radix.tokens import TOKEN_BYTES
from coppice.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Full pages of one prompt that can be hit from now on, in order.

    Attributes:
        namespace: the prompt's.
        parent_hash: hash of the page before the first, or the namespace's root hash.
        hashes: one for each page.
        tokens: the tokens of the pages as int32 bytes, `page_size` for each page.
    """

    namespace: Hashable
    parent_hash: int
    hashes: tuple[int, ...]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that can no longer be hit in full, last first."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """The tree was emptied. Also the first event of a stream that restarts after a loss."""


Event = PagesStored | PagesRemoved | PagesCleared


class PageEvents(TreeListener):
    """A bounded stream of a tree's events; hashes are computed only while one is attached.

    The stream begins with what the tree holds, so a consumer that applies all events mirrors it. A
    full page is stored once, with the node in which its last token lies, and removed once; splits
    emit nothing. A consumer that is too slow loses nothing silently: when more than `limit` events
    wait they are dropped, and the next drain gives a `PagesCleared` and all that the tree holds.

        events = PageEvents(tree, limit=10_000)
        for event in events.drain(): ...
        events.close()

    Raises ValueError if the tree has a stream already, if `limit` is less than 1, or if there is a
    namespace in the tree that `page_hashes` refuses. While a stream is attached, the tree refuses
    locks in such a namespace.
    """

    def __init__(self, tree: RadixTree, *, limit: int = 10_000, seed: int = 0) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        if any(isinstance(listener, PageEvents) for listener in tree.listeners):
            raise ValueError("tree: it has a stream of events already; close that one first")
        hashes = [root_hash(namespace, seed) for namespace in tree.roots]
        self.limit = limit
        self.seed = seed
        self.restarts = 0  # times that events were dropped, as the consumer was too slow
        self._tree = tree
        self._events: deque[Event] = deque()
        for root, own in zip(tree.roots.values(), hashes, strict=True):
            root.hashes = array("Q", [own])
        self._anew = tree.num_nodes > 0  # the next drain begins with all that the tree holds
        for node in tree.nodes():  # parents first, as the chain needs it
            node.hashes = self._continue(node, 0)
        tree.add_listener(self)

    def __len__(self) -> int:
        """Events that wait to be drained."""
        return len(self._events)

    def drain(self) -> list[Event]:
        """All events since the last call, in order."""
        if self._anew:
            self._anew = False
            stored = [self._stored(node, node.hashes) for node in self._tree.nodes() if node.hashes]
            return [PagesCleared(), *stored]
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        """Ends the stream; the tree computes no hashes from now on."""
        self._tree.remove_listener(self)
        self._events.clear()
        for root in self._tree.roots.values():
            for node in root.subtree():
                node.hashes = None

    # -- hooks of the tree -------------------------------------------------------------------

    def opened(self, root: Root) -> None:
        """Raises ValueError if the namespace can't be hashed."""
        root.hashes = array("Q", [root_hash(root.namespace, self.seed)])

    def stored(self, node: Node) -> None:
        """Tokens were entered at the end of `node`. O(its new tokens)."""
        known = node.hashes
        hashes = self._continue(node, 0 if known is None else len(known))
        node.hashes = hashes if known is None else known + hashes
        if hashes:
            self._append(self._stored(node, hashes))

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has taken the first tokens of `lower`, and their hashes with them."""
        assert lower.hashes is not None
        size = self._tree.page_size
        taken = upper.end // size - upper.start // size
        upper.hashes, lower.hashes = lower.hashes[:taken], lower.hashes[taken:]

    def evicted(self, node: Node, length: int) -> None:
        """`node` is about to be cut to `length` tokens."""
        assert node.hashes is not None
        size = self._tree.page_size
        keep = (node.start + length) // size - node.start // size
        removed = node.hashes[keep:]
        if removed:
            self._append(PagesRemoved(tuple(reversed(removed))))
            del node.hashes[keep:]

    def cleared(self) -> None:
        """The tree was emptied on purpose."""
        self._events.clear()
        self._anew = False
        self._append(PagesCleared())

    def _continue(self, node: Node, known: int) -> array[int]:
        """Hashes of the full pages of `node` after its first `known` ones."""
        size = self._tree.page_size
        first = node.start // size + known  # page that follows; it may begin in a node above
        count = node.end // size - first
        if count <= 0:
            return array("Q")
        return extend_chain(
            self._parent_hash(node, known), _tokens_from(node, first * size), size, self.seed
        )

    def _parent_hash(self, node: Node, known: int) -> int:
        """The hash before page number `known` of those that end in `node`."""
        if known and node.hashes:
            return node.hashes[known - 1]
        above = node.parent
        while above is not None and not above.hashes:
            above = above.parent
        assert above is not None and above.hashes, "a root without its hash"
        return above.hashes[-1]

    def _stored(self, node: Node, hashes: array[int]) -> PagesStored:
        """The event for `hashes`, the last ones of `node`."""
        assert node.hashes is not None
        size = self._tree.page_size
        known = len(node.hashes) - len(hashes)
        begin = (node.start // size + known) * size
        tokens = _tokens_from(node, begin)[: len(hashes) * size * TOKEN_BYTES]
        root: Node = node
        while root.parent is not None:
            root = root.parent
        assert isinstance(root, Root)
        parent = self._parent_hash(node, known)
        return PagesStored(root.namespace, parent, tuple(hashes), tokens)

    def _append(self, event: Event) -> None:
        if self._anew:
            return
        if len(self._events) == self.limit:
            self._events.clear()
            self._anew = True
            self.restarts += 1
            return
        self._events.append(event)


def _tokens_from(node: Node, begin: int) -> bytes:
    """The tokens of the path from position `begin`, in `node` or above, to the end of `node`."""
    parts = []
    walk: Node | None = node
    while walk is not None and walk.end > begin:
        first = max(0, begin - walk.start)
        parts.append(walk.edge[first * TOKEN_BYTES : walk.length * TOKEN_BYTES])
        walk = walk.parent
    return b"".join(reversed(parts))
