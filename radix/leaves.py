"""How leaves give up their pages: in the policy's order, tail first, no more than are needed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from coppice.radix.node import Match, Node, Root
from coppice.radix.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from coppice.radix.tree import RadixTree


def offer(tree: RadixTree, node: Node) -> None:
    """Enters an unlocked leaf into the order of eviction (an empty root goes at once)."""
    if node.parent is None:
        assert isinstance(node, Root)
        del tree.roots[node.namespace]
        if tree.events is not None:
            tree.events.closed(node.namespace)
        tree.epoch += 1
        return
    tree.order.add(node)


def available(tree: RadixTree, match: Match) -> int:
    """What `RadixTree.available_pages` tells."""
    if match.epoch != tree.epoch:
        raise ValueError("match: the tree has changed since this match was made; match again")
    pages = tree.pool.free_pages + tree.evictable_pages
    node = match.node and match.node.ending(match.length)
    behind = 0  # pages of the edge that lie wholly behind the hit
    if node is not None:
        behind = -(-node.end // tree.page_size) - -(-match.length // tree.page_size)
    while node is not None and not node.locks:
        pages -= node.own_pages - behind
        node, behind = node.parent, 0
    return pages


def reclaim(tree: RadixTree, count: int) -> array[int]:
    """Evicts like `evict`, and returns the pages, with one reference each for the caller."""
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    order, pool = tree.order, tree.pool
    pages = array("i")
    while (missing := count - len(pages)) > 0:
        gone = array("i")
        while (wanted := missing - len(gone)) > 0 and (leaf := order.pop()) is not None:
            if (tail := order.tail(leaf)) < leaf.length:
                # The page in which the tail begins goes as well, so that no crumb of it stays.
                begin = (leaf.end - tail) // tree.page_size - leaf.start // tree.page_size
                wanted = min(wanted, len(leaf.pages) - begin)
            part = cut(tree, leaf, wanted)
            if gone:
                gone += part
            else:
                gone = part
        if not gone:
            break
        # Those that running sequences write to as well are not to be had: then more leaves go.
        pages = pages + pool.take_over(gone) if pages else pool.take_over(gone)
    return pages


def empty(tree: RadixTree) -> None:
    """Takes everything out on purpose. Raises RuntimeError while any lock is held."""
    if any(root.locks for root in tree.roots.values()):
        raise RuntimeError("reset: refused, since running sequences hold locks in the tree")
    evicted, events = tree.evicted_tokens, tree.events
    tree.events = None
    while tree.cached_tokens:
        tree.evict(tree.pool.num_pages + 1)
    tree.evicted_tokens = evicted  # nothing was short of pages
    tree.order.cleared()
    tree.events = events
    if events is not None:
        events.cleared()


def cut(tree: RadixTree, leaf: Node, count: int) -> array[int]:
    """Takes up to `count` pages of its own off a leaf's tail, and if it has no more, the leaf.

    Returns the pages that no node covers any more, which still have the leaf's reference.
    """
    size, own, pages = tree.page_size, leaf.own_pages, leaf.pages
    tree.epoch += 1
    tree.last_evicted = leaf.stamp
    if count < own:
        keep = len(pages) - count
        length = (leaf.start // size + keep) * size - leaf.start
        gone, own = pages[keep:], count
    elif own == len(pages):
        length, gone = 0, pages
    else:
        length, gone = 0, pages[1:]
        tree.pool.refs[pages[0]] -= 1  # a node above covers it
    evicted = leaf.length - length
    tree.order.evicted(leaf, evicted)
    if tree.events is not None:
        tree.events.removed(leaf, length)
    if tree.watcher is not None:
        tree.watcher.evicted(leaf, length)
    tree.evicted_tokens += evicted
    tree.cached_tokens -= evicted
    tree.cached_pages -= own
    if length:
        del pages[keep:]
        leaf.length = length
        leaf.own_pages -= own
        leaf.marks = 0
        if length * TOKEN_BYTES * 2 < len(leaf.edge):
            leaf.edge = leaf.edge[: length * TOKEN_BYTES]  # copied once each halving
        tree.order.add(leaf)
        return gone
    parent = leaf.parent
    assert parent is not None
    del parent.children[leaf.edge[:TOKEN_BYTES]]
    leaf.parent = None
    tree.num_nodes -= 1
    if not parent.children and not parent.locks:
        offer(tree, parent)
    return gone
