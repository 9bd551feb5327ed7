"""The token radix tree that owns the KV cache, and its pool of reference-counted pages.

Page ids and tokens only: no tensors, so that the tree can be used, simulated and fuzzed alone.
"""

from coppice.radix.check import check
from coppice.radix.node import Hold, Inserted, Match, Node
from coppice.radix.pool import OutOfPages, PagePool
from coppice.radix.prefixes import SharedPrefix, top_prefixes
from coppice.radix.tree import RadixTree

__all__ = [
    "Hold",
    "Inserted",
    "Match",
    "Node",
    "OutOfPages",
    "PagePool",
    "RadixTree",
    "SharedPrefix",
    "check",
    "top_prefixes",
]
