"""A tree, its copy made of changes, and its blocks agree after any history."""

from __future__ import annotations

from array import array

import pytest
from sequences import serve

from coppice.radix import Namespace, PagePool, RadixTree, page_hashes
from coppice.radix.mirror.blocks import Blocks, PagesCleared, PagesRemoved
from coppice.radix.mirror.changes import Cleared, Cut, Split, Stored, TreeChanges
from coppice.radix.mirror.copy import TreeCopy
from coppice.radix.upkeep.removal import remove_namespace
from tests.radix.test_fuzz import NAMESPACES, Fuzz


def paths(tree: RadixTree) -> set[tuple[object, bytes]]:
    """Namespace and tokens of the path to each leaf."""
    return {
        (namespace, node.prefix())
        for namespace, root in tree.roots.items()
        for node in root.subtree()
        if node is not root and not node.children
    }


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("limit", [5, 100_000])
def test_copy_and_blocks_agree_with_the_tree(page_size: int, block_size: int, limit: int) -> None:
    """Random sequences, forks, drafts, pins, evictions and resets, as the tree's own fuzz."""
    fuzz = Fuzz("lru", page_size, seed=page_size + block_size)
    tree, rng = fuzz.tree, fuzz.rng
    for _ in range(40):
        fuzz.step()
    changes, blocks = TreeChanges(tree, limit=limit), Blocks(block_size, seed=3)
    held: dict[int, bytes] = {}
    for step in range(1500):
        fuzz.step()
        if rng.random() < 0.02:
            remove_namespace(tree, rng.choice(NAMESPACES))
        if step % 3:
            continue
        for change in changes.drain():
            event = blocks.take(change)
            if isinstance(event, PagesCleared):
                held.clear()
            elif isinstance(event, PagesRemoved):
                for block in event.hashes:
                    del held[block]
            elif event is not None:
                width = 4 * block_size
                assert len(event.tokens) == width * len(event.hashes)
                for index, block in enumerate(event.hashes):
                    assert block not in held, "stored twice"
                    held[block] = event.tokens[width * index : width * (index + 1)]
        copy = blocks.copy
        assert set(copy) == paths(tree)
        assert len(copy.nodes) == tree.num_nodes + len(copy.roots)
        wanted = {
            block
            for namespace, prefix in paths(tree)
            for block in page_hashes(prefix, block_size, namespace, seed=3)
        }
        assert set(held) == wanted
        stored = [each.hashes for each in blocks.everything()[1:]]
        assert {block for each in stored for block in each} == wanted
        query = fuzz.prompt()
        for namespace in NAMESPACES:
            assert copy.match(query, namespace) == tree.match(query, namespace).length
    assert (changes.restarts > 0) == (limit == 5)


def test_a_change_carries_what_is_new() -> None:
    tree = RadixTree(PagePool(16, 4))
    changes = TreeChanges(tree)
    serve(tree, list(range(12)))
    opened, stored = changes.drain()
    assert stored == Stored(2, 1, 0, array("i", range(12)).tobytes())
    assert opened.namespace is None
    serve(tree, [*range(6), 50])
    assert changes.drain() == [Split(2, 3, 6), Stored(4, 3, 6, array("i", [50]).tobytes())]
    tree.evict(1)
    assert [type(each) for each in changes.drain()] == [Cut]
    tree.reset()
    assert changes.drain() == [Cleared()]


def test_a_lost_change_is_noticed() -> None:
    tree = RadixTree(PagePool(16, 4))
    changes, copy = TreeChanges(tree), TreeCopy()
    serve(tree, list(range(12)))
    for change in changes.drain()[:1]:
        copy.apply(change)
    serve(tree, [*range(6), 50])
    split, stored = changes.drain()
    for change in (split, stored):
        with pytest.raises(ValueError, match="which is unknown"):
            copy.apply(change)
    for change in changes.everything():
        copy.apply(change)
    assert copy.match([*range(6), 50, 51]) == 7


def test_dropped_namespaces_leave_nothing() -> None:
    tree = RadixTree(PagePool(16, 4))
    changes, copy = TreeChanges(tree), TreeCopy()
    for number in range(300):
        serve(tree, list(range(9)), Namespace("m", cache_salt=str(number)))
        for change in changes.drain():
            copy.apply(change)
    assert len(changes._translator._roots) < 20
    assert len(copy.nodes) < 40 and len(copy.roots) < 20


@pytest.mark.parametrize("namespace", ["salt", 7])
def test_a_namespace_without_an_encoding_is_refused(namespace: object) -> None:
    tree = RadixTree(PagePool(16, 4))
    changes = TreeChanges(tree)
    with pytest.raises(ValueError, match="namespace must be a Namespace or None"):
        tree.start(tree.match([1, 2], namespace))
    changes.close()
    serve(tree, [1, 2], namespace)
    with pytest.raises(ValueError, match="namespace must be a Namespace or None"):
        TreeChanges(tree)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        TreeChanges(RadixTree(PagePool(4, 1)), limit=0)
