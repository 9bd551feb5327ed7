"""Shared prefixes with their pages and idle age, and the nodes of a picture of the tree.

Which prefixes are listed is tested in `test_tree.py`.
"""

from __future__ import annotations

from array import array

import pytest

from coppice.radix import PagePool, PrefixSavings, RadixTree, top_prefixes
from coppice.radix.accounting.near_misses import SHOWN_TOKENS
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


def serve_whole(tree: RadixTree, prompt: list[int]) -> None:
    hold = tree.lock(tree.match(prompt))
    table = tree.page_table(hold)
    table += tree.allocate(len(prompt) - len(table))
    tree.insert(hold, prompt, table)
    tree.release(hold, table)


def test_nodes_carry_what_their_subtrees_saved() -> None:
    tree = RadixTree(PagePool(1000, 1))
    stem = list(range(50))
    for prompt in (stem + [60] * 5, stem + [70] * 8, stem + [60] * 5, stem + [70] * 8, [9, 9]):
        serve_whole(tree, prompt)
    stem_node, *leaves = PrefixSavings(tree).nodes(10)
    assert (stem_node.parent, stem_node.start, stem_node.end) == (-1, 0, 50)
    assert (stem_node.hits, stem_node.tokens_saved) == (3, 150)
    assert stem_node.subtree_saved == 150 + 5 + 8
    assert stem_node.token_ids == tuple(range(SHOWN_TOKENS))
    assert [(leaf.parent, leaf.length, leaf.subtree_saved) for leaf in leaves] == [
        (0, 8, 8),
        (0, 5, 5),
    ]
    assert PrefixSavings(tree).nodes(1) == (stem_node,)
    assert PrefixSavings(tree).nodes(0) == ()
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        PrefixSavings(tree).nodes(-1)


def test_an_only_child_with_as_many_hits_is_part_of_its_parent() -> None:
    tree = RadixTree(PagePool(1000, 1))
    serve_whole(tree, [1, 2, 3, 4, 5, 6])
    serve_whole(tree, [1, 2, 3, 4, 5, 6])
    (whole,) = PrefixSavings(tree).nodes(10)
    tree.unlock(tree.lock(tree.match([1, 2, 3]), use=False))  # splits, and counts for nothing
    assert tree.num_nodes == 2
    assert PrefixSavings(tree).nodes(10) == (whole,)
