"""Enters many tokens at once with numpy, as a loop over single tokens would."""

from __future__ import annotations

from array import array

import numpy as np

from coppice.radix.mirror.suffixes.hashes import (
    LONG,
    LONG_FACTOR,
    MASK,
    SHORT,
    SHORT_FACTOR,
    SPREAD,
)
from coppice.radix.mirror.suffixes.text import NOWHERE


def enter_many(
    older: array[int],
    heads: array[int],
    longs: array[int],
    salt: int,
    entered: array[int],
    positions: array[int],
) -> int:
    """Links `positions`, at which the last of the tokens `entered` were written, to earlier ones.

    Those of them before are the context. Returns the hash of the last `LONG` tokens.
    """
    lead = len(entered) - len(positions)
    wide = np.frombuffer(entered, np.int32).astype(np.uint32)
    places = np.frombuffer(positions, np.int32)
    short = wide * np.uint32(SHORT_FACTOR)
    short[1:] += wide[:-1]
    _link(older, heads, _slots(short, salt, heads), lead, SHORT, places)
    long = wide.copy()
    factor = 1
    for back in range(1, LONG):
        factor = factor * LONG_FACTOR & MASK
        long[back:] += wide[:-back] * np.uint32(factor)
    skipped = max(0, LONG - 1 - lead)
    if skipped < len(places):
        # Of equal slots numpy keeps the last one.
        slots = _slots(long, salt, longs)[lead + skipped :]
        np.frombuffer(longs, np.int32)[slots] = places[skipped:]
    return int(long[-1])


def _slots(hashes: np.ndarray, salt: int, table: array[int]) -> np.ndarray:
    shift = 32 - (len(table).bit_length() - 1)
    mixed = hashes + np.uint32(salt)
    mixed ^= mixed >> np.uint32(15)
    return (mixed * np.uint32(SPREAD)) >> np.uint32(shift)


def _link(
    older: array[int],
    heads: array[int],
    slots: np.ndarray,
    lead: int,
    least: int,
    positions: np.ndarray,
) -> None:
    """Puts each position before the others of its slot."""
    links, first = np.frombuffer(older, np.int32), np.frombuffer(heads, np.int32)
    skipped = max(0, least - 1 - lead)
    links[positions[:skipped]] = NOWHERE
    slots, positions = slots[lead + skipped :], positions[skipped:]
    if not len(positions):
        return
    order = np.argsort(slots, kind="stable")
    slots, positions = slots[order], positions[order]
    same = slots[1:] == slots[:-1]
    before = np.empty_like(positions)
    before[1:] = np.where(same, positions[:-1], first[slots[1:]])
    before[0] = first[slots[0]]
    links[positions] = before
    last = np.append(~same, True)
    first[slots[last]] = positions[last]
