"""How leaves give up their pages: in the policy's order, tail first, no more than are needed."""

from __future__ import annotations

from array import array

from coppice.radix.node import Match, Node, Root
from coppice.radix.state import TreeState
from coppice.radix.tokens import TOKEN_BYTES


def offer(tree: TreeState, node: Node) -> None:
    """Enters an unlocked leaf into the order of eviction; removes a root that is empty."""
    if node.parent is None:
        assert isinstance(node, Root)
        del tree.roots[node.namespace]
        tree.epoch += 1
        return
    tree.order.add(node)


def available(tree: TreeState, match: Match) -> int:
    """What `RadixTree.available_pages` returns."""
    if match.epoch != tree.epoch:
        raise ValueError("match: the tree has changed since this match was made; match again")
    pages = tree.pool.free_pages + tree.evictable_pages
    node = match.node and match.node.ending(match.length)
    after = 0  # pages of the edge that lie wholly after the hit
    if node is not None:
        after = -(-node.end // tree.page_size) - -(-match.length // tree.page_size)
    while node is not None and not node.locks:
        pages -= node.own_pages - after
        node, after = node.parent, 0
    return pages


def reclaim(tree: TreeState, count: int) -> array[int]:
    """Evicts up to `count` pages as `RadixTree.evict` does, and hands them to the caller.

    Returns them with one reference each; fewer than `count` only if all else is locked.
    """
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    order, pool, before = tree.order, tree.pool, tree.cached_tokens
    pages = array("i")
    while (missing := count - len(pages)) > 0:
        gone = array("i")
        while (wanted := missing - len(gone)) > 0 and (leaf := order.pop()) is not None:
            if (tail := order.tail(leaf)) < leaf.length:
                # The page in which the tail begins is evicted, too: part of a page frees nothing.
                begin = (leaf.end - tail) // tree.page_size - leaf.start // tree.page_size
                wanted = min(wanted, len(leaf.pages) - begin)
            tree.last_evicted = leaf.stamp
            part = cut(tree, leaf, wanted)
            if gone:
                gone += part
            else:
                gone = part
        if not gone:
            break
        # Pages that running sequences reference as well are not freed: then more leaves are cut.
        pages = pages + pool.take_over(gone) if pages else pool.take_over(gone)
    tree.evicted_tokens += before - tree.cached_tokens
    return pages


def empty(tree: TreeState) -> None:
    """What `RadixTree.reset` does. The tokens do not count as evicted: no page was needed."""
    if any(root.locks for root in tree.roots.values()):
        raise RuntimeError("reset: refused, since running sequences hold locks in the tree")
    listeners, tree.listeners = tree.listeners, []
    while (leaf := tree.order.pop()) is not None:
        tree.pool.release(cut(tree, leaf, leaf.own_pages))
    tree.order.cleared()
    tree.listeners = listeners
    for listener in listeners:
        listener.cleared()


def cut(tree: TreeState, leaf: Node, count: int) -> array[int]:
    """Removes up to `count` own pages from a leaf's tail, and the leaf when none of them is left.

    Returns the pages that no node covers any more, which still have the leaf's reference.
    """
    size, own, pages = tree.page_size, leaf.own_pages, leaf.pages
    tree.epoch += 1
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
    for listener in tree.listeners:
        listener.evicted(leaf, length)
    tree.cached_tokens -= evicted
    tree.cached_pages -= own
    if length:
        del pages[keep:]
        leaf.length = length
        leaf.own_pages -= own
        leaf.wanted = 0
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
