"""Eviction by the rule that earns most now: its shadow caches, its choice, its bounds."""

from __future__ import annotations

import random

import pytest
from histories import Request, check_history, document, history_of, hit_rate, serve

from coppice.radix import PagePool, RadixTree
from coppice.radix.eviction.adaptive import Adaptive
from coppice.radix.eviction.shadows import SegmentShadow

RULES = ("lru", "lfu", "slru", "density")  # in the order of the shadows


def order_of(tree: RadixTree) -> Adaptive:
    assert isinstance(tree.order, Adaptive)
    return tree.order


def loop(requests: int) -> list[Request]:
    """Forty documents over and over in one order: LRU hits none of them."""
    return [(document(number % 40, 50), []) for number in range(requests)]


def recent(requests: int) -> list[Request]:
    """A new document, or one of the last few: the older, the less likely. LRU is best."""
    rng = random.Random(6)
    stack: list[int] = []
    made: list[Request] = []
    for number in range(1000, 1000 + requests):
        depth = int(rng.expovariate(0.06))
        fresh = depth >= len(stack) or rng.random() < 0.2
        stack.append(number if fresh else stack.pop(-1 - depth))
        made.append((document(stack[-1], 50), []))
    return made


def zipf(requests: int, once: float = 0.0) -> list[Request]:
    rng = random.Random(1)
    weights = [1 / rank for rank in range(1, 101)]
    return [
        (document(20_000 + i, 60) if rng.random() < once else document(n, 60), [])
        for i, n in enumerate(rng.choices(range(100), weights, k=requests))
    ]


def test_it_follows_the_best_rule_when_that_changes() -> None:
    tree = RadixTree(PagePool(1000, 1), policy="adaptive")
    halves = loop(1000), recent(1500)
    hits = [sum(serve(tree, *each) for each in half) for half in halves]
    best = []
    for half in halves:  # a tree of its own for each half: none has to change
        rates = {rule: hit_rate(rule, 1000, half) for rule in RULES}
        best.append(max(rates.values()))
        assert max(rates.values()) - min(rates.values()) > 10, "the rule does not matter"
    rates = [
        100 * got / sum(len(prompt) for prompt, _ in half)
        for got, half in zip(hits, halves, strict=True)
    ]
    assert rates[0] >= best[0] - 5
    assert rates[1] >= best[1] - 5  # it takes a few hundred requests
    # No rule that is followed throughout does as well.
    both = [*halves[0], *halves[1]]
    own = 100 * sum(hits) / sum(len(prompt) for prompt, _ in both)
    assert own >= max(hit_rate(rule, 1000, both) for rule in RULES) - 0.2


def test_it_changes_its_rule() -> None:
    tree = RadixTree(PagePool(1000, 1), policy="adaptive")
    for request in loop(1000):
        serve(tree, *request)
    assert RULES[order_of(tree)._rule] != "lru"
    for request in recent(2500):
        serve(tree, *request)
    scores = order_of(tree)._scores
    behind = max(scores) - scores[order_of(tree)._rule]
    assert behind <= 0.05 * 1000
    assert scores[0] > scores[1] + 0.05 * 1000, "lfu should be far behind"


@pytest.mark.parametrize("once", [0.0, 0.4])
def test_each_shadow_hits_what_a_tree_by_its_rule_hits(once: float) -> None:
    requests = zipf(1500, once)
    total = sum(len(prompt) for prompt, _ in requests)
    tree = RadixTree(PagePool(1200, 1), policy="adaptive")
    for request in requests:
        serve(tree, *request)
    lru, lfu, slru, _ = (100 * shadow.hits / total for shadow in order_of(tree)._shadows)
    assert lru == pytest.approx(hit_rate("lru", 1200, requests), abs=1)
    assert lfu >= hit_rate("lfu", 1200, requests) - 1  # it counts also uses before an eviction
    assert slru == pytest.approx(hit_rate("slru", 1200, requests), abs=1)


@pytest.mark.parametrize("once", [0.0, 0.4])
def test_it_is_near_the_best_rule(once: float) -> None:
    requests = zipf(1200, once)
    best = max(hit_rate(rule, 1000, requests) for rule in RULES)
    assert hit_rate("adaptive", 1000, requests) >= best - 1


def test_memory_is_bounded() -> None:
    tree = RadixTree(PagePool(500, 1), policy="adaptive")
    order, history = order_of(tree), history_of(tree)
    rng = random.Random(3)
    for number in range(2000):
        serve(tree, document(rng.choice((rng.randrange(20), 1000 + number)), 25), [])
    check_history(tree)
    records = len(history.sample(1 << 30)[0])
    assert history._num_ghosts <= history._max_ghosts
    assert records <= tree.num_nodes + history._max_ghosts + 40
    for shadow in order._shadows:
        assert shadow.tokens <= 500 + 25
        assert len(shadow._entries) <= 64 + 4 * records
        if isinstance(shadow, SegmentShadow):
            assert len(shadow._protected) <= 64 + 4 * records
            assert len(shadow._last_used) <= records
    tree.reset()
    assert [shadow.tokens for shadow in order._shadows] == [0] * 4
    assert not any(shadow._entries for shadow in order._shadows)
    serve(tree, document(1, 50), [])
    check_history(tree)


def test_the_shadow_of_segments_counts_exactly_what_it_protects() -> None:
    tree = RadixTree(PagePool(600, 1), policy="adaptive")
    shadow = order_of(tree)._shadows[2]
    assert isinstance(shadow, SegmentShadow)
    for number, request in enumerate(zipf(800, 0.3)):
        serve(tree, *request)
        if number % 50 == 49:
            records = history_of(tree).sample(1 << 30)[0]
            protected = [r for r in records if r.held & shadow.bit and shadow.is_protected(r)]
            assert shadow._protected_tokens == sum(record.length for record in protected)
            assert sum(shadow._last_used.values()) == shadow._protected_tokens
