"""Anchors: places that the content of a text chooses, by which it is known again wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.hashes import Hashes, Ints, Tokens
from coppice.radix.tokens import TOKEN_BYTES

WINDOW = 8
"""Tokens from an anchor on that its hash is of."""

REACH = 12
"""An anchor is the least of so many tokens before and behind it."""

MEAN_GAP = 2 * REACH + 1
"""Tokens from one anchor to the next, on average, of text that does not repeat itself."""

FINE_TOKENS = 2048
"""Behind so many tokens of a piece only one anchor of four is kept."""

# Short pieces are searched in groups of so many tokens.
_GROUP_TOKENS = 1 << 16
_LONG_TOKENS = 1 << 15
_GAP = REACH  # places between pieces: no neighbourhood reaches across
_BYTE = np.uint8(0x2D)
_SPREAD = np.uint32(0x9E3779B1)
_ONE_IN_FOUR = np.uint32(1 << 30)
_LANES = np.uint64(0x0001020304050607)  # times 256**i it has i in its highest byte
_CONTENT = np.uint64(0x8CB92BA72F3D8DD7)


@dataclass(frozen=True, slots=True)
class Anchors:
    """Anchors, pieces one after another."""

    hashes: Hashes  # of the `WINDOW` tokens from each on, before a salt; see `hashes.keys`
    piece: Ints
    start: Ints  # offset in the piece, in tokens
    length: Ints  # tokens to the next anchor of the piece, or to its end


class AnchorFinder:
    """Finds the anchors of texts.

    A place is an anchor if a byte, mixed from its token and the one before, is less than those of
    the `REACH` places before and not more than those of the `REACH` behind: a local minimum
    (Schleimer, Wilkerson and Aiken, "Winnowing", SIGMOD 2003, call for one in each window; local
    extrema as borders are from Bjorner, Blass and Gurevich, "Content-dependent chunking for
    differential compression, the local maximum approach", 2010). It depends on nothing further
    away, so an edit changes the anchors around it only; a common text of about 100 tokens has one
    that both sides agree on, nearly always more. Behind `FINE_TOKENS` tokens of a piece the content
    decides which quarter of the anchors is kept: who shares only 100 tokens there, of thousands,
    misses little, and these cost as much as all others. Text that repeats itself at less than
    `REACH` tokens has one for each such stretch.
    """

    def __init__(self) -> None:
        numbers = np.random.default_rng(WINDOW)
        self._multipliers = numbers.integers(0, 2**64 - 1, WINDOW // 2, np.uint64) | 1
        # Buffers are kept, since fresh memory costs more than its use.
        self._scratch = memoryview(bytearray((_GROUP_TOKENS + _LONG_TOKENS) * TOKEN_BYTES))
        self._bytes = np.empty((4, 0), np.uint8)
        self._masks = np.empty((2, 0), np.bool_)

    def find(self, pieces: Sequence[Tokens], skipped: Sequence[int]) -> Anchors:
        """The anchors of `pieces` (int32 bytes), of each from its token `skipped[i]` on. O(tokens).

        Starts are counted from there.
        """
        parts = []
        numbers: list[int] = []  # of pieces in the scratch
        begins: list[int] = []  # where each begins there, in tokens
        at = _GAP

        def find_scratch() -> None:
            if numbers:
                tokens = np.frombuffer(self._scratch, np.uint32, at - _GAP)
                ends = np.array(begins) + [lengths[number] for number in numbers]
                parts.append(self._find(tokens, np.array(numbers), np.array(begins), ends))

        gap = bytes(_GAP * TOKEN_BYTES)
        self._scratch[: len(gap)] = gap
        lengths = [
            len(piece) // TOKEN_BYTES - skip for piece, skip in zip(pieces, skipped, strict=True)
        ]
        for number, length in enumerate(lengths):
            if length > _LONG_TOKENS:
                # Long ones are read where they are.
                tokens = np.frombuffer(pieces[number], np.uint32)[skipped[number] :]
                parts.append(
                    self._find(tokens, np.array([number]), np.array([0]), np.array([length]))
                )
            elif length >= WINDOW:
                if at + length + _GAP > _GROUP_TOKENS:
                    find_scratch()
                    numbers, begins, at = [], [], _GAP
                begin, end = at * TOKEN_BYTES, (at + length) * TOKEN_BYTES
                piece = memoryview(pieces[number])
                self._scratch[begin:end] = piece[skipped[number] * TOKEN_BYTES :]
                self._scratch[end : end + len(gap)] = gap
                numbers.append(number)
                begins.append(at)
                at += length + _GAP
        find_scratch()
        if not parts:
            none = np.zeros(0, np.int64)
            return Anchors(none.astype(np.uint64), none, none, none)
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.argsort(columns[1].astype(np.uint16), kind="stable")
        return Anchors(*(column[order] for column in columns))

    def _find(
        self, tokens: NDArray[np.uint32], numbers: Ints, begins: Ints, ends: Ints
    ) -> tuple[Hashes, Ints, Ints, Ints]:
        """The anchors of the pieces `numbers`, which lie in `tokens` with gaps between them."""
        count = len(tokens)
        if self._bytes.shape[1] < count + 2 * REACH:
            size = (count + 2 * REACH) * 5 // 4 & -8
            self._bytes = np.empty((4, size), np.uint8)
            self._masks = np.empty((2, size), np.bool_)
        low, mixed, least, other = self._bytes[:, : count + 2 * REACH]
        # The low bytes of a token and of the one before, mixed: more would cost more.
        low[REACH - 1] = 0
        np.copyto(low[REACH:-REACH], tokens, casting="unsafe")
        np.multiply(low, _BYTE, out=mixed)
        mixed[1:] ^= low[:-1]
        mixed[-REACH:] = 255
        for begin in begins.tolist():
            mixed[REACH + begin - _GAP : REACH + begin] = 255
        places = self._minima(mixed, least, other)
        # Far from the piece's beginning the token at an anchor decides whether it stays; and all of
        # its window must be there.
        kept = tokens[places] * _SPREAD < _ONE_IN_FOUR
        borders = np.searchsorted(places, [begins, begins + FINE_TOKENS, ends - WINDOW + 1, ends])
        for begin, far, last, end in borders.T.tolist():
            kept[begin:far] = True
            kept[last:end] = False
        places = places[kept]
        owner = np.searchsorted(begins, places, side="right") - 1
        length = np.empty_like(places)
        if len(places):
            np.subtract(places[1:], places[:-1], out=length[:-1])
            last = np.flatnonzero(np.append(owner[1:] != owner[:-1], True))
            length[last] = ends[owner[last]] - places[last]
        return self._hash(tokens, places), numbers[owner], places - begins[owner], length

    def _minima(
        self, mixed: NDArray[np.uint8], least: NDArray[np.uint8], other: NDArray[np.uint8]
    ) -> Ints:
        """Where, counted from `REACH` on, a byte is the least around, the first one of equals."""
        count = len(mixed)
        np.minimum(mixed[1:], mixed[:-1], out=least[: count - 1])  # of 2 from each place on
        np.minimum(least[2 : count - 1], least[: count - 3], out=other[: count - 3])  # of 4
        np.minimum(other[4 : count - 3], other[: count - 7], out=least[: count - 7])  # of 8
        width = count - REACH + 1
        np.minimum(least[:width], other[8 : 8 + width], out=least[:width])  # of 12
        inner = slice(REACH, count - REACH)
        before, behind = self._masks[:, : count - 2 * REACH]
        np.less(mixed[inner], least[: count - 2 * REACH], out=before)
        np.less_equal(mixed[inner], least[REACH + 1 : count - REACH + 1], out=behind)
        before &= behind
        # Among eight places there is one at most, so words of eight are looked at: a third as many.
        mask = self._masks[0, : -(-len(before) // 8) * 8]
        mask[len(before) :] = False
        words = mask.view("<u8")
        places = np.flatnonzero(words != 0)
        lanes = words[places] * _LANES
        lanes >>= np.uint64(56)
        places *= 8
        places += lanes.astype(np.int64)
        return places

    def _hash(self, tokens: NDArray[np.uint32], places: Ints) -> Hashes:
        # All windows of the tokens as overlapping items, which numpy copies whole.
        width = WINDOW * TOKEN_BYTES
        windows = np.ndarray(len(tokens) - WINDOW + 1, f"V{width}", tokens, 0, TOKEN_BYTES)
        words = windows[places].view(np.uint64).reshape(-1, WINDOW // 2)
        hashes = words[:, 0] * self._multipliers[0]
        for column in range(1, WINDOW // 2):
            hashes += words[:, column] * self._multipliers[column]
        hashes += _CONTENT
        return hashes
