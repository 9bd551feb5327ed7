"""How leaves give up their pages: in the policy's order, tail first, no more than are needed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from coppice.radix.node import Node, Root
from coppice.radix.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from coppice.radix.tree import RadixTree


def offer(tree: RadixTree, node: Node) -> None:
    """Enters an unlocked leaf into the order of eviction (an empty root goes at once)."""
    if isinstance(node, Root):
        del tree.roots[node.namespace]
        tree.epoch += 1
        return
    tree.order.add(node)


def reclaim(tree: RadixTree, count: int) -> array[int]:
    """Evicts like `evict`, and returns the pages, with one reference each for the caller."""
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    pages = array("i")
    while len(pages) < count and (leaf := tree.order.pop()) is not None:
        # The page in which the tail begins goes as well, so that no crumb of it stays.
        begin = (leaf.end - tree.order.tail(leaf)) // tree.page_size
        tail = len(leaf.pages) - (begin - leaf.start // tree.page_size)
        gone = tree.pool.take_over(cut(tree, leaf, min(tail, count - len(pages))))
        pages = pages + gone if pages else gone
    return pages


def cut(tree: RadixTree, leaf: Node, count: int) -> array[int]:
    """Takes up to `count` pages of its own off a leaf's tail, and if it has no more, the leaf.

    Returns the pages that it no longer references.
    """
    size, own = tree.page_size, leaf.own_pages
    tree.epoch += 1
    tree.last_evicted = leaf.stamp
    if count < own:
        keep = len(leaf.pages) - count
        length = (leaf.start // size + keep) * size - leaf.start
        gone, own = leaf.pages[keep:], count
    else:
        length, gone = 0, leaf.pages
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
        del leaf.pages[keep:]
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
