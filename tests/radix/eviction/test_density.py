"""Eviction by hit density: what it learns, what it remembers, and that LRU does not beat it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
from histories import Request, check_history, document, history_of, hit_rate, path, serve

from coppice.radix import Hold, PagePool, RadixTree, check
from coppice.radix.eviction.density import HitDensity
from coppice.radix.eviction.past_uses import STRIDE
from coppice.radix.eviction.records import Record
from coppice.radix.eviction.reuse import ReuseTable


def order_of(tree: RadixTree) -> HitDensity:
    assert isinstance(tree.order, HitDensity)
    return tree.order


# -- workloads -------------------------------------------------------------------------------


def zipf() -> list[Request]:
    rng = random.Random(1)
    weights = [1 / rank for rank in range(1, 101)]
    numbers = rng.choices(range(100), weights, k=1500)
    return [(document(n, 60) + document(10_000 + i, 8), []) for i, n in enumerate(numbers)]


def thoughts() -> list[Request]:
    """Random revisits of a tree of depth 5 and fan-out 3."""
    rng = random.Random(2)
    requests: list[Request] = []
    for _ in range(1500):
        node, prompt = 0, []
        for _ in range(rng.randint(1, 5)):
            node = 3 * node + 1 + rng.randrange(3)
            prompt += document(node, 12)
        requests.append((prompt, []))
    return requests


def scan() -> list[Request]:
    rng = random.Random(3)
    return [
        (document(20_000 + i, 100), []) if rng.random() < 0.4 else request
        for i, request in enumerate(zipf())
    ]


def loop() -> list[Request]:
    return [(document(i % 40, 50), []) for i in range(1500)]


def shifting() -> list[Request]:
    rng = random.Random(4)
    weights = [1 / rank for rank in range(1, 101)]
    requests: list[Request] = []
    for _ in range(5):
        ranks = rng.sample(range(100), 100)
        requests += [(document(ranks[n], 60), []) for n in rng.choices(range(100), weights, k=300)]
    return requests


def conversations(stay: float) -> list[Request]:
    """Users come back with probability `stay`, after 0 .. 60 other requests, output included."""
    rng = random.Random(5)
    system = document(0, 20)
    waiting: list[tuple[int, int, list[int]]] = []
    requests: list[Request] = []
    for i in range(1500):
        waiting.sort(reverse=True)
        prompt = waiting.pop()[2] if waiting and waiting[-1][0] <= i else system
        prompt = prompt + document(30_000 + i, rng.randint(5, 30))
        output = document(50_000 + i, rng.randint(1, 20))
        requests.append((prompt, output))
        if rng.random() < stay:
            waiting.append((i + rng.randint(1, 60), i, prompt + output))
    return requests


def recency() -> list[Request]:
    """Each request repeats the k-th last different document, k geometric: what LRU is best at."""
    rng = random.Random(6)
    stack: list[int] = []
    requests: list[Request] = []
    for i in range(1500):
        depth = int(rng.expovariate(0.06))
        number = i if depth >= len(stack) or rng.random() < 0.2 else stack.pop(-1 - depth)
        stack.append(number)
        requests.append((document(number, 50), []))
    return requests


def tiny() -> list[Request]:
    return zipf()[:60]


WORKLOADS: dict[str, Callable[[], list[Request]]] = {
    "zipf": zipf,
    "thoughts": thoughts,
    "scan": scan,
    "loop": loop,
    "shifting": shifting,
    "returning users": lambda: conversations(0.8),
    "passing users": lambda: conversations(0.3),
    "recency": recency,
    "tiny": tiny,
}


@pytest.mark.parametrize("capacity", [200, 700, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_lru_does_not_beat_it(workload: str, capacity: int) -> None:
    requests = WORKLOADS[workload]()
    capacity = max(capacity, *(len(prompt) + len(output) for prompt, output in requests))
    assert hit_rate("density", capacity, requests) >= hit_rate("lru", capacity, requests) - 0.5


@pytest.mark.parametrize(
    ("workload", "capacity", "gain"), [("zipf", 700, 5), ("scan", 700, 3), ("loop", 1000, 20)]
)
def test_beats_lru_where_recency_misleads(workload: str, capacity: int, gain: float) -> None:
    requests = WORKLOADS[workload]()
    lru, density = (hit_rate(policy, capacity, requests) for policy in ("lru", "density"))
    assert density >= lru + gain


def test_a_short_run_is_lru() -> None:
    for capacity in (100, 400, 1000):
        assert hit_rate("density", capacity, zipf()[:200]) == hit_rate(
            "lru", capacity, zipf()[:200]
        )


def test_prompts_used_once_are_evicted_first() -> None:
    tree = RadixTree(PagePool(1000, 1), policy="density")
    rng = random.Random(7)
    for i in range(1200):
        number = rng.randrange(12) if i % 2 else 10_000 + i
        serve(tree, document(number, 50), [])
    known = [number for number in range(12) if tree.match(document(number, 50)).length == 50]
    assert len(known) >= 8
    tree.evict(150)
    assert all(tree.match(document(number, 50)).length == 50 for number in known)
    lru = RadixTree(PagePool(1000, 1), policy="lru")
    for number in [*known, *range(20_000, 20_020 - len(known))]:
        serve(lru, document(number, 50), [])
    lru.evict(150)
    assert not all(lru.match(document(number, 50)).length == 50 for number in known)


# -- the table -------------------------------------------------------------------------------


def test_a_table_without_observations_orders_by_recency() -> None:
    for densities in ReuseTable().density:
        assert densities == sorted(densities, reverse=True)
    table = ReuseTable()
    table.learn([Record(None, 0, 10, 0)], 1, 1, 1000.0, 1)
    for densities in table.density:
        assert densities == sorted(densities, reverse=True)


def test_density_rises_towards_the_age_of_reuse_and_falls_after_it() -> None:
    table = ReuseTable()
    record = Record(None, 0, 10, 0)
    for _ in range(1000):
        table.ended(record, 50, True)  # bucket 6: ages 32 .. 63
        table.ended(record, 5000, False)
    table.learn([record], 1, 1, 1e9, 1)
    densities = table.density[0]
    assert max(densities) == densities[6]
    assert densities[1] < densities[6]
    assert densities[7] < densities[1]


def test_classes_by_uses_have_densities_of_their_own() -> None:
    table = ReuseTable()
    once, often = Record(None, 0, 10, 0), Record(None, 0, 10, 0)
    often.uses = 9
    for _ in range(100):
        table.ended(once, 1000, False)
        table.ended(often, 20, True)
    table.learn([once, often], 1, 1, 1e9, 1)
    assert table.density[5][3] > table.density[0][3]


# -- the history -----------------------------------------------------------------------------


def test_uses_are_remembered_after_eviction() -> None:
    tree = RadixTree(PagePool(1000, 1), policy="density")
    prompt = document(1, 300)
    for _ in range(3):
        serve(tree, prompt, [])
    tree.evict(1000)
    assert tree.cached_tokens == 0
    serve(tree, prompt + document(2, 50), [])
    (node,) = tree.nodes()
    uses = [(record.uses, record.length) for record in path(node)]
    assert uses[-1] == (1, 50)
    assert sum(length for count, length in uses if count >= 3) >= 299
    check_history(tree)


@pytest.mark.parametrize("chunk", [37, 100, 1000])
def test_a_ghost_revives_as_far_as_it_is_repeated(chunk: int) -> None:
    tree = RadixTree(PagePool(2000, 1), policy="density")
    serve(tree, document(1, 1000), [])
    tree.evict(2000)
    serve(tree, document(1, 1000)[:600] + document(2, 400), [], chunk)
    again = 0
    for record in path(next(tree.nodes())):
        again += record.length if record.uses > 1 else 0
    assert abs(again - 600) < STRIDE
    check_history(tree)


def test_pages_evicted_one_by_one_leave_one_ghost() -> None:
    tree = RadixTree(PagePool(1000, 1), policy="density")
    serve(tree, document(1, 400), [])
    for _ in range(250):
        tree.evict(1)
    ghosts = [record for record in history_of(tree).sample(1 << 30)[0] if not record.live]
    assert [ghost.length for ghost in ghosts] == [250]
    check_history(tree)
    serve(tree, document(1, 400), [])
    assert not [record for record in history_of(tree).sample(1 << 30)[0] if not record.live]
    check_history(tree)


def test_the_simulated_lru_hits_what_lru_hits() -> None:
    requests = zipf()
    tree = RadixTree(PagePool(800, 1), policy="density")
    own = sum(serve(tree, *request) for request in requests)
    history = history_of(tree)
    assert history.hit_tokens == own
    lru = RadixTree(PagePool(800, 1), policy="lru")
    real = sum(serve(lru, *request) for request in requests)
    assert order_of(tree)._shadow.hits == pytest.approx(real, rel=0.03)


def test_tail_ends_where_another_history_begins() -> None:
    tree = RadixTree(PagePool(1000, 1), policy="density")
    serve(tree, document(1, 128), [])
    tree.evict(1000)
    serve(tree, document(1, 128) + document(2, 30), [])
    (leaf,) = tree.nodes()
    assert order_of(tree).tail(leaf) == 30
    tree.evict(30)
    assert order_of(tree).tail(leaf) == 128


def test_ghosts_are_bounded_and_a_reset_forgets_them() -> None:
    tree = RadixTree(PagePool(500, 1), policy="density")
    for i in range(2000):
        serve(tree, document(i, 50), [])
    history = history_of(tree)
    check_history(tree)
    assert history._num_ghosts == history._max_ghosts
    tree.reset()
    assert history.sample(1) == ([], 1)
    check_history(tree)
    serve(tree, document(1, 50), [])
    check_history(tree)


def test_queues_stay_short_without_eviction() -> None:
    tree = RadixTree(PagePool(500, 1), policy="density")
    for _ in range(5000):
        serve(tree, document(1, 20), [])
    assert len(order_of(tree)._shadow._entries) < 2000


@pytest.mark.parametrize("policy", ["density", "adaptive"])
@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 4, 16))
    tree = RadixTree(PagePool(400 // size + 8, size), policy)
    running: list[tuple[Hold, list[int], array[int]]] = []
    for step in range(1500):
        if len(running) < 3 and rng.random() < 0.5:
            # Few tokens and few namespaces, so that paths meet, diverge and return.
            prompt = [t for _ in range(rng.randint(1, 4)) for t in document(rng.randrange(4), 23)]
            prompt = prompt[: rng.randint(2, len(prompt))]
            name = rng.choice((None, "a"))
            hold = tree.lock(tree.match(prompt[:-1], name))
            table = tree.page_table(hold)
            if hold.length % size and not tree.claim_tail(hold):
                if not tree.pool.free_pages and not tree.evictable_pages:
                    tree.unlock(hold)
                    continue
                table[-1] = tree.allocate(1)[0]
            running.append((hold, prompt, table))
        elif running:
            hold, prompt, table = running.pop(rng.randrange(len(running)))
            end = rng.randint(hold.length, len(prompt))
            need = -(-end // size) - len(table)
            if need <= tree.pool.free_pages + tree.evictable_pages:
                if need > 0:
                    table += tree.allocate(need)
                tree.insert(hold, prompt[:end], table)
            if end < len(prompt) and rng.random() < 0.7:
                running.append((hold, prompt, table))
            else:
                tree.release(hold, table)
        if rng.random() < 0.1:
            tree.evict(rng.randint(1, 5))
        if step % 10 == 0:
            check(tree, [(hold, table) for hold, _, table in running])
            check_history(tree, alone=False)
    assert tree.evicted_tokens > 1000
