"""The hashes of the last few tokens of a text, by which earlier places are found.

A place is found by its last `SHORT` tokens, through a chain of the places where these occurred, and
by its last `LONG` tokens, of which the last place alone is kept: common words have more places than
one can visit, so a chain alone would miss those where much more is equal.
"""

from __future__ import annotations

from array import array
from typing import Final

SHORT: Final = 2
LONG: Final = 6

MASK: Final = 0xFFFFFFFF
SHORT_FACTOR: Final = 0x9E3779B  # of the last token; the one before is added to it
LONG_FACTOR: Final = 0x8DA6B35
SPREAD: Final = 0x1B873593

LONG_AWAY: Final = 0x6A06E657
"""Factor of the token that leaves the last `LONG` when another one comes."""


def hash_long(tokens: array[int], end: int) -> int:
    """Of the last `LONG` tokens before index `end`, or of all if there are fewer."""
    hashed = 0
    for index in range(max(0, end - LONG), end):
        hashed = (hashed * LONG_FACTOR + tokens[index]) & MASK
    return hashed


def slot(hashed: int, salt: int, shift: int) -> int:
    """The place of a hash in a table of `2**(32 - shift)` entries."""
    mixed = hashed + salt & MASK
    return ((mixed ^ mixed >> 15) * SPREAD & MASK) >> shift
