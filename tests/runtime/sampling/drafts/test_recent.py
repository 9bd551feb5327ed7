"""Drafts from the places of one equal token."""

from __future__ import annotations

import random
from array import array

import pytest

from coppice.runtime.sampling.drafts.recent import DEEP, PLACES, WINDOW, recent


def paths(made: list[tuple[int, int, int, float]]) -> list[tuple[int, ...]]:
    """The tokens from the root to each leaf."""
    parents = {parent for _, parent, _, _ in made}
    found = []
    for leaf in range(len(made)):
        if leaf in parents:
            continue
        path, at = [], leaf
        while at >= 0:
            path.append(made[at][0])
            at = made[at][1]
        found.append(tuple(reversed(path)))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], []),
        ([5], []),
        ([5, 6], []),
        ([5, 5], [(5,)]),
        ([5, 1, 2, 3, 4, 9, 5], [(1, 2, 3, 4)]),
        ([5, 1, 5, 2, 3, 5], [(2, 3, 5), (1,)]),
        ([5, 1, 5, 1, 3, 5], [(1, 3, 5)]),
        ([5, 8, 5, 1, 5, 2, 5, 3, 5], [(3, 5), (2,), (1,)]),  # the oldest is not looked at
    ],
)
def test_what_followed_on_the_latest_places(
    text: list[int], expected: list[tuple[int, ...]]
) -> None:
    assert paths(recent(array("i", text), 24)) == expected


def test_against_a_plain_search() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        text = [rng.randrange(1, 1 + rng.choice((2, 5, 40))) for _ in range(rng.randrange(60))]
        made = recent(array("i", text), most := rng.randrange(12))
        assert len(made) <= most
        places = [at for at in range(len(text) - 1) if text[at] == text[-1]][-PLACES:]
        expected = []
        for at in reversed(places):
            path = tuple(text[at + 1 : at + 1 + (1 if expected else DEEP)])
            if path[0] not in {each[0] for each in expected}:
                expected.append(path)
        if most >= DEEP + PLACES:
            assert paths(made) == expected
        assert all(parent < index for index, (_, parent, _, _) in enumerate(made))
        assert all(0 < first < 1 for *_, first in made)


def test_kinds_tell_how_many_places_agree_and_how_deep_a_token_is() -> None:
    agree = recent(array("i", [5, 1, 5, 1, 5, 1, 5]), 24)
    differ = recent(array("i", [5, 1, 5, 2, 5, 1, 5]), 24)
    kinds = {kind for _, _, kind, _ in agree}
    assert len(kinds) == len(agree)
    assert kinds.isdisjoint(kind for _, _, kind, _ in differ)


def test_only_the_end_of_a_long_text_is_searched() -> None:
    text = [7, 1] + [0] * (WINDOW - 1)
    assert recent(array("i", [*text, 7]), 24) == []
    assert recent(array("i", [7, 1, *text[4:], 7]), 24)[0][0] == 1
