"""Takes out of a tree what will never be asked for again: namespaces, and tokens below a mark.

What is removed does not count as evicted, since no page was needed. Locked nodes stay, and all
above them; call it when nothing locks what is to leave.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable

from coppice.radix import edges, leaves
from coppice.radix.node import Node
from coppice.radix.state import TreeState
from coppice.radix.tokens import TOKEN_BYTES


def remove_namespace(tree: TreeState, namespace: Hashable) -> int:
    """Removes all tokens of a namespace; returns the pages that are free now. O(its nodes)."""
    root = tree.roots.get(namespace)
    return 0 if root is None else _remove(tree, root)


def remove_below(tree: TreeState, key: int) -> int:
    """Removes each token `key`, in any namespace, and all that follows it.

    Returns the pages that are free now. O(tokens of the tree at memory speed).
    """
    wanted = key.to_bytes(TOKEN_BYTES, sys.byteorder)
    tops = []
    for root in list(tree.roots.values()):
        waiting: list[Node] = [root]
        while waiting:
            node = waiting.pop()
            at = _place(node, wanted)
            if at is None:
                waiting += node.children.values()
            else:
                tops.append((node, at))
    freed = 0
    for node, at in tops:
        if at:
            edges.split(tree, node, at)  # `node` stays the lower part
        freed += _remove(tree, node)
    return freed


def _place(node: Node, key: bytes) -> int | None:
    """The place of a token on the edge of `node`, in tokens; None if it is not there."""
    edge, end = node.edge, node.length * TOKEN_BYTES
    at = edge.find(key, 0, end)
    while at >= 0 and at % TOKEN_BYTES:
        at = edge.find(key, at + 1, end)
    return None if at < 0 else at // TOKEN_BYTES


def _remove(tree: TreeState, top: Node) -> int:
    """Removes `top` and all below it, as far as no lock holds it; returns the pages freed."""
    before = tree.pool.free_pages
    for node in reversed(list(top.subtree())):  # children before their parents
        if node.parent is not None and not (node.children or node.locks):
            tree.pool.release(leaves.cut(tree, node, node.own_pages))
    return tree.pool.free_pages - before
