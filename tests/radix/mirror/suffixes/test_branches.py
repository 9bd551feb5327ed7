"""What followed on several places becomes one tree: the likeliest path, and what leaves it."""

from __future__ import annotations

import random
from array import array

import pytest

from coppice.radix.mirror.suffixes.branches import SIDE, Grown, grow
from coppice.radix.mirror.suffixes.index import Place


def place(length: int, *following: int) -> Place:
    return Place(length, array("i", following).tobytes())


def paths(tree: list[Grown]) -> set[tuple[int, ...]]:
    """The tokens from the root to each node."""
    made: list[tuple[int, ...]] = []
    for node in tree:
        made.append((*(made[node.parent] if node.parent >= 0 else ()), node.token))
    assert len(set(made)) == len(made), "a path is there once"
    return set(made)


def test_of_one_place_it_is_a_path() -> None:
    assert grow([place(3, 7, 8, 9)], 2) == [Grown(7, -1, 3, 1.0), Grown(8, 0, 4, 1.0)]
    assert grow([place(3, 7, 8, 9)], 0) == grow([], 5) == []


def test_places_that_agree_raise_the_share_and_others_leave_the_path() -> None:
    tree = grow([place(4, 1, 2, 3), place(3, 1, 2, 9, 9), place(2, 5), place(2, 1)], 20)
    assert paths(tree) == {(1,), (1, 2), (1, 2, 3), (1, 2, 9), (1, 2, 9, 9), (5,)}
    by_token = {(node.parent, node.token): node for node in tree}
    # Each place counts by the square of its equal tokens: 16, 9, 4 and 4.
    assert by_token[-1, 1].share == 29 / 33
    assert by_token[-1, 5].share == 4 / 33
    assert by_token[0, 2].share == 1.0, "the last place ends before it"
    assert by_token[1, 3].share == 16 / 25
    assert by_token[1, 9].share == 9 / 25
    assert by_token[1, 9].length == 3 + 2
    assert by_token[-1, 5].length == 2


def test_a_path_at_the_side_is_short_and_what_leaves_it_is_left_out() -> None:
    tree = grow([place(5, *range(20)), place(4, *[50] * 20), place(3, 50, 60)], 100)
    assert len(tree) == 20 + SIDE
    assert (50, 60) not in paths(tree), "a better place has the token that leaves the path"


@pytest.mark.parametrize("seed", range(30))
def test_all_that_is_there_followed_somewhere_and_is_bounded(seed: int) -> None:
    rng = random.Random(seed)
    places = sorted(
        (
            place(rng.randrange(2, 20), *(rng.randrange(3) for _ in range(rng.randrange(1, 30))))
            for _ in range(rng.randrange(1, 9))
        ),
        key=lambda each: -each.length,
    )
    most = rng.randrange(1, 40)
    tree = grow(places, most)
    assert 1 <= len(tree) <= most
    texts = [array("i", each.following).tolist() for each in places]
    for path in paths(tree):
        assert any(tuple(text[: len(path)]) == path for text in texts)
    assert tuple(texts[0][:most]) in paths(tree), "the best place's tokens come first"
    for number, node in enumerate(tree):
        assert -1 <= node.parent < number
        assert 0 < node.share <= 1
    for parent in {node.parent for node in tree}:
        assert sum(node.share for node in tree if node.parent == parent) <= 1 + 1e-9
