"""Drafts: tokens that only sequences which may be discarded have entered, kept or dropped.

When a beam forks, it enters the tokens it has computed, so that parent and child share them. Most
beams die, and tokens that only they have entered are of no further use: these leave the tree with
the last lock on them. If beam A was forked inside a page, its child B has a copy of that page to
write on. Once only B continues from there, the copy serves both nodes:

    page        tokens                 before           A is dead
    p           x x x x a a . .        node of A        free
    copy of p   x x x x a a b .        node of B        nodes of A and B
"""

from __future__ import annotations

from coppice.radix.leaves import cut, offer
from coppice.radix.node import Node
from coppice.radix.state import TreeState


def keep(node: Node) -> None:
    """Marks the drafts on the path of `node` as ordinary nodes. O(drafts on the path)."""
    walk: Node | None = node
    while walk is not None and walk.draft:
        walk.draft = False
        walk = walk.parent


def drop(tree: TreeState, node: Node) -> None:
    """Removes the draft `node`, and the drafts above it, as far as nothing needs them.

    Stops at the first node that is no draft, has children, or is locked or wanted. O(pages of the
    removed nodes).
    """
    walk = node
    while walk.draft and not (walk.children or walk.locks or walk.wanted):
        assert walk.parent is not None, "a root is no draft"
        parent = walk.parent
        tree.pool.release(cut(tree, walk, walk.own_pages))
        walk = parent
    if walk.wanted and not (walk.children or walk.locks):
        offer(tree, walk)
    share_copies(tree, walk if walk.children else walk.parent)


def share_copies(tree: TreeState, node: Node | None) -> None:
    """Lets nodes that end inside a page use their only child's copy of it, from `node` upwards.

    Nodes in whose last page a sequence still writes keep theirs. O(nodes in that page).
    """
    size = tree.page_size
    while node is not None and node.parent is not None and node.end % size:
        child = next(iter(node.children.values()), None)
        if child is None or len(node.children) > 1 or child.locks != node.locks:
            return
        page, before = child.pages[0], node.pages[-1]
        border = node.end - node.end % size
        if page != before:
            if _continues_in(child, before, border + size):
                return
            begins_here = node.start >= border
            owned = not (begins_here and node.parent.shares(before, border))
            above = begins_here and node.parent.shares(page, border)
            node.pages[-1] = page
            tree.pool.share((page,))
            tree.pool.release((before,))
            if owned:
                tree.cached_pages -= 1
                tree.locked_pages -= bool(node.locks)
            # `page` is node's own now, unless it was not the child's either.
            child.own_pages -= not above
            node.own_pages += (not above) - owned
        if node.start % size == 0 or node.start < border:
            return
        node = node.parent


def _continues_in(child: Node, page: int, end: int) -> bool:
    """Whether a node below `child`, which has a copy of its own, continues in `page`.

    `end` is the position after the page. The writer of such a node claimed the tail of a node above
    `child` (see `Node.shares`). O(nodes in the page).
    """
    stack = [child]
    while stack:
        node = stack.pop()
        if node.end < end:  # else its children begin after the page
            for below in node.children.values():
                if below.pages[0] == page:
                    return True
                stack.append(below)
    return False
