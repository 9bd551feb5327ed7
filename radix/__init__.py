"""The token radix tree that owns the KV cache, and its pool of reference-counted pages.

Page ids and tokens only: no tensors, so that the tree can be used, simulated and fuzzed alone.
Where to look:

    tree, state       the tree and what it consists of; node, tokens and namespace are its nouns
    edges, leaves,    do the tree's work: edges grow and split, leaves are evicted, drafts dropped
    drafts
    pins, upkeep/     prefixes that stay cached; a full recount, and removal of namespaces
    pages/            the pool of reference-counted pages
    eviction/         which leaf is evicted first
    mirror/           events and page hashes, for other processes
    accounting/       why tokens missed, what other pool sizes would hit, which prefixes saved most
    compiled          which modules are compiled
"""

# `compiled` comes first, since it decides in which form the others are imported.
from coppice.radix import compiled as compiled
from coppice.radix.accounting.accounts import CacheAccounts
from coppice.radix.accounting.ledger import Accounting
from coppice.radix.accounting.log.account import Divergence, RequestAccount
from coppice.radix.accounting.log.loaded import FromTiers
from coppice.radix.accounting.top_prefixes import PrefixNode, PrefixSavings, SharedPrefix
from coppice.radix.eviction.recency import POLICIES
from coppice.radix.mirror.blocks import PagesCleared, PagesRemoved, PagesStored
from coppice.radix.mirror.events import PageEvents
from coppice.radix.mirror.page_hashes import page_hashes
from coppice.radix.namespace import Namespace
from coppice.radix.node import Hold, Inserted, Match, Node
from coppice.radix.pages.errors import OutOfPages
from coppice.radix.pages.pool import PagePool
from coppice.radix.pins import Pin, PinRefused, Pins
from coppice.radix.state import TreeListener
from coppice.radix.tree import RadixTree
from coppice.radix.upkeep.recount import check

__all__ = [
    "POLICIES",
    "Accounting",
    "CacheAccounts",
    "Divergence",
    "FromTiers",
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
]
