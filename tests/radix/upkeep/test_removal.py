"""Removal of namespaces and of what lies below a mark, under every policy."""

from __future__ import annotations

import pytest
from sequences import serve

from coppice.radix import POLICIES, PagePool, RadixTree, check
from coppice.radix.upkeep.removal import remove_below, remove_namespace

MARK = (1 << 30) + 5
STEM = list(range(100, 110))


def full(tree: RadixTree) -> bool:
    check(tree)
    return tree.pool.free_pages + tree.cached_pages == tree.pool.num_pages


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [1, 4])
def test_a_namespace_leaves_whole_and_alone(policy: str, size: int) -> None:
    tree = RadixTree(PagePool(64, size), policy)
    for name in ("a", "b"):
        serve(tree, [*STEM, 1, 2, 3], namespace=name)
        serve(tree, [*STEM, 4], namespace=name)
    before = tree.cached_pages
    freed = remove_namespace(tree, "a")
    assert freed == before - tree.cached_pages > 0
    assert tree.match(STEM, "a").length == 0
    assert tree.match([*STEM, 1, 2, 3], "b").length == len(STEM) + 3
    assert full(tree)
    assert remove_namespace(tree, "nobody") == 0
    serve(tree, list(range(500, 500 + 60 * size)))  # the order of eviction still works
    assert full(tree)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [1, 4])
def test_what_lies_below_a_mark_leaves_and_what_is_above_stays(policy: str, size: int) -> None:
    tree = RadixTree(PagePool(96, size), policy)
    marked = [*STEM, MARK, 1, 2, 3]
    serve(tree, marked)  # the mark lies inside an edge
    serve(tree, [*marked, 4])
    serve(tree, [*STEM, 7, 8])
    serve(tree, [*marked[:8], MARK, 5], namespace="salted")  # at the beginning of one
    other = [*STEM, MARK + 1, 1, 2]
    serve(tree, other)
    assert remove_below(tree, MARK) > 0
    assert tree.match(marked).length == len(STEM)
    assert tree.match(marked[:9], "salted").length == 8
    assert tree.match([*STEM, 7, 8]).length == len(STEM) + 2
    assert tree.match(other).length == len(other)
    assert full(tree)
    assert remove_below(tree, MARK) == 0
    serve(tree, list(range(500, 500 + 80 * size)))
    assert full(tree)


def test_a_mark_is_found_only_as_a_whole_token() -> None:
    tree = RadixTree(PagePool(16, 4))
    key = 0x41424344
    serve(tree, [0x44410000, 0x00004243, 5, 6])  # its bytes lie across two tokens
    assert remove_below(tree, key) == 0
    assert tree.match([0x44410000, 0x00004243, 5, 6]).length == 4


def test_what_a_sequence_holds_stays() -> None:
    tree = RadixTree(PagePool(16, 4))
    serve(tree, [*STEM, MARK, 2])
    hold = tree.lock(tree.match([*STEM, MARK]))
    remove_below(tree, MARK)
    assert tree.match([*STEM, MARK, 2]).length == len(STEM) + 1
    tree.unlock(hold)
    remove_below(tree, MARK)
    assert tree.match([*STEM, MARK, 2]).length == len(STEM)
    check(tree)
