"""A full recount of tree and pool, for tests at every step and for repair in production."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from coppice.radix.node import Hold, Node
from coppice.radix.tokens import TOKEN_BYTES
from coppice.radix.tree import RadixTree


def check(tree: RadixTree, sequences: Iterable[tuple[Hold, array[int]]] = ()) -> None:
    """Raises AssertionError if any count differs from a recount, or an invariant is broken.

    `sequences` are all live holds with their page tables (an empty table for a bare lock). O(size
    of tree and pool).
    """
    pool, size = tree.pool, tree.page_size
    pool.check()
    references: Counter[int] = Counter()
    locks: Counter[int] = Counter()
    for hold, table in sequences:
        node: Node | None = hold.node
        assert node is not None, "a live sequence has lost its lock"
        assert hold.length == node.end, "a hold does not end with its node"
        while node is not None:
            locks[id(node)] += 1
            node = node.parent
        references.update(table[hold.length // size :])
        if len(table):
            covered = hold.length // size
            assert table[:covered] == tree.page_table(hold)[:covered], "a table has left the tree"

    live = {id(leaf) for leaf in tree.order}
    nodes = cached = locked = tokens = 0
    unique: set[int] = set()
    for namespace, root in tree.roots.items():
        assert root.namespace == namespace and root.parent is None
        assert root.children or root.locks, "an empty namespace was kept"
        assert root.locks == locks[id(root)], "root: lock count"
        for node in root.subtree():
            if node.parent is None:
                continue
            nodes += 1
            tokens += node.length
            _check_node(node, size)
            assert node.locks == locks[id(node)], f"node at {node.start}: lock count"
            references.update(node.pages)
            cached += node.own_pages
            locked += node.own_pages if node.locks else 0
            own = node.pages[len(node.pages) - node.own_pages :]
            assert not unique.intersection(own), "two nodes own one page"
            unique.update(own)
            if not node.children and not node.locks:
                assert id(node) in live, "an unlocked leaf is missing in the order of eviction"
    assert tree.num_nodes == nodes, f"num_nodes {tree.num_nodes}, recount {nodes}"
    assert tree.cached_tokens == tokens, f"cached_tokens {tree.cached_tokens}, recount {tokens}"
    assert tree.cached_pages == cached, f"cached_pages {tree.cached_pages}, recount {cached}"
    assert tree.locked_pages == locked, f"locked_pages {tree.locked_pages}, recount {locked}"
    for page, count in enumerate(pool.refs):
        assert max(count, 0) == references[page], (
            f"page {page}: {count} references, recount {references[page]}"
        )
    private = sum(1 for page in references if page not in unique)
    assert pool.free_pages + tree.cached_pages + private == pool.num_pages, "pages are lost"


def _check_node(node: Node, size: int) -> None:
    parent = node.parent
    assert parent is not None
    assert node.length > 0 and len(node.edge) >= node.length * TOKEN_BYTES, "an empty edge"
    assert node.start == parent.end, "a gap between parent and child"
    assert parent.children.get(node.edge[:TOKEN_BYTES]) is node, "a child under the wrong token"
    assert len(node.pages) == -(-node.end // size) - node.start // size, (
        "pages do not cover the edge"
    )
    shared = parent.shares(node.pages[0], node.start - node.start % size)
    assert node.own_pages == len(node.pages) - shared, "own_pages"
    assert parent.locks >= node.locks, "a lock that does not hold its path"
    assert parent.stamp >= node.stamp, "a parent that was used before its child"
    assert node.draft or not parent.draft, "a draft above what is none"
