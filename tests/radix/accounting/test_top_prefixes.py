"""Pages and idle age of the shared prefixes; which they are is told in `test_tree.py`."""

from __future__ import annotations

from array import array

from coppice.radix import PagePool, RadixTree, top_prefixes
from coppice.radix.accounting.timeline import Timeline


def cache(tree: RadixTree, tokens: list[int]) -> None:
    hold = tree.lock(tree.match(tokens[:-1]))
    table = tree.page_table(hold)
    if hold.length % tree.page_size and not tree.claim_tail(hold):
        table[-1] = tree.allocate(1)[0]
    missing = -(-len(tokens) // tree.page_size) - len(table)
    table += tree.allocate(missing) if missing > 0 else array("i")
    tree.insert(hold, tokens, table)
    tree.release(hold, table)


def test_resident_pages_and_idle_age() -> None:
    tree, uses = RadixTree(PagePool(64, 4)), Timeline()
    for second, tokens in enumerate([[50, 51, 52, 53, 54], [*range(10), 90], [*range(10), 91]]):
        cache(tree, tokens)
        uses.record(tree.clock, float(second))
    (prefix,) = top_prefixes(tree, 5, uses=uses, now=10.0)
    assert (prefix.num_tokens, prefix.hits, prefix.tokens_saved) == (10, 1, 10)
    assert prefix.resident_pages == 3
    assert prefix.idle_seconds == 8.0
    (untimed,) = top_prefixes(tree, 5)
    assert untimed.idle_seconds is None
    tree.evict(tree.cached_pages - 1)
    assert [(p.num_tokens, p.resident_pages) for p in top_prefixes(tree, 5)] == [(4, 1)]


def test_nodes_that_were_hit_come_parents_first() -> None:
    tree = RadixTree(PagePool(64, 4))
    for tokens in ([*range(10), 90], [*range(10), 91], [*range(10), 91, 92], [50, 51]):
        cache(tree, tokens)
    hit = list(tree.hit_nodes())
    assert [(node.start, node.end, node.hits) for node in hit] == [(0, 10, 2), (10, 11, 1)]
    assert {id(node) for node in hit} == {id(node) for node in tree.nodes() if node.hits}


def test_a_use_after_the_last_record_has_no_time() -> None:
    tree, uses = RadixTree(PagePool(64, 4)), Timeline()
    cache(tree, [*range(10), 90])
    uses.record(tree.clock, 1.0)
    cache(tree, [*range(10), 91])
    (prefix,) = top_prefixes(tree, 5, uses=uses, now=2.0)
    assert prefix.idle_seconds is None
