"""How the edges of the tree grow, branch and part, and what that does to pages and counts.

`RadixTree.insert` and `lock` call these; the rules of references are those of `RadixTree`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from coppice.radix.node import Hold, Node
from coppice.radix.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from coppice.radix.tree import RadixTree


def adopt(tree: RadixTree, hold: Hold, node: Node, table: array[int], matched: int) -> None:
    """Replaces the full pages of positions held .. matched by the tree's; frees the copies."""
    first, last = hold.length // tree.page_size, matched // tree.page_size
    if last <= first:
        return
    ours = table[first:last]
    while first < last:
        # A node's first page is the path's page of that index even if its parent has one too.
        begin = node.start // tree.page_size
        above = max(first, begin)
        table[above:last] = node.pages[above - begin : last - begin]
        last = above
        assert node.parent is not None
        node = node.parent
    tree.pool.release(ours)


def extend(
    tree: RadixTree,
    node: Node,
    bottom: Node,
    edge: bytes,
    matched: int,
    table: array[int],
    draft: bool,
) -> Node:
    """Enters the tokens `edge`, from position `matched` on, below `node`, or at its end.

    Returns the node they end in.

    The references that the sequence has on full pages pass to the node; the partly filled last
    page gets one more, since the sequence goes on writing there.
    """
    size = tree.page_size
    total = matched + len(edge) // TOKEN_BYTES
    pages = table[matched // size : -(-total // size)]
    inside = matched % size != 0  # the first of them holds tokens of `node` as well
    same_page = inside and node.shares(pages[0], matched - matched % size)
    if (
        node is bottom
        and node.locks == 1
        and not (node.hits or node.marks)
        and node.draft == draft
        and not node.children
        and node.parent is not None
        and (not inside or node.pages[-1] == pages[0])
    ):
        # A leaf that this sequence alone has used grows, so that chunks make no chain. One that
        # was hit or marked keeps its end, since that is what was hit or is wanted.
        if same_page:
            if total // size > matched // size:
                # The claim on the page passes to the node, which has one reference already.
                tree.pool.release(pages[:1])
            del pages[0]
        node.edge = node.edge[: node.length * TOKEN_BYTES] + edge
        node.length = len(node.edge) // TOKEN_BYTES
        node.pages += pages
        grown = node
    else:
        grown = Node(node, edge, matched, pages)
        grown.stamp = node.stamp
        grown.draft = True  # `insert` says at the end if it is none, for all of the path
        node.children[edge[:TOKEN_BYTES]] = grown
        grown.own_pages = 0
        tree.num_nodes += 1
        if same_page and total // size == matched // size:
            tree.pool.share(pages)  # child and sequence both, in an ancestor's tail page
        if same_page:
            pages = pages[1:]
    if pages and total % size:
        tree.pool.share(pages[-1:])
    grown.own_pages += len(pages)
    tree.cached_pages += len(pages)
    tree.cached_tokens += total - matched
    if grown.locks:
        tree.locked_pages += len(pages)
    tree.order.inserted(grown, total - matched)
    if tree.events is not None:
        tree.events.stored(grown)
    if tree.watcher is not None:
        tree.watcher.stored(grown)
    return grown


def descend(tree: RadixTree, bottom: Node, node: Node) -> None:
    """Locks the nodes from below `bottom` down to `node`, for a hold that moves on."""
    walk = node
    while walk is not bottom:
        if not walk.locks:
            tree.locked_pages += walk.own_pages
        walk.locks += 1
        assert walk.parent is not None
        walk = walk.parent


def split(tree: RadixTree, node: Node, tokens: int) -> Node:
    """Cuts the edge of `node` after `tokens` tokens; returns the new upper part.

    `node` stays the lower part, so that holds, matches (see `Node.ending`) and the order of
    eviction need no change. Both are locked if it was. A page that lies on both sides of the
    cut is referenced by both.
    """
    size = tree.page_size
    parent = node.parent
    assert parent is not None and 0 < tokens < node.length
    cut = node.start + tokens
    first = node.start // size
    upper = Node(parent, node.edge[: tokens * TOKEN_BYTES], node.start,
                 node.pages[: -(-cut // size) - first])  # fmt: skip
    upper.locks, upper.stamp, upper.hits = node.locks, node.stamp, node.hits
    upper.mark, upper.draft = node.mark, node.draft
    node.edge = node.edge[tokens * TOKEN_BYTES : node.length * TOKEN_BYTES]
    node.length -= tokens
    node.start = cut
    node.pages = node.pages[cut // size - first :]
    node.parent = upper
    parent.children[upper.edge[:TOKEN_BYTES]] = upper
    upper.children[node.edge[:TOKEN_BYTES]] = node
    own = len(node.pages)
    if cut % size:
        tree.pool.share(node.pages[:1])
        own -= 1
    upper.own_pages = node.own_pages - own
    node.own_pages = own
    tree.num_nodes += 1
    tree.order.split(upper, node)
    if tree.events is not None:
        tree.events.split(upper, node)
    return upper
