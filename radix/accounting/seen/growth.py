"""Tables that grow with what is in them: sets that become two."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_LEAST_SETS = 1 << 10

Entries = TypeVar("Entries", np.uint16, np.uint64)


def doublings(sets: int, most: int) -> int:
    """How often a table is doubled until it has `sets` sets: up to `most` times, if it is large."""
    return min(most, max(0, (sets // _LEAST_SETS).bit_length() - 1))


def split_sets(entries: NDArray[Entries], upper: NDArray[np.bool_]) -> NDArray[Entries]:
    """Each set as two: of the entries that are not `upper`, and of those that are.

    Entries, of which 0 is none, keep their order, without gaps before the last one.
    """
    grown = np.empty((2 * len(entries), entries.shape[1]), entries.dtype)
    for part, kept in ((grown[::2], ~upper), (grown[1::2], upper)):
        chosen = entries * kept
        order = np.argsort(chosen == 0, axis=1, kind="stable")
        part[:] = np.take_along_axis(chosen, order, axis=1)
    return grown
