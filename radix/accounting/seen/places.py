"""Places of texts that stand for all others: chosen by the tokens around them, everywhere alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.seen.hashes import Hashes, Ints
from coppice.radix.accounting.seen.texts import hashed, rests
from coppice.radix.tokens import TOKEN_BYTES

GROUPS = 16
"""Each place belongs to one of these groups, each of which is a sample by itself."""

_GRAM = 3  # tokens that decide about a place: its own, and those before it
_WINDOW = 16  # tokens up to a place that are its content
_CHUNK = 1 << 15
_GROUP_SHIFT = np.uint32(32 - GROUPS.bit_length() + 1)


@dataclass(frozen=True, slots=True)
class Places:
    """The chosen places, pieces one after another."""

    prefixes: Hashes  # of all tokens up to each place, before a salt
    contents: Hashes  # of the last `_WINDOW` of these
    piece: Ints
    position: Ints  # of the place's token in its text
    group: Ints


class PlaceFinder:
    """Chooses one of `every` places of all texts, by a hash of three tokens with random numbers.

    Equal texts have equal places, so that what is chosen here was chosen when it came before
    (spatial sampling: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015).
    Each place has the same chance.
    """

    def __init__(self, every: int, seed: int | None) -> None:
        """`every` is a power of two up to 2**20. Without a seed the choice is another each time."""
        numbers = np.random.default_rng(seed)
        self._factors = numbers.integers(0, 2**32, _GRAM, np.uint32) | np.uint32(1)
        self._offset = numbers.integers(0, 2**32, 1, np.uint32)
        self._seed = int(numbers.integers(0, 2**63))
        self._less = np.uint32(2**32 // every)
        self._shift = np.uint32(every.bit_length() - 1)
        # Kept, since fresh memory costs more than its use.
        self._sum = np.empty(_CHUNK, np.uint32)
        self._product = np.empty(_CHUNK, np.uint32)

    def find(self, texts: list[bytes], begins: list[int]) -> Places:
        """The chosen places of texts (int32 bytes), of each from its token `begins[i]` on.

        O(tokens from there on, and for a text with a chosen place all tokens).
        """
        before = _GRAM - 1
        joined = np.frombuffer(b"".join(rests(texts, begins, before)), np.uint32)
        first = np.array(begins, np.int64)
        sizes = np.array([len(text) for text in texts], np.int64) // TOKEN_BYTES - first + before
        starts = np.cumsum(sizes) - sizes
        places, hashes = self._chosen(joined)
        piece = starts.searchsorted(places, "right") - 1
        position = places - starts[piece] - before
        kept = position >= 0
        piece, position, hashes = piece[kept], position[kept], hashes[kept]
        position += first[piece]
        prefixes, contents = hashed(texts, piece.tolist(), position.tolist(), _WINDOW, self._seed)
        # The bits after those that decided.
        group = (hashes << self._shift) >> _GROUP_SHIFT
        return Places(
            np.array(prefixes, np.uint64),
            np.array(contents, np.uint64),
            piece,
            position,
            group.astype(np.int64),
        )

    def _chosen(self, tokens: NDArray[np.uint32]) -> tuple[Ints, NDArray[np.uint32]]:
        """The chosen places with `_GRAM - 1` tokens before them, and their hashes."""
        found, hashes = [], []
        after = len(tokens) - _GRAM + 1
        for begin in range(0, after, _CHUNK):
            count = min(_CHUNK, after - begin)
            sums, product = self._sum[:count], self._product[:count]
            np.multiply(tokens[begin : begin + count], self._factors[0], out=sums)
            for at in range(1, _GRAM):
                np.multiply(tokens[begin + at : begin + at + count], self._factors[at], out=product)
                sums += product
            sums += self._offset
            places = np.flatnonzero(sums < self._less)
            found.append(places + (begin + _GRAM - 1))
            hashes.append(sums[places])
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.uint32)
        return np.concatenate(found), np.concatenate(hashes)
