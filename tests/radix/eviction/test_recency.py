"""The order in which the policies by count and by segment evict."""

from __future__ import annotations

import random

import pytest
from sequences import serve

from coppice.radix import PagePool, RadixTree, check
from coppice.radix.eviction.recency import SegmentedLeastRecentlyUsed
from coppice.radix.eviction.records import Record

A, B, C, D = (list(range(number, number + 8)) for number in (100, 200, 300, 400))


def make_tree(policy: str, tokens: int = 32) -> RadixTree:
    """Pages of one token each: what is evicted is exactly what is missing."""
    return RadixTree(PagePool(tokens, 1), policy)


def cached(tree: RadixTree, *prompts: list[int]) -> list[int]:
    return [tree.match(prompt).length for prompt in prompts]


# -- lfu ---------------------------------------------------------------------------------------


def test_lfu_evicts_what_was_hit_least_and_the_older_of_equals() -> None:
    tree = make_tree("lfu")
    for prompt in (A, B, C, D, A, A, C, D):
        serve(tree, prompt)
    tree.evict(8)
    assert cached(tree, A, B, C, D) == [8, 0, 8, 8], "never hit"
    tree.evict(8)
    assert cached(tree, A, C, D) == [8, 0, 8], "hit once, before D was"
    serve(tree, B)
    tree.evict(8)
    assert cached(tree, A, B, D) == [8, 0, 8], "it counts anew after its eviction"
    tree.evict(12)
    assert cached(tree, A, D) == [4, 0], "hit twice"


# -- slru --------------------------------------------------------------------------------------


def test_slru_evicts_what_was_used_once_before_what_was_used_again() -> None:
    tree = make_tree("slru")
    for prompt in (A, A, B, C, D):
        serve(tree, prompt)
    tree.evict(20)
    assert cached(tree, A, B, C, D) == [8, 0, 0, 4]
    tree.evict(4)
    assert cached(tree, A, D) == [8, 0]
    tree.evict(2)
    assert cached(tree, A) == [6], "protected tokens are evicted when there are no others"


def test_slru_protects_what_was_hit_and_not_what_follows_it() -> None:
    tree = make_tree("slru")
    for prompt in (A, A[:3], B):
        serve(tree, prompt)
    tree.evict(5)
    assert cached(tree, A, B) == [3, 8]
    tree.evict(8)
    assert cached(tree, A, B) == [3, 0]


def test_slru_puts_the_oldest_protected_on_probation_when_there_are_too_many() -> None:
    tree = make_tree("slru")  # at most 25 tokens are protected
    for prompt in (A, B, C, D, A, B, C):
        serve(tree, prompt)
    tree.evict(1)
    assert cached(tree, A, B, C, D) == [8, 8, 8, 7], "24 tokens are protected, D is on probation"
    serve(tree, D)
    # Too many: A returns to probation as if used just then, before what is protected.
    tree.evict(8)
    assert cached(tree, A, B, C, D) == [0, 8, 8, 8]
    tree.evict(8)
    assert cached(tree, B, C, D) == [0, 8, 8]


def test_slru_remembers_that_evicted_tokens_were_used_before() -> None:
    tree = make_tree("slru")
    serve(tree, A)
    tree.evict(8)
    assert cached(tree, A) == [0]
    for prompt in (A, B, C, D):
        serve(tree, prompt)
    tree.evict(24)
    assert cached(tree, A, B, C, D) == [8, 0, 0, 0]
    tree.reset()
    for prompt in (B, A):
        serve(tree, prompt)
    tree.evict(8)
    assert cached(tree, A, B) == [8, 0], "forgotten: it was emptied on purpose"


def test_slru_lets_new_prompts_in_though_all_else_was_used_again() -> None:
    tree = make_tree("slru")
    for prompt in (A, B, C, A, B, C, A, B, C):
        serve(tree, prompt)
    fresh = list(range(1000, 1012))
    assert serve(tree, fresh) == 0
    assert serve(tree, fresh) == 12, "none of it was evicted for the rest of it"


@pytest.mark.parametrize("seed", range(6))
def test_slru_counts_exactly_what_is_protected_and_keeps_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(PagePool(60, 4), "slru")
    order = tree.order
    assert isinstance(order, SegmentedLeastRecentlyUsed)
    parts = [[rng.randrange(1000) for _ in range(rng.choice((1, 5, 16, 30)))] for _ in range(12)]
    for number in range(1500):
        prompt = [token for _ in range(rng.randint(1, 4)) for token in rng.choice(parts)]
        match = tree.match(prompt, limit=len(prompt) - 1)
        hold, table = tree.start(match)
        if match.length % 4 and not tree.claim_tail(hold):
            table[-1] = tree.allocate(1)[0]
        table += tree.allocate(-(-len(prompt) // 4) - len(table))
        tree.finish(hold, prompt, table)
        if number % 10 == 0:
            tree.evict(rng.randint(1, 4))
            records: dict[int, Record] = {}
            for node in tree.nodes():
                record = node.policy_data
                while record.parent is not None and record.start >= node.start:
                    records[id(record)] = record
                    record = record.parent
            protected = [each for each in records.values() if order._is_protected(each)]
            assert sum(each.length for each in protected) == order._protected_tokens <= 192
            assert sum(order._last_used.values()) == order._protected_tokens
            assert len(order._last_used) <= len(protected)
            check(tree, [])
    assert order._returned, "nothing ever returned to probation"
