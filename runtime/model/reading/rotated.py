"""Which elements of a head a rotation turns, and in which order they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice.runtime.model.config import RopeConfig


def no_rope(head_dim: int) -> RopeConfig:
    """The rotation of a layer that rotates nothing."""
    return RopeConfig("none", head_dim)


def rotated_width(parameters: Mapping[str, Any], head_dim: int) -> int:
    """The number of a head's elements that are rotated, its first ones."""
    partial = parameters.get("partial_rotary_factor")
    return head_dim if partial is None else int(head_dim * partial)


def head_order(rotated: int, head_dim: int, *, interleaved: bool) -> tuple[int, ...] | None:
    """The order of a head's elements in which the rotation pairs its halves; None: as they are.

    A checkpoint rotates the first ``rotated`` elements: it pairs the halves of that part, or,
    ``interleaved``, each element with its neighbour. Here the first of each pair come first, then
    the first half of the elements that are not rotated; then the second ones likewise.
    """
    if interleaved:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(rotated // 2), range(rotated // 2, rotated)
    middle = (rotated + head_dim) // 2
    order = (*first, *range(rotated, middle), *second, *range(middle, head_dim))
    return None if order == tuple(range(head_dim)) else order
