"""The token radix tree that owns the KV cache, and its pool of reference-counted pages.

Page ids and tokens only: no tensors, so that the tree can be used, simulated and fuzzed alone.
Where to look:

    the tree               tree, node, tokens, namespace; edges, eviction and drafts do its work;
                           check recounts it
    pages                  pool, pins, page_hashes, events
    who is evicted first   policies, order; hit_density with history for "density"
    why tokens missed      accounting, accounts, windows, causes, curve, near_misses; settling does
                           the work, in batches, with hashes, anchors, memory, fingerprints, stamps
    what saved the most    prefixes, timeline
    what is compiled       compiled
"""

# `compiled` is the first, since it decides in which form the others come.
from coppice.radix import compiled as compiled
from coppice.radix.accounting.accounts import CacheAccounts, Divergence, RequestAccount
from coppice.radix.accounting.ledger import Accounting
from coppice.radix.accounting.top_prefixes import (
    PrefixNode,
    PrefixSavings,
    SharedPrefix,
    top_prefixes,
)
from coppice.radix.eviction.recency import POLICIES
from coppice.radix.mirror.events import PageEvents, PagesCleared, PagesRemoved, PagesStored
from coppice.radix.mirror.page_hashes import page_hashes
from coppice.radix.namespace import Namespace
from coppice.radix.node import Hold, Inserted, Match, Node
from coppice.radix.pages.errors import OutOfPages
from coppice.radix.pages.pool import PagePool
from coppice.radix.pins import Pin, PinRefused, Pins
from coppice.radix.recount import check
from coppice.radix.state import TreeListener
from coppice.radix.tree import RadixTree

__all__ = [
    "POLICIES",
    "Accounting",
    "CacheAccounts",
    "Divergence",
    "Hold",
    "Inserted",
    "Match",
    "Namespace",
    "Node",
    "OutOfPages",
    "PageEvents",
    "PagePool",
    "PagesCleared",
    "PagesRemoved",
    "PagesStored",
    "Pin",
    "PinRefused",
    "Pins",
    "PrefixNode",
    "PrefixSavings",
    "RadixTree",
    "RequestAccount",
    "SharedPrefix",
    "TreeListener",
    "check",
    "page_hashes",
    "top_prefixes",
]
