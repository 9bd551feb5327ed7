"""How the pages of a pool are used at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.radix import Pins, RadixTree


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Pages of a pool by who keeps them; the last four add up to `total`."""

    total: int
    free: int
    cached: int  # kept by the cache alone: evicted when pages are needed
    pinned: int  # kept by pins alone
    held: int  # kept by running sequences


def pool_use(tree: RadixTree, pins: Pins | None = None) -> PoolUse:
    """The use of a tree's pool as of now. O(nodes on the paths of pins)."""
    total, free, cached = tree.pool.num_pages, tree.pool.free_pages, tree.evictable_pages
    pinned = 0 if pins is None else pins.locked_pages()
    return PoolUse(total, free, cached, pinned, total - free - cached - pinned)
