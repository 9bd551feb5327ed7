"""The router sends a request to where its first token is expected soonest."""

from __future__ import annotations

import random
from array import array

import pytest

from coppice.frontend.router.choosing.namespaces import Place
from coppice.frontend.router.choosing.policy import Router
from coppice.radix import PagePool, RadixTree
from coppice.radix.mirror.changes import TreeChanges
from coppice.radix.namespace import Namespace
from coppice.radix.upkeep.removal import remove_namespace

RATE = 1000.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Cluster:
    """A router and the trees of its replicas, whose changes it hears at once."""

    def __init__(self, replicas: int) -> None:
        self.clock = Clock()
        self.router = Router(self.clock)
        self.trees: dict[int, tuple[RadixTree, TreeChanges]] = {}
        self._names = 0
        for replica in range(replicas):
            self.join(replica)

    def join(self, replica: int) -> None:
        self.router.join(replica, places=8)
        self.router.measured(replica, RATE)
        tree = RadixTree(PagePool(100_000, 1))
        self.trees[replica] = tree, TreeChanges(tree)

    def keep(self, replica: int, prompt: array[int], namespace: object = None) -> None:
        """Has a replica compute a prompt."""
        tree, changes = self.trees[replica]
        hold, table = tree.start(tree.match(prompt, namespace))
        table += tree.allocate(len(prompt) - len(table))
        tree.finish(hold, prompt, table)
        self.router.apply(replica, changes.drain())

    def send(self, prompt: array[int], **more: object) -> tuple[str, int]:
        choice = self.router.choose(prompt, **more)  # type: ignore[arg-type]
        assert choice is not None
        self._names += 1
        name = str(self._names)
        self.router.send(name, choice, prompt, **more)  # type: ignore[arg-type]
        return name, choice.replica


def prompt(seed: int, count: int = 500) -> array[int]:
    rng = random.Random(seed)
    return array("i", [rng.randrange(1 << 30) for _ in range(count)])


def test_a_prompt_goes_where_it_is_cached() -> None:
    cluster = Cluster(4)
    cluster.keep(2, prompt(1))
    choice = cluster.router.choose(prompt(1) + prompt(2, 10))
    assert choice is not None
    assert (choice.replica, choice.hit) == (2, 500)
    assert choice.seconds == pytest.approx(10 / RATE)
    again = cluster.router.choose(prompt(1))
    assert again is not None and again.hit == 499, "the last token is computed"


def test_a_hit_is_worth_a_short_wait_and_not_a_long_one() -> None:
    cluster = Cluster(2)
    cluster.keep(0, prompt(1, 1000))
    cluster.keep(1, prompt(9, 10))
    where = [cluster.send(prompt(1, 1000) + prompt(10 + n, 100))[1] for n in range(18)]
    # Each adds 0.1 s at the first replica; computing the prefix at the other one takes a second.
    assert where[:8] == [0] * 8
    assert 1 in where, "the prefix is spread"
    first = where.index(1)
    assert 1 in where[first + 1 :], "what is on its way to the other one counts as a hit there"


@pytest.mark.parametrize(("holders", "copied"), [(1, False), (3, True)])
def test_what_many_hold_is_copied_sooner_than_what_one_holds(holders: int, copied: bool) -> None:
    cluster = Cluster(4)
    for seed in range(16):  # with what follows, half of the 20 seconds that count
        name, replica = cluster.send(prompt(1000 + seed, 1000))
        assert replica == seed % 4
        cluster.router.end(name)
    document = prompt(0, 2000)
    for replica in range(holders):
        cluster.keep(replica, document)
    for seed in range(4):
        cluster.send(prompt(seed + 1, 6000))  # each has 6 seconds ahead
    cluster.router.end("20")  # but the last one, which is idle now
    # A copy takes 2 seconds, and costs those that come 2 times (1 + 2 / holders) more.
    assert (cluster.send(document)[1] == 3) is copied


def test_it_is_the_use_of_each_that_decides_between_equals_that_hold_something() -> None:
    cluster = Cluster(2)
    document = prompt(0, 1000)
    for replica in range(2):
        cluster.keep(replica, document)
    busy, replica = cluster.send(prompt(1, 9000))
    cluster.router.end(busy)
    longer = document + prompt(2, 1000)
    assert cluster.send(longer)[1] == 1 - replica


def test_replicas_that_are_idle_share_the_misses() -> None:
    cluster, sent = Cluster(4), [0, 0, 0, 0]
    for number in range(40):
        name, replica = cluster.send(prompt(number, 100))
        sent[replica] += 1
        cluster.clock.now += 0.1
        cluster.router.began(name)
        cluster.router.end(name)
    assert sent == [10, 10, 10, 10]
    cluster.router.leave(2)
    cluster.join(2)  # which has had nothing to do yet
    assert cluster.send(prompt(50, 100))[1] == 2


def test_misses_go_to_where_least_is_ahead() -> None:
    cluster = Cluster(4)
    where = [cluster.send(prompt(n))[1] for n in range(40)]
    assert all(9 <= where.count(replica) <= 11 for replica in range(4))


@pytest.mark.parametrize(("known", "place"), [(False, 0), (True, 1)])
def test_a_queue_of_requests_that_miss_nothing_takes_its_time(known: bool, place: int) -> None:
    cluster = Cluster(2)
    if known:
        for seed in range(20):
            name, _ = cluster.send(prompt(100 + seed, 10))
            cluster.clock.now += 0.1 + 10 / RATE
            cluster.router.began(name)
            cluster.router.end(name)
    for replica in range(2):
        cluster.keep(replica, prompt(1))
    # The first one gets five requests that miss a token each, the other one a prompt of 0.15 s.
    for number, (tokens, other) in enumerate([(prompt(1), 1)] * 5 + [(prompt(2, 150), 0)]):
        choice = cluster.router.choose(tokens, without=[other])
        assert choice is not None
        cluster.router.send(f"queued {number}", choice, tokens)
    assert cluster.send(prompt(1))[1] == place


def test_a_replica_that_is_stuck_gets_no_more() -> None:
    cluster = Cluster(2)
    cluster.keep(0, prompt(1, 1000))
    names = [cluster.send(prompt(1, 1000) + prompt(n, 20))[0] for n in range(2, 4)]
    assert cluster.router.unanswered(0) == 2
    cluster.clock.now += 30  # it should have taken 0.04 s
    _, replica = cluster.send(prompt(1, 1000) + prompt(5, 20))
    assert replica == 1
    cluster.router.began(names[0])  # it works again
    cluster.router.began(names[1])
    _, replica = cluster.send(prompt(1, 1000) + prompt(6, 20))
    assert replica == 0


def stuck(cluster: Cluster) -> array[int]:
    """The prefix that replica 0 holds, which has not answered what its clients have given up."""
    cluster.keep(0, prompt(1, 1000))
    names = [cluster.send(prompt(1, 1000) + prompt(n, 20))[0] for n in range(2, 4)]
    for name in names:
        cluster.clock.now += 15  # it should have taken 0.04 s
        cluster.router.end(name)
    assert not cluster.router.unanswered(0)
    return prompt(1, 1000)


def test_a_replica_that_is_stuck_gets_no_more_once_its_clients_have_given_up() -> None:
    cluster = Cluster(2)
    held = stuck(cluster)
    for seed in range(5, 8):
        name, replica = cluster.send(held + prompt(seed, 20))
        assert replica == 1
        cluster.router.end(name)
        cluster.router.heard(1)


def test_who_gives_up_soon_counts_once_an_answer_would_be_due() -> None:
    cluster = Cluster(2)
    cluster.keep(0, prompt(1, 5000))
    for seed in range(4):  # each would take a second
        name, replica = cluster.send(prompt(1, 5000) + prompt(10 + seed, 1000))
        assert replica == 0
        cluster.clock.now += 0.2
        cluster.router.end(name)
    cluster.clock.now += 10
    assert cluster.send(prompt(1, 5000) + prompt(20, 1000))[1] == 1


@pytest.mark.parametrize("sign", ["load", "change", "answer", "token", "time"])
def test_a_replica_that_works_again_is_tried_again(sign: str) -> None:
    cluster = Cluster(2)
    held, router = stuck(cluster), cluster.router
    match sign:
        case "load":
            router.measured(0, RATE)
        case "change":
            cluster.keep(0, prompt(9, 10))
        case "answer":
            router.heard(0)
        case "token":
            router.send("late", _to(0), held)  # type: ignore[arg-type]
            assert cluster.send(held + prompt(5, 20))[1] == 1
            router.began("late")
        case "time":
            cluster.clock.now += 19
            assert cluster.send(held + prompt(5, 20))[1] == 1
            cluster.clock.now += 2
    assert cluster.send(held + prompt(6, 20))[1] == 0


def test_one_that_is_tried_again_gets_one_request() -> None:
    cluster = Cluster(2)
    held = stuck(cluster)
    cluster.clock.now += 21
    assert [cluster.send(held + prompt(seed, 20))[1] for seed in range(5, 8)] == [0, 1, 1]


def test_a_client_that_gives_up_leaves_a_replica_that_works_as_good_as_before() -> None:
    cluster = Cluster(2)
    cluster.keep(0, prompt(1, 1000))
    name, _ = cluster.send(prompt(1, 1000) + prompt(2, 20))
    cluster.clock.now += 0.01
    cluster.router.end(name)
    cluster.router.measured(0, RATE)  # as its load has changed
    cluster.clock.now += 5
    assert cluster.send(prompt(1, 1000) + prompt(3, 20))[1] == 0


def test_who_comes_in_place_of_a_stuck_one_owes_nothing() -> None:
    cluster = Cluster(2)
    held = stuck(cluster)
    cluster.router.leave(0)
    cluster.join(0)
    cluster.keep(0, held)
    assert cluster.send(held + prompt(5, 20))[1] == 0


def test_prompts_at_a_replica_that_keeps_none_are_not_remembered() -> None:
    clock = Clock()
    router = Router(clock)
    for replica in range(2):
        router.join(replica, caching=False)
    where = []
    for number in range(20):
        choice = router.choose(prompt(1))
        assert choice is not None and not choice.hit
        router.send(str(number), choice, prompt(1))
        where.append(choice.replica)
        if number % 2:
            router.began(str(number))
    assert where.count(0) == where.count(1)
    assert not len(router._promised) and not any(router._unreported.values())


def test_who_dies_gives_back_what_it_has_not_answered() -> None:
    cluster = Cluster(2)
    cluster.keep(0, prompt(1))
    names = [cluster.send(prompt(1) + prompt(n, 20))[0] for n in range(3)]
    cluster.router.began(names[0])
    unanswered, begun = cluster.router.leave(0)
    assert (unanswered, begun) == (names[1:], names[:1])
    assert cluster.router.leave(0) == ([], [])
    assert cluster.send(prompt(1))[1] == 1
    cluster.join(0)  # it comes back, and holds nothing
    choice = cluster.router.choose(prompt(1) + prompt(7, 10))
    assert choice is not None
    assert choice.replica == 1, "what is on its way there counts"
    cluster.router.leave(1)
    cluster.router.leave(0)
    assert cluster.router.choose(prompt(1)) is None


def test_namespaces_are_kept_apart() -> None:
    cluster = Cluster(3)
    cluster.keep(1, prompt(1))
    found = cluster.router.choose(prompt(1), "other")
    assert found is not None and found.hit == 0
    cluster.send(prompt(1), namespace="other")
    found = cluster.router.choose(prompt(1), "third")
    assert found is not None and found.hit == 0


def test_an_adapter_is_found_in_each_of_its_versions() -> None:
    cluster, asked = Cluster(3), Place("legal", None, None)
    cluster.keep(0, prompt(1))
    found = cluster.router.choose(prompt(1), asked)
    assert found is not None and found.hit == 499, "tokens may invoke it: the base's prompts count"
    cluster.keep(1, prompt(1), Namespace("", "legal@0123456789abcdef"))
    found = cluster.router.choose(prompt(1), asked)
    assert found is not None and (found.replica, found.hit) == (1, 499)
    cluster.keep(2, prompt(2), Namespace("", "legal@fedcba9876543210"))
    for number, place in ((1, 1), (2, 2)):
        found = cluster.router.choose(prompt(number), asked)
        assert found is not None and (found.replica, found.hit) == (place, 499)
    found = cluster.router.choose(prompt(1), Place("legal", "salt", None))
    assert found is not None and found.hit == 0


def test_an_adapter_that_is_replaced_leaves_nothing_behind() -> None:
    """What the old version leaves takes nothing of the new one's with it, and the other way."""
    cluster, asked = Cluster(1), Place("legal", None, None)
    tree, changes = cluster.trees[0]
    old, new = Namespace("", "legal@0123456789abcdef"), Namespace("", "legal@fedcba9876543210")
    cluster.keep(0, prompt(1), old)
    cluster.keep(0, prompt(1), new)
    remove_namespace(tree, old)
    cluster.router.apply(0, changes.drain())
    found = cluster.router.choose(prompt(1), asked)
    assert found is not None and found.hit == 499
    cluster.keep(0, prompt(1) + prompt(3), new)
    found = cluster.router.choose(prompt(1) + prompt(3), asked)
    assert found is not None and found.hit == 999
    remove_namespace(tree, new)
    cluster.router.apply(0, changes.drain())
    assert cluster.router.index.tokens == 0
    assert not cluster.router.index.nodes


def test_a_request_of_a_better_class_does_not_wait_for_others() -> None:
    cluster = Cluster(2)
    cluster.keep(0, prompt(1))
    for n in range(5):
        cluster.router.send(f"slow {n}", _to(0), prompt(100 + n), priority=5)
    urgent = cluster.router.choose(prompt(1) + prompt(3, 50), priority=0)
    assert urgent is not None and urgent.replica == 0
    patient = cluster.router.choose(prompt(1) + prompt(3, 50), priority=9)
    assert patient is not None and patient.replica == 1


def _to(replica: int) -> object:
    from coppice.frontend.router.choosing.policy import Choice

    return Choice(replica, 0, 0.0)


def test_all_counts_return_to_nothing() -> None:
    cluster, rng = Cluster(5), random.Random(4)
    names: list[str] = []
    for n in range(600):
        cluster.clock.now += rng.random() / 10
        if names and rng.random() < 0.5:
            name = names.pop(rng.randrange(len(names)))
            if rng.random() < 0.8:
                cluster.router.began(name)
            cluster.router.end(name)
        else:
            name, _ = cluster.send(prompt(n % 7, 60) + prompt(n, 20))
            names.append(name)
            if rng.random() < 0.3:
                cluster.router.began(name)
        if n % 150 == 149:
            for each in cluster.router.leave(2):
                names = [name for name in names if name not in each]
            cluster.join(2)
    for name in names:
        cluster.router.end(name)
        cluster.router.end(name)  # once more changes nothing
    router = cluster.router
    assert not router._flights and not len(router._promised)
    assert router._promised._index.nodes == 0
    assert not router._ahead.any() and not router._running.any()
    assert not any(router._waiting.values())
    for replica in range(5):
        router.leave(replica)
    assert not router._debts._owed


def test_a_rate_is_learnt_from_answers_where_none_is_reported() -> None:
    clock = Clock()
    router = Router(clock)
    for replica in range(2):
        router.join(replica)
    for n in range(20):
        for replica, seconds in ((0, 0.1), (1, 0.5)):
            router.send(f"{n} {replica}", _to(replica), prompt(n))  # type: ignore[arg-type]
            clock.now += seconds
            router.began(f"{n} {replica}")
            router.end(f"{n} {replica}")
    choice = router.choose(prompt(99))
    assert choice is not None and choice.replica == 0
    assert choice.seconds == pytest.approx(0.1, rel=0.2)


@pytest.mark.filterwarnings("error")
def test_numbers_of_replicas_may_have_gaps() -> None:
    cluster = Cluster(0)
    for replica in (5, 2):
        cluster.join(replica)
    assert {cluster.send(prompt(n))[1] for n in range(6)} == {2, 5}


def test_wrong_numbers_are_refused() -> None:
    cluster = Cluster(1)
    with pytest.raises(ValueError, match="replica 0 is there already"):
        cluster.router.join(0)
    with pytest.raises(ValueError, match="replica must be at least 0"):
        cluster.router.join(-1)
    name, _ = cluster.send(prompt(1))
    with pytest.raises(ValueError, match=f"request '{name}' was sent already"):
        cluster.router.send(name, _to(0), prompt(1))  # type: ignore[arg-type]
