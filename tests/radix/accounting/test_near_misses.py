"""Groups of near misses: what belongs together, what is kept, and where a difference ends."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from coppice.radix.accounting.near_misses import (
    MAX_GROUPS,
    SHOWN_TOKENS,
    Difference,
    NearMisses,
    Sighting,
    difference,
)


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def sighting(sketch: list[int], cost: int = 100, position: int = 20, ours: int = 7) -> Sighting:
    return Sighting("space", sketch, cost, position, ids(1, 2), ids(ours), ids(9), ids(3, 4))


def test_requests_that_share_content_are_a_group() -> None:
    misses = NearMisses()
    misses.add(sighting([1, 2, 3, 4], 100, 20))
    misses.add(sighting([2, 3, 4, 5], 120, 10, ours=8))
    misses.add(sighting([5, 6, 7, 8], 50, 30))
    misses.add(sighting([11, 12], 500))
    first, second = misses.top(5)
    assert (first.requests, first.tokens_cost, first.tokens_after) == (1, 500, 500)
    assert (second.requests, second.tokens_cost, second.tokens_after) == (3, 270, 90)
    assert second.position == 10
    assert second.namespace == "space"
    assert (second.before, second.after) == ((1, 2), (3, 4))
    assert second.differences == (Difference((7,), (9,)), Difference((8,), (9,)))
    assert misses.top(1) == (first,)
    assert misses.top(0) == ()
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        misses.top(-1)


def test_little_in_common_is_not_enough() -> None:
    misses = NearMisses()
    misses.add(sighting([1, 2, 3, 4, 5, 6, 7, 8]))
    misses.add(sighting([8, 12, 13, 14, 15, 16, 17, 18]))
    assert [group.requests for group in misses.top(5)] == [1, 1]


def test_a_costly_group_survives_many_small_ones() -> None:
    misses = NearMisses()
    for number in range(5000):
        misses.add(sighting([1, 2], 300) if number % 50 == 0 else sighting([100 + number], 10))
        assert len(misses) <= MAX_GROUPS
    top = misses.top(MAX_GROUPS)
    assert (top[0].requests, top[0].tokens_cost) == (100, 30_000)
    assert all(group.tokens_cost <= 10 for group in top[1:])
    assert len(misses._by_name) <= 32 * MAX_GROUPS


def test_a_newcomer_that_keeps_costing_rises() -> None:
    misses = NearMisses()
    for number in range(MAX_GROUPS):
        misses.add(sighting([100 + number], 1000))
    for number in range(20):
        misses.add(sighting([1], 1000))
        misses.add(sighting([5000 + number], 10))
    assert misses.top(1)[0].requests == 20


@pytest.mark.parametrize(
    ("ours", "theirs", "left", "right"),
    [
        ((1, 5, 6, 7, 8), (2, 5, 6, 7, 8), (1,), (2,)),
        ((1, 2, 3, 5, 6, 7, 8), (9, 5, 6, 7, 8), (1, 2, 3), (9,)),
        ((5, 6, 7, 8), (9, 5, 6, 7, 8), (), (9,)),
        ((1, 2, 3), (4, 5, 6), (1, 2, 3), (4, 5, 6)),
        ((1, 2, 3), (), (1, 2, 3), ()),
        ((1, 8), (2, 8), (1, 8), (2, 8)),
        ((1, 7, 8), (2, 7, 8), (1,), (2,)),
        # Three equal tokens are no end of it while others follow.
        ((1, 5, 6, 7, 0, 0, 0, 0), (2, 5, 6, 7, 9, 9, 9, 9), None, None),
    ],
)
def test_a_difference_ends_where_both_are_the_same_again(
    ours: tuple[int, ...],
    theirs: tuple[int, ...],
    left: tuple[int, ...] | None,
    right: tuple[int, ...] | None,
) -> None:
    expected = Difference(ours if left is None else left, theirs if right is None else right)
    assert difference(ours, theirs) == expected


def test_a_difference_leaves_out_the_fewest_tokens_of_both() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        ours, theirs = (tuple(rng.integers(0, 3, rng.integers(0, 12)).tolist()) for _ in range(2))
        ends = [
            (left + right, left, right)
            for left in range(len(ours))
            for right in range(len(theirs))
            if (same := min(4, len(ours) - left, len(theirs) - right)) >= 2
            and ours[left : left + same] == theirs[right : right + same]
        ]
        _, left, right = min(ends, default=(0, len(ours), len(theirs)))
        assert difference(ours, theirs) == Difference(ours[:left], theirs[:right])


def test_texts_are_cut() -> None:
    misses = NearMisses()
    long = ids(*range(500))
    misses.add(Sighting(None, [1], 5, 0, b"", long, b"", long))
    (group,) = misses.top(1)
    assert len(group.after) == len(group.differences[0].ours) == SHOWN_TOKENS
    assert group.before == ()
