"""What tiers are told of hits: each once, through splits, evictions and an emptied tree."""

from __future__ import annotations

from coppice.radix import PagePool, RadixTree
from coppice.radix.mirror.following import Uses


def insert(tree: RadixTree, tokens: list[int]) -> None:
    hold, table = tree.start(tree.match(tokens))
    if hold.length % tree.page_size and not tree.claim_tail(hold):
        table[-1] = tree.allocate(1)[0]
    table += tree.allocate(-(-len(tokens) // tree.page_size) - len(table))
    tree.finish(hold, tokens[hold.length :], table, begin=hold.length)


def hit(tree: RadixTree, uses: Uses, tokens: list[int], times: int = 1) -> None:
    for _ in range(times):
        hold = tree.lock(tree.match(tokens))
        node = hold.node
        while node is not None and node.parent is not None:
            uses.hit(node)
            node = node.parent
        tree.unlock(hold)


def taken(uses: Uses) -> dict[tuple[int, int], int]:
    """Hits by the positions of the node."""
    return {(node.start, node.end): times for node, times in uses.take()}


def test_hits_are_told_once() -> None:
    tree, uses = RadixTree(PagePool(40, 4)), Uses()
    tree.add_listener(uses)
    insert(tree, list(range(20)))
    assert not uses and not taken(uses)
    hit(tree, uses, list(range(20)), 3)
    assert uses
    assert taken(uses) == {(0, 20): 3}
    assert not uses and not taken(uses)
    hit(tree, uses, list(range(20)), 2)
    [(node, times)] = list(uses.take())
    assert times == 2
    uses.again(node, times)
    hit(tree, uses, list(range(20)))
    assert taken(uses) == {(0, 20): 3}, "what could not be told, and what came then"
    hit(tree, uses, list(range(8)))
    assert taken(uses) == {(0, 8): 1}, "the part of a node that was told of is known to be"
    insert(tree, [*range(8), 50, 51])
    hit(tree, uses, [*range(8), 50, 51])
    tree.evict(1)
    told = taken(uses)
    assert told[0, 8] >= 1
    tree.reset()
    assert not uses
    insert(tree, list(range(20)))
    hit(tree, uses, list(range(20)))
    assert taken(uses) == {(0, 20): 1}
