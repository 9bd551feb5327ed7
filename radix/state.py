"""The state of a radix tree, which the modules beside it change, and listeners to its changes."""

from __future__ import annotations

from collections.abc import Hashable

from coppice.radix.compiled import mypyc_attr
from coppice.radix.eviction.order import EvictionOrder
from coppice.radix.node import Node, Root
from coppice.radix.pages.pool import PagePool


@mypyc_attr(allow_interpreted_subclasses=True)
class TreeListener:
    """Follows what a tree holds; every hook may be left as it is, and does nothing then.

    The tree calls the hooks of all its listeners (`RadixTree.add_listener`), in the order in which
    they were added, in the middle of a change: they must not change the tree.
    """

    def opened(self, root: Root) -> None:
        """A namespace is about to get `root`, which is not in the tree yet.

        May raise ValueError to refuse the namespace; then nothing changes.
        """

    def stored(self, node: Node) -> None:
        """All tokens up to the end of `node`, which is new or has grown, can be hit from now on."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has taken the first tokens of the edge of `lower`, its only child."""

    def evicted(self, node: Node, length: int) -> None:
        """`node` is about to be cut to its first `length` tokens; with 0 it leaves the tree."""

    def cleared(self) -> None:
        """The tree was emptied on purpose; `evicted` was not called for what it held."""


class TreeState:
    """The pages, the nodes and the counts of one tree, without its operations.

    `RadixTree` is one. The modules that do its work (`edges`, `leaves`, `drafts`) take this much of
    it, and are the only ones that change these fields.
    """

    def __init__(self, pool: PagePool, order: EvictionOrder) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.order = order
        self.roots: dict[Hashable, Root] = {}  # by namespace; none that is empty and unlocked
        self.listeners: list[TreeListener] = []
        self.cached_pages = 0  # pages that nodes cover, each counted once
        self.locked_pages = 0  # those of them that lie under a lock
        self.cached_tokens = 0
        self.num_nodes = 0  # below the roots
        self.evicted_tokens = 0  # since the start
        self.last_evicted = 0  # logical time of the last use of what was evicted last
        # The logical time: it advances with every use, and `Node.stamp` is that of the last one.
        self.clock = 0
        # Changes whenever a match made before may be stale or no longer the longest.
        self.epoch = 0

    @property
    def evictable_pages(self) -> int:
        """Pages that only the cache holds: evicting all that is not locked frees them."""
        return self.cached_pages - self.locked_pages
