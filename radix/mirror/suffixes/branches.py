"""What followed on several places as one tree: the most likely path, and where others leave it."""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from coppice.radix.mirror.suffixes.index import Place
from coppice.radix.node import new_tuple
from coppice.radix.tokens import TOKEN_BYTES, common_prefix

SIDE: Final = 8
"""Tokens of a path that leaves the likeliest one: few are accepted to their end."""


class Grown(NamedTuple):
    """A token of the tree.

    Attributes:
        token: its id.
        parent: index of the one before it; -1: the last token of the text.
        length: tokens before it that are equal where it comes from, those of the tree included.
        share: of the places that have all before it, those that have it, too; each counts by the
            square of its equal tokens. Of a token that leaves the likeliest path the best place
            alone.
    """

    token: int
    parent: int
    length: int
    share: float


def grow(places: list[Place], most: int) -> list[Grown]:
    """The tree of what followed on `places`, the best one first; at most `most` tokens.

    Parents stand before their children. O(places * most).
    """
    grown: list[Grown] = []
    if not places or most < 1:
        return grown
    main = places[0].following[: most * TOKEN_BYTES]
    path = array("i", main)
    weights: list[int] = []
    same: list[int] = []  # tokens that each has with the first
    count: list[int] = []
    for place in places:
        weights.append(place.length * place.length)
        same.append(common_prefix(main, 0, place.following) // TOKEN_BYTES)
        count.append(len(place.following) // TOKEN_BYTES)
    begin = places[0].length
    totals: list[int] = []
    for depth in range(len(path)):
        have = total = 0
        for number in range(len(weights)):
            if same[number] >= depth and count[number] > depth:
                total += weights[number]
                if same[number] > depth:
                    have += weights[number]
        totals.append(total)
        grown.append(new_tuple(Grown, (path[depth], depth - 1, begin + depth, have / total)))
    seen: set[tuple[int, int]] = set()
    for number in range(1, len(weights)):
        leaves = same[number]
        if leaves >= len(path) or leaves >= count[number]:
            continue
        following = places[number].following
        side = array("i", following[leaves * TOKEN_BYTES : (leaves + SIDE) * TOKEN_BYTES])
        if (leaves, side[0]) in seen:  # a better place has it
            continue
        seen.add((leaves, side[0]))
        share, parent, length = weights[number] / totals[leaves], leaves - 1, places[number].length
        for depth in range(len(side)):
            if len(grown) == most:
                return grown
            token = new_tuple(Grown, (side[depth], parent, length + leaves + depth, share))
            parent, share = len(grown), 1.0
            grown.append(token)
    return grown
