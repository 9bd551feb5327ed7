"""Listeners of a tree: the changes reported to them, and a namespace that one refuses."""

from __future__ import annotations

import random

import pytest
from sequences import serve

from coppice.radix import Namespace, Node, PageEvents, PagePool, RadixTree, TreeListener, check
from coppice.radix.node import Root


class Lengths(TreeListener):
    """The number of tokens of each edge, from what is reported alone."""

    def __init__(self) -> None:
        self.lengths: dict[Node, int] = {}
        self.opened_roots: list[Root] = []

    def opened(self, root: Root) -> None:
        self.opened_roots.append(root)

    def stored(self, node: Node) -> None:
        assert node.length > self.lengths.get(node, 0)
        self.lengths[node] = node.length

    def split(self, upper: Node, lower: Node) -> None:
        assert self.lengths[lower] == upper.length + lower.length
        self.lengths[upper], self.lengths[lower] = upper.length, lower.length

    def evicted(self, node: Node, length: int) -> None:
        assert self.lengths.pop(node) > length
        if length:
            self.lengths[node] = length

    def cleared(self) -> None:
        self.lengths.clear()


def test_all_changes_of_edges_are_reported() -> None:
    rng = random.Random(0)
    tree = RadixTree(PagePool(32, 4))
    first, second = Lengths(), Lengths()
    tree.add_listener(first)
    tree.add_listener(second)
    for step in range(800):
        if rng.random() < 0.9:
            serve(tree, [rng.randint(1, 2) for _ in range(rng.randint(1, 30))], rng.choice("ab"))
        elif rng.random() < 0.9:
            tree.evict(rng.randint(1, 9))
        else:
            tree.reset()
        assert first.lengths == {node: node.length for node in tree.nodes()}
        assert second.lengths == first.lengths
        if step == 400:
            tree.remove_listener(second)
            second = first
    assert {root.namespace for root in first.opened_roots} == set("ab")


class Refusing(TreeListener):
    def opened(self, root: Root) -> None:
        raise ValueError(f"namespace: {root.namespace!r} is refused")


def test_a_namespace_that_one_listener_refuses_is_not_opened() -> None:
    tree = RadixTree(PagePool(16, 4))
    events, refusing = PageEvents(tree), Refusing()
    tree.add_listener(refusing)
    match = tree.match([1, 2, 3, 4, 5], Namespace("m"))
    for begin in (tree.lock, tree.start):
        with pytest.raises(ValueError, match="is refused"):
            begin(match)
    assert not tree.roots
    check(tree)
    tree.remove_listener(refusing)
    serve(tree, [1, 2, 3, 4, 5], Namespace("m"))
    assert len(events.drain()) == 1
    with pytest.raises(ValueError, match="not in list"):
        tree.remove_listener(refusing)


def test_a_listener_may_leave_every_hook_as_it_is() -> None:
    tree = RadixTree(PagePool(16, 4))
    tree.add_listener(TreeListener())
    serve(tree, [1, 2, 3, 4, 5])
    serve(tree, [1, 2, 9])
    tree.evict(1)
    tree.reset()
    check(tree)
