"""The queue's order against a plain search over all waiting sequences, while the cache changes."""

from __future__ import annotations

import random
from array import array

import pytest

from coppice.radix import PagePool, RadixTree
from coppice.radix.tokens import common_prefix
from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule import queue, queue_tree
from coppice.runtime.schedule.queue import WaitingQueue


def sequence(arrival: int, tokens: list[int], namespace: object = None, priority: int = 0):
    prompt, end = array("i", tokens), len(tokens) + 1
    return Sequence(
        Request(str(arrival), prompt, SamplingParams(), namespace, arrival, 0, end, priority)
    )


def enter(tree: RadixTree, tokens: list[int], namespace: object = None) -> None:
    """Enters tokens in the tree, as if they had been computed."""
    hold = tree.lock(tree.match(tokens, namespace))
    table = tree.page_table(hold)
    if hold.length % tree.page_size and not tree.claim_tail(hold):
        table[-1] = tree.allocate(1)[0]
    table += tree.allocate(-(-len(tokens) // tree.page_size) - len(table))
    tree.insert(hold, tokens, table)
    tree.release(hold, table)


class World:
    """A queue and its tree, and plain lists of what they should hold."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.tree = RadixTree(PagePool(40, 4))
        self.queue = WaitingQueue(self.tree, policy, slack=10**9, overtaking=None)
        self.waiting: dict[int, Sequence] = {}
        self.leading: list[Sequence] = []
        self.aside: list[Sequence] = []
        self.arrivals = 0

    def tokens(self) -> list[int]:
        runs = [[1] * 5, [2] * 3, [1, 2], [3], [2, 2, 1, 1]]
        return [t for _ in range(self.rng.randint(1, 5)) for t in self.rng.choice(runs)]

    def namespace(self) -> str | None:
        return self.rng.choice([None, None, "a"])

    def hit(self, each: Sequence) -> int:
        return self.tree.match(each.tokens, each.request.namespace).length

    def shared(self, each: Sequence) -> int:
        """Tokens after its hit that a leader computes."""
        lengths = [
            common_prefix(each.tokens.tobytes(), 0, leader.tokens.tobytes()) // 4
            for leader in self.leading
            if leader.request.namespace == each.request.namespace
        ]
        return max(0, max(lengths, default=0) - self.hit(each))

    def expected(self) -> Sequence | None:
        free = [
            each
            for each in self.waiting.values()
            if self.shared(each) < queue_tree.MIN_SHARED_TOKENS and each not in self.aside
        ]
        keys = {
            "lpm": lambda each: (-self.hit(each), each.request.arrival),
            "fcfs": lambda each: each.request.arrival,
            "priority": lambda each: (
                each.request.priority, -self.hit(each), each.request.arrival,
            ),
        }  # fmt: skip
        return min(free, key=keys[self.policy], default=None)

    def step(self) -> None:
        rng, chance = self.rng, self.rng.random()
        if chance < 0.3 and len(self.waiting) < 25:
            made = sequence(self.arrivals, self.tokens(), self.namespace(), rng.randint(-1, 1))
            self.arrivals += 1
            self.waiting[made.request.arrival] = made
            self.queue.add(made, self.hit(made))
        elif chance < 0.5:
            enter(self.tree, self.tokens(), self.namespace())
        elif chance < 0.65:
            self.tree.evict(rng.randint(0, 12))
        elif chance < 0.75 and self.waiting:
            removed = self.waiting.pop(rng.choice(list(self.waiting)))
            self.queue.remove(removed)
            if removed in self.aside:
                self.aside.remove(removed)
            if rng.random() < 0.7:
                removed.computed = self.hit(removed)
                self.queue.lead(removed, removed.computed)
                self.leading.append(removed)
        elif chance < 0.85 and self.leading:
            leader = self.leading.pop(rng.randrange(len(self.leading)))
            if rng.random() < 0.6:
                enter(self.tree, list(leader.tokens), leader.request.namespace)
            self.queue.stop_leading(leader)
        elif chance < 0.9 and self.waiting:
            kept = [each for each in self.waiting.values() if each not in self.aside]
            if len(self.aside) < 3 and kept:
                self.aside.append(rng.choice(kept))
                self.queue.set_aside(self.aside[-1])
            else:
                self.queue.restore(self.hit)
                self.aside.clear()

    def check(self) -> None:
        assert len(self.queue) == len(self.waiting)
        found, expected = self.queue.next(), self.expected()
        if expected is None:
            assert found is None
            return
        assert found is not None
        assert found == (expected, False)
        assert self.queue.in_flight(expected) == self.shared(expected)


@pytest.mark.parametrize("least", [1, 4, 16])
@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority"])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 6), marks=pytest.mark.slow)])
def test_the_next_is_the_one_that_a_plain_search_finds(policy, least, seeds, monkeypatch):
    monkeypatch.setattr(queue_tree, "MIN_SHARED_TOKENS", least)
    monkeypatch.setattr(queue, "MIN_SHARED_TOKENS", least)
    for seed in seeds:
        world = World(policy, seed)
        for _ in range(250):
            world.step()
            world.check()
        while world.waiting:
            world.queue.remove(world.waiting.popitem()[1])
        while world.leading:
            world.queue.stop_leading(world.leading.pop())
        assert world.queue.next() is None
        assert not world.queue._trees and not world.queue._order, "something is left"


def test_what_is_set_aside_is_not_offered_from_a_leaders_path():
    """A branch can keep its own best sequence, and yet have none to offer to the branch above.

        0 .. 3        `late` leaves the leader's path after these tokens
        4 .. 7        `free` leaves it after these: 8 shared tokens are not worth waiting for
        8 .. 16       `bound` shares these 17 tokens with the leader, and waits for them

    The branch 4 .. 7 offers `bound`, with or without `free`: from its beginning the leader computes
    only 13 tokens. From the root it computes 17, so that `bound` is not offered there.
    """
    queue = WaitingQueue(RadixTree(PagePool(64, 4)), "lpm", slack=10**9, overtaking=None)
    shared = list(range(17))
    leader = sequence(0, [*shared, 90])
    bound = sequence(1, [*shared, 91])
    free = sequence(2, [*shared[:8], 92])
    late = sequence(3, [*shared[:4], 93])
    queue.lead(leader, 0)
    for each in (bound, free, late):
        queue.add(each, 0)
    assert queue.next() == (free, False)
    queue.set_aside(free)
    assert queue.next() == (late, False)
    queue.set_aside(late)
    assert queue.next() is None
    queue.restore(lambda each: 0)
    assert queue.next() == (free, False)
    queue.stop_leading(leader)
    assert queue.next() == (bound, False)


def test_dfs_descends_where_most_wait():
    tree = RadixTree(PagePool(64, 4))
    enter(tree, [1] * 8)
    queue = WaitingQueue(tree, "dfs", slack=10**9, overtaking=None)
    prompts = [[5, 5, 5]] + [[1] * 8 + [2, n] for n in range(3)] + [[1] * 8 + [3, 1], [5, 5, 6]]
    made = [sequence(number, tokens) for number, tokens in enumerate(prompts)]
    for each in made:
        queue.add(each, tree.match(each.tokens).length)
    order = []
    while (found := queue.next()) is not None:
        order.append(found[0].request.arrival)
        enter(tree, list(found[0].tokens))
        queue.remove(found[0])
    assert order == [1, 2, 3, 4, 0, 5]


def test_after_a_reset_no_waiting_sequence_has_a_hit():
    tree = RadixTree(PagePool(64, 4))
    enter(tree, [1] * 8)
    enter(tree, [1] * 8, "a")
    queue = WaitingQueue(tree, "lpm", slack=10**9, overtaking=None)
    cold, aside = sequence(0, [2] * 9), sequence(2, [1] * 9, "a")
    queue.add(cold, 0)
    for each in (sequence(1, [1] * 9), aside):
        queue.add(each, 8)
    assert queue.next()[0].request.arrival == 1
    queue.set_aside(aside)
    tree.reset()
    assert queue.next() == (cold, False)


def test_a_sequence_that_was_overtaken_by_much_is_next_and_none_may_pass():
    tree = RadixTree(PagePool(64, 4))
    enter(tree, [1] * 8)
    queue = WaitingQueue(tree, "lpm", slack=100, overtaking=0.15)
    cold = sequence(0, [2] * 20)
    queue.add(cold, 0)
    for arrival in range(1, 20):
        hot = sequence(arrival, [1] * 8 + [arrival])
        queue.add(hot, 8)
        found, next_of_all = queue.next()
        if found is cold:
            assert next_of_all
            break
        assert found is hot and not next_of_all
        queue.remove(hot)
    assert 3 <= arrival <= 5, "33 tokens of work each: four of them pass a slack of 100"


def test_preempted_ones_come_first_in_order_of_arrival():
    tree = RadixTree(PagePool(64, 4))
    queue = WaitingQueue(tree, "lpm", slack=100, overtaking=0.15)
    made = [sequence(number, [number + 1] * 5) for number in range(4)]
    for number in (0, 3, 2):
        made[number].preempted = number > 0
        queue.add(made[number], 0)
    assert queue.next() == (made[2], True)
    queue.remove(made[2])
    assert queue.next() == (made[3], True)
    assert (queue.requests, queue.tokens) == (1, 5), "the others have begun"
    assert list(queue) == [made[3], made[0]]


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="scheduling_policy must be one of lpm, dfs, fcfs"):
        WaitingQueue(RadixTree(PagePool(1, 1)), "sjf", slack=1, overtaking=None)


def test_a_class_is_kept_only_while_one_of_it_waits():
    """A client chooses the priorities, so there may be any number of them."""
    waiting = WaitingQueue(RadixTree(PagePool(64, 4)), "priority", slack=8, overtaking=0.1)
    each = [sequence(number, [1, 2, number], priority=number) for number in range(50)]
    for one in each:
        waiting.add(one, 0)
    assert len(waiting._classes) == 50
    for one in each[:-1]:
        waiting.remove(one)
    assert len(waiting._classes) == 1
    assert waiting.next() == (each[-1], False)
    waiting.remove(each[-1])
    assert not waiting._classes
    assert waiting.next() is None


@pytest.mark.parametrize("policy", ["lpm", "priority", "fcfs", "dfs"])
def test_what_tiers_save_counts_as_tokens_hit(policy):
    tree = RadixTree(PagePool(40, 4))
    queue = WaitingQueue(tree, policy, slack=10**9, overtaking=None)
    enter(tree, [1] * 10)
    small, hit, big = (
        sequence(at, [token] * 30, priority=at // 3 if policy == "priority" else 0)
        for at, token in enumerate((3, 1, 2))
    )
    for each, cached in ((small, 0), (hit, 10), (big, 0)):
        queue.add(each, cached)
    before = queue.next()[0]
    assert before is (small if policy == "fcfs" else hit)
    queue.prefer(small, 9)
    assert queue.next()[0] is before, "it saves less"
    queue.prefer(big, 12)
    by_hit = policy in ("lpm", "priority")
    assert queue.next() == (big if by_hit else before, False)
    queue.set_aside(big)
    assert queue.next()[0] is before
    queue.restore(lambda _: 0)
    assert queue.next()[0] is (big if by_hit else before)
    queue.lead(sequence(9, [2] * 30), 0)
    assert queue.next()[0] is before, "it waits for a leader"
    queue.prefer(small, 11)
    assert queue.next()[0] is (small if by_hit else before)
    for each in (small, big, hit):
        queue.remove(each)
    assert queue.next() is None and not queue._by_bonus and not queue._bonuses
    queue.prefer(small, 100)  # it was admitted meanwhile
    assert queue.next() is None


def test_no_bonus_passes_a_better_class():
    queue = WaitingQueue(RadixTree(PagePool(4, 4)), "priority", slack=10**9, overtaking=None)
    better, worse = sequence(0, [1] * 9, priority=0), sequence(1, [2] * 9, priority=1)
    for each in (worse, better):
        queue.add(each, 0)
    queue.prefer(worse, 8)
    assert queue.next()[0] is better
