"""The recount notices each kind of damage, so that other tests can rely on it."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from sequences import Run, serve

from coppice.radix import Hold, Node, PagePool, RadixTree, check


@pytest.fixture
def scene() -> tuple[RadixTree, Hold, array[int]]:
    """Two idle leaves below one prefix that ends inside a page, and a sequence on one of them."""
    tree = RadixTree(PagePool(32, 4))
    for last in (50, 60):
        serve(tree, [*range(6), last, last + 1, last + 2, last + 3])
    run = Run(tree, [*range(6), 50, 51, 52, 53, 54, 55, 56])
    check(tree, [(run.hold, run.table)])
    return tree, run.hold, run.table


def _leaf(tree: RadixTree, token: int) -> Node:
    return next(n for n in tree.nodes() if n.edge[:4] == array("i", [token]).tobytes())


def _front(tree: RadixTree) -> Node:
    return _leaf(tree, 0)


DAMAGE: dict[str, Callable[[RadixTree, Hold, array[int]], object]] = {
    "a reference too many": lambda tree, hold, table: tree.pool.share(table[:1]),
    "a page too early free": lambda tree, hold, table: tree.pool.release(table[-1:]),
    "a page leaked": lambda tree, hold, table: tree.allocate(1),
    "free_pages": lambda tree, hold, table: setattr(tree.pool, "free_pages", 3),
    "cached_pages": lambda tree, hold, table: setattr(tree, "cached_pages", tree.cached_pages + 1),
    "locked_pages": lambda tree, hold, table: setattr(tree, "locked_pages", tree.locked_pages - 1),
    "cached_tokens": lambda tree, hold, table: setattr(tree, "cached_tokens", 0),
    "num_nodes": lambda tree, hold, table: setattr(tree, "num_nodes", tree.num_nodes + 1),
    "a lock lost": lambda tree, hold, table: setattr(_front(tree), "locks", 0),
    "a lock that was left": lambda tree, hold, table: setattr(_leaf(tree, 60), "locks", 1),
    "own_pages": lambda tree, hold, table: setattr(_leaf(tree, 60), "own_pages", 1),
    "a length": lambda tree, hold, table: setattr(_leaf(tree, 60), "length", 2),
    "a start": lambda tree, hold, table: setattr(_leaf(tree, 60), "start", 5),
    "a page lost": lambda tree, hold, table: _leaf(tree, 60).pages.pop(),
    "a child misplaced": lambda tree, hold, table: _front(tree).children.update(
        {b"....": _front(tree).children.popitem()[1]}
    ),
    "a leaf that is never evicted": lambda tree, hold, table: tree.order._leaves._entries.clear(),
    "a child newer than its parent": lambda tree, hold, table: setattr(
        _leaf(tree, 60), "stamp", 10**6
    ),
    "a table that left the tree": lambda tree, hold, table: table.__setitem__(0, 31),
    "an empty namespace": lambda tree, hold, table: setattr(
        tree.lock(tree.match([1], "x")).node, "locks", 0
    ),
    "a hold beside its node": lambda tree, hold, table: setattr(hold, "length", 9),
    "a hold that was given back": lambda tree, hold, table: tree.unlock(hold),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_noticed(
    damage: Callable[[RadixTree, Hold, array[int]], object],
    scene: tuple[RadixTree, Hold, array[int]],
) -> None:
    tree, hold, table = scene
    damage(tree, hold, table)
    with pytest.raises(AssertionError):
        check(tree, [(hold, table)])


def test_a_sequence_that_is_left_out_is_noticed(scene: tuple[RadixTree, Hold, array[int]]) -> None:
    tree, _, _ = scene
    with pytest.raises(AssertionError):
        check(tree)
