"""An index of many trees agrees with each of them after any history."""

from __future__ import annotations

import pytest

from coppice.radix import PagePool, RadixTree
from coppice.radix.mirror.changes import Cut, Stored, TreeChanges
from coppice.radix.mirror.index import ReplicaIndex
from coppice.radix.upkeep.removal import remove_namespace
from tests.radix.test_fuzz import NAMESPACES, Fuzz


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("limit", [4, 100_000])
def test_an_index_agrees_with_all_trees(page_size: int, limit: int) -> None:
    fuzzes = [Fuzz("lru", page_size, seed=3) for _ in range(4)]
    for number, fuzz in enumerate(fuzzes):
        fuzz.segments = fuzzes[0].segments  # so that they share
        fuzz.rng.seed(number)
    changes = [TreeChanges(fuzz.tree, limit=limit) for fuzz in fuzzes]
    index = ReplicaIndex()
    replicas = (0, 2, 5, 200)
    rng = fuzzes[0].rng
    for step in range(1200):
        for fuzz in fuzzes:
            fuzz.step()
        if rng.random() < 0.02:
            remove_namespace(rng.choice(fuzzes).tree, rng.choice(NAMESPACES))
        if step % 400 == 399:
            index.leave(5)  # it comes back
            for change in changes[2].everything():
                index.apply(5, change)
        if step % 5:
            continue
        for replica, each in zip(replicas, changes, strict=True):
            for change in each.drain():
                index.apply(replica, change)
        for _ in range(3):
            prompt, namespace = rng.choice(fuzzes).prompt(), rng.choice(NAMESPACES)
            wanted = {
                replica: fuzz.tree.match(prompt, namespace).length
                for replica, fuzz in zip(replicas, fuzzes, strict=True)
            }
            found = index.hits(prompt, namespace)
            assert found == {replica: length for replica, length in wanted.items() if length}
    held = sum(fuzz.tree.cached_tokens for fuzz in fuzzes)
    assert max(fuzz.tree.cached_tokens for fuzz in fuzzes) <= index.tokens <= held
    for replica in replicas:
        index.leave(replica)
    assert index.nodes == index.tokens == 0 and not index._roots
    assert index.hits(fuzzes[0].prompt()) == {}


def test_a_lost_change_is_noticed() -> None:
    index = ReplicaIndex()
    for change in (Stored(2, 1, 0, bytes(8)), Cut(7, 0)):
        with pytest.raises(ValueError, match="which is unknown"):
            index.apply(0, change)


def test_replicas_that_hold_nothing_cost_nothing() -> None:
    index, tree = ReplicaIndex(), RadixTree(PagePool(64, 4))
    changes = TreeChanges(tree)
    for number in range(200):
        hold, table = tree.start(tree.match([number, 1, 2]))
        table += tree.allocate(1)
        tree.finish(hold, [number, 1, 2], table)
        for change in changes.drain():
            index.apply(3, change)
    assert index.tokens == tree.cached_tokens
    assert index.hits([199, 1, 2, 9]) == {3: 3}
    assert index.hits([500]) == {}
