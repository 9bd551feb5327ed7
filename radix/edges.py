"""How the edges of the tree grow, branch and split, and what that does to pages and counts.

`RadixTree.insert` and `lock` call these; the rules of references are those of `RadixTree`.
"""

from __future__ import annotations

from array import array

from coppice.radix import drafts
from coppice.radix.node import Hold, Node
from coppice.radix.state import TreeState
from coppice.radix.tokens import TOKEN_BYTES, common_prefix

# Longer edges are entered as several nodes. Edges are allocated and freed all the time, and long
# ones of all lengths would fragment the heap: that took a third of all memory.
EDGE_TOKENS = 1 << 13


def descend(node: Node, query: bytes, at: int) -> tuple[Node, int]:
    """Follows `query` (int32 bytes) from byte `at` on, down from the end of `node`.

    Returns the node in which the match ends, and the byte after its last token. O(matched tokens at
    memcmp speed + nodes passed).
    """
    top = node
    while (child := node.children.get(query[at : at + TOKEN_BYTES])) is not None:
        edge = child.edge
        if not query.startswith(edge, at):
            return child, at + min(common_prefix(query, at, edge), child.length * TOKEN_BYTES)
        node = child
        at += len(edge)
    # The edge of a leaf that was cut by eviction may match beyond its length.
    if node is not top and (over := len(node.edge) - node.length * TOKEN_BYTES):
        at -= over
    return node, at


def refuse(begin: int, held: int, total: int, pages: int, size: int) -> None:
    """Raises ValueError for the size of an insert that does not fit."""
    if not 0 <= begin <= held:
        raise ValueError(f"begin must be in 0 .. {held}, what the hold covers, got {begin}")
    if total < held:
        raise ValueError(f"tokens: {total} of them, but the hold covers {held} already")
    raise ValueError(f"table: {pages} pages of {size} can't hold {total} tokens")


def enter(
    tree: TreeState,
    hold: Hold,
    bottom: Node,
    query: bytes,
    table: array[int],
    begin: int,
    draft: bool,
    ends: bool,
) -> tuple[Node, int]:
    """Enters the tokens of `RadixTree.insert`, for a hold that ends in `bottom`.

    With `ends`, the sequence ends here and writes no more. Returns the node in which the tokens
    end, and how many of them were in the tree before. The caller moves the locks.
    """
    held, total = hold.length, begin + len(query) // TOKEN_BYTES
    if not 0 <= begin <= held <= total <= len(table) * tree.page_size:
        refuse(begin, held, total, len(table), tree.page_size)
    node, matched = bottom, held
    if total > held:
        node, at = descend(bottom, query, (held - begin) * TOKEN_BYTES)
        matched = begin + at // TOKEN_BYTES
        if matched < node.start + node.length:
            node = split(tree, node, matched - node.start)
        if matched > held:
            adopt(tree, hold, node, table, matched)
        if matched < total:
            node = extend(tree, node, bottom, query, at, matched, table, draft, ends)
            tree.epoch += 1
    if node.draft and not draft:
        drafts.keep(node)
    return node, matched


def adopt(tree: TreeState, hold: Hold, node: Node, table: array[int], matched: int) -> None:
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
    tree: TreeState,
    node: Node,
    bottom: Node,
    query: bytes,
    at: int,
    matched: int,
    table: array[int],
    draft: bool,
    ends: bool,
) -> Node:
    """Enters the tokens of `query` from byte `at` on below `node`, or at its end.

    The first has position `matched`. Returns the node they end in.
    """
    while True:
        inside, room = matched % tree.page_size, EDGE_TOKENS
        # A leaf that only this sequence has used grows, so that chunks make no chain of nodes. One
        # that was hit or is wanted keeps its end, which marks the prefix that was hit or is wanted.
        grows = (
            node is bottom
            and node.locks == 1
            and not (node.hits or node.wanted or node.children)
            and node.draft == draft
            and node.parent is not None
            and node.length < room
            and (not inside or node.pages[-1] == table[matched // tree.page_size])
        )
        if grows:
            room -= node.length
        stop = min(len(query), at + room * TOKEN_BYTES)
        last = stop == len(query)
        node = _extend(tree, node, query[at:stop], matched, table, draft, ends and last, grows)
        if last:
            return node
        matched += (stop - at) // TOKEN_BYTES
        at = stop


def _extend(
    tree: TreeState,
    node: Node,
    edge: bytes,
    matched: int,
    table: array[int],
    draft: bool,
    ends: bool,
    grows: bool,
) -> Node:
    """Enters the tokens `edge`, the first at position `matched`, below `node`.

    If `node` `grows`, they extend its edge instead. Returns the node they end in.

    The references that the sequence has on full pages pass to the node; the partly filled last
    page gets one more, since the sequence continues to write there, unless it `ends`.
    """
    size = tree.page_size
    new_tokens = len(edge) // TOKEN_BYTES
    total = matched + new_tokens
    first = matched // size
    pages = table[first : -(-total // size)]
    inside = matched % size  # tokens of the first page that are those of `node`
    same_page = inside and node.shares(pages[0], matched - inside)
    if grows:
        if same_page:
            if ends or total // size > first:
                # The claim on the page passes to the node, which has one reference already.
                tree.pool.release(pages[:1])
            del pages[0]
        node.edge = node.edge[: node.length * TOKEN_BYTES] + edge
        node.length = len(node.edge) // TOKEN_BYTES
        node.pages += pages
        grown = node
    else:
        if len(node.edge) > node.length * TOKEN_BYTES:  # cut by eviction; it has no children yet
            node.edge = node.edge[: node.length * TOKEN_BYTES]
        grown = Node(node, edge, matched, pages)
        grown.stamp = node.stamp
        grown.draft = draft or node.draft  # `enter` keeps the whole path if this is no draft
        node.children[edge[:TOKEN_BYTES]] = grown
        grown.own_pages = 0
        tree.num_nodes += 1
        if same_page and total // size == first and not ends:
            tree.pool.share(pages)  # child and sequence both, in an ancestor's tail page
        if same_page:
            pages = pages[1:]
    own = len(pages)
    if own and total % size and not ends:
        tree.pool.share(pages[-1:])
    grown.own_pages += own
    tree.cached_pages += own
    tree.cached_tokens += new_tokens
    if grown.locks:
        tree.locked_pages += own
    tree.order.inserted(grown, new_tokens)
    for listener in tree.listeners:
        listener.stored(grown)
    return grown


def split(tree: TreeState, node: Node, tokens: int) -> Node:
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
    upper.policy_data, upper.draft = node.policy_data, node.draft
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
    for listener in tree.listeners:
        listener.split(upper, node)
    return upper
