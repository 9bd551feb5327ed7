"""Shared prefixes with their pages and idle age, and the nodes of a picture of the tree."""

from __future__ import annotations

import numpy as np
import pytest
from sequences import Run, serve

from coppice.radix import Inserted, PagePool, PrefixSavings, RadixTree, SharedPrefix
from coppice.radix.accounting.near_misses import SHOWN_TOKENS
from coppice.radix.accounting.timeline import Timeline


def test_resident_pages_and_idle_age() -> None:
    tree, uses = RadixTree(PagePool(64, 4)), Timeline()
    for second, tokens in enumerate([[50, 51, 52, 53, 54], [*range(10), 90], [*range(10), 91]]):
        serve(tree, tokens)
        uses.record(tree.clock, float(second))
    (prefix,) = PrefixSavings(tree, uses=uses, now=10.0).prefixes(5)
    assert (prefix.num_tokens, prefix.hits, prefix.tokens_saved) == (10, 1, 10)
    assert prefix.resident_pages == 3
    assert prefix.idle_seconds == 8.0
    (untimed,) = PrefixSavings(tree).prefixes(5)
    assert untimed.idle_seconds is None
    tree.evict(tree.cached_pages - 1)
    assert [(p.num_tokens, p.resident_pages) for p in PrefixSavings(tree).prefixes(5)] == [(4, 1)]


def test_a_use_after_the_last_record_has_no_time() -> None:
    tree, uses = RadixTree(PagePool(64, 4)), Timeline()
    serve(tree, [*range(10), 90])
    uses.record(tree.clock, 1.0)
    serve(tree, [*range(10), 91])
    (prefix,) = PrefixSavings(tree, uses=uses, now=2.0).prefixes(5)
    assert prefix.idle_seconds is None


def test_nodes_carry_what_their_subtrees_saved() -> None:
    tree = RadixTree(PagePool(1000, 1))
    stem = list(range(50))
    for prompt in (stem + [60] * 5, stem + [70] * 8, stem + [60] * 5, stem + [70] * 8, [9, 9]):
        serve(tree, prompt)
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
    serve(tree, [1, 2, 3, 4, 5, 6])
    serve(tree, [1, 2, 3, 4, 5, 6])
    (whole,) = PrefixSavings(tree).nodes(10)
    tree.unlock(tree.lock(tree.match([1, 2, 3]), use=False))  # splits, and counts for nothing
    assert tree.num_nodes == 2
    assert PrefixSavings(tree).nodes(10) == (whole,)


# -- which prefixes are listed -------------------------------------------------------------------


def _tops(tree: RadixTree, count: int = 10) -> list[tuple[int, int, int]]:
    tops = PrefixSavings(tree).prefixes(count)
    return [(top.num_tokens, top.hits, top.tokens_saved) for top in tops]


def test_top_prefixes_are_those_that_saved_most() -> None:
    tree = RadixTree(PagePool(256, 4))
    for tail in range(4):
        serve(tree, [*range(30), 1000 + tail])
    for tail in range(11):
        serve(tree, [*range(500, 510), 1000 + tail])
    serve(tree, range(700, 760))
    assert _tops(tree) == [(10, 10, 100), (30, 3, 90)]
    assert _tops(tree, 1) == [(10, 10, 100)]
    assert PrefixSavings(tree).prefixes(0) == ()
    assert PrefixSavings(tree).prefixes(2)[0] == SharedPrefix(
        np.arange(500, 510, dtype=np.int32).tobytes(), 10, 100, 3
    )
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        PrefixSavings(tree).prefixes(-1)


def test_hits_are_counted_for_requests_that_were_locked_before_any_of_them_inserted() -> None:
    tree = RadixTree(PagePool(256, 4))
    serve(tree, [*range(30), 99])
    runs = [Run(tree, [*range(30), 1000 + tail]) for tail in range(8)]
    for run in runs:
        run.finish()
    assert _tops(tree) == [(30, 8, 240)]


def test_hits_of_a_prompt_that_comes_again_are_counted() -> None:
    """The last token is always computed, so the hit ends one before the end."""
    tree = RadixTree(PagePool(256, 4))
    prompt = list(range(30))
    serve(tree, prompt)
    for _ in range(5):
        run = Run(tree, prompt[:-1])
        run.grow(prompt[-1:])
        assert run.insert() == Inserted(0, 1)
        run.release()
    assert _tops(tree) == [(29, 5, 145)]


def test_the_turns_of_a_conversation_are_counted_for_what_each_saved() -> None:
    tree = RadixTree(PagePool(256, 4))
    for turn in range(1, 6):
        serve(tree, range(10 * turn))
    assert _tops(tree) == [(10, 4, 40), (20, 3, 30), (30, 2, 20), (40, 1, 10)]


def test_a_fork_is_no_hit_and_a_prefix_without_hits_is_not_listed() -> None:
    tree = RadixTree(PagePool(64, 4))
    run = Run(tree, range(10))
    run.insert()
    tree.unlock(tree.fork(run.hold))
    run.release()
    assert PrefixSavings(tree).prefixes(10) == ()


def test_a_prefix_within_another_is_listed_only_if_more_hit_it() -> None:
    tree = RadixTree(PagePool(64, 4))
    serve(tree, range(10))
    for tail in range(3):
        serve(tree, [*range(10), 50, 51, 60 + tail])
    assert _tops(tree) == [(10, 3, 30), (12, 2, 4)]


def test_a_prefix_without_hits_of_its_own_is_not_listed() -> None:
    tree = RadixTree(PagePool(64, 4))
    slow = Run(tree, [0, 1, 2, 3, 90])
    serve(tree, range(10))
    for tail in range(3):
        serve(tree, [*range(10), 60 + tail])
    slow.finish()  # a branch at 4, where no hit ended
    assert tree.num_nodes == 6
    assert _tops(tree) == [(10, 3, 30)]


def test_hits_of_an_evicted_prefix_are_forgotten() -> None:
    tree = RadixTree(PagePool(64, 4))
    serve(tree, range(10))
    tree.unlock(tree.lock(tree.match(range(10))))
    assert _tops(tree) == [(10, 1, 10)]
    tree.evict(1)
    assert _tops(tree) == [(8, 1, 8)]
    tree.evict(2)
    serve(tree, range(10))
    assert _tops(tree) == []
