"""Anchors: places that depend only on the text around them, so that it is found at any offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.seen.hashes import Hashes, Ints, Tokens
from coppice.radix.tokens import TOKEN_BYTES

WINDOW = 8
"""Tokens that an anchor's hash covers, from the anchor on."""

REACH = 12
"""An anchor is the least of this many tokens before and after it."""

MEAN_GAP = 2 * REACH + 1
"""Tokens from one anchor to the next, on average, of text that does not repeat itself."""

FINE_TOKENS = 2048
"""After this many tokens of a piece only one anchor of four is kept."""

_NEAR_TOKENS = FINE_TOKENS + REACH  # those that decide about the first `FINE_TOKENS` places
_LEAST_BYTES = np.uint8(3)  # the byte of a quarter of all anchors is less

# The beginnings of pieces are searched in groups of this many tokens.
_GROUP_TOKENS = 1 << 15
_GAP = REACH  # places between pieces: no neighbourhood reaches across
_BYTE = np.uint8(0x2D)
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
    the `REACH` places before and not more than those of the `REACH` after: a local minimum
    (Schleimer, Wilkerson and Aiken, "Winnowing", SIGMOD 2003, call for one in each window; local
    extrema as borders are from Bjorner, Blass and Gurevich, "Content-dependent chunking for
    differential compression, the local maximum approach", 2010). It depends on nothing further
    away, so an edit changes the anchors around it only; a common text of about 100 tokens has one
    that both sides agree on, nearly always more. After `FINE_TOKENS` tokens of a piece only those
    with the least bytes are kept, about a quarter: they are found faster, since few places can be
    one, and a text of 100 tokens that is missed there is a small part of the piece. Text that
    repeats itself at less than `REACH` tokens has one for each such stretch.
    """

    def __init__(self) -> None:
        numbers = np.random.default_rng(WINDOW)
        self._multipliers = numbers.integers(0, 2**64 - 1, WINDOW // 2, np.uint64) | 1
        # Buffers are kept, since fresh memory costs more than its use.
        self._scratch = memoryview(bytearray(_GROUP_TOKENS * TOKEN_BYTES))
        self._bytes = np.empty((4, 0), np.uint8)
        self._masks = np.empty((2, 0), np.bool_)

    def find(self, pieces: Sequence[Tokens], skipped: Sequence[int]) -> Anchors:
        """The anchors of `pieces` (int32 bytes), of each from its token `skipped[i]` on. O(tokens).

        Starts are counted from there.
        """
        parts = []  # of hashes, pieces and starts
        numbers: list[int] = []  # of pieces in the scratch
        begins: list[int] = []  # where each begins there, in tokens
        at = _GAP

        def find_near() -> None:
            if numbers:
                tokens = np.frombuffer(self._scratch, np.uint32, at - _GAP)
                parts.append(self._near(tokens, np.array(numbers), np.array(begins), lengths))

        gap = bytes(_GAP * TOKEN_BYTES)
        self._scratch[: len(gap)] = gap
        lengths = np.array([len(piece) for piece in pieces], np.int64) // TOKEN_BYTES - skipped
        for number, length in enumerate(lengths.tolist()):
            if length < WINDOW:
                continue
            near = min(length, _NEAR_TOKENS)
            if at + near + _GAP > _GROUP_TOKENS:
                find_near()
                numbers, begins, at = [], [], _GAP
            begin, end = at * TOKEN_BYTES, (at + near) * TOKEN_BYTES
            first = skipped[number] * TOKEN_BYTES
            self._scratch[begin:end] = memoryview(pieces[number])[first : first + end - begin]
            self._scratch[end : end + len(gap)] = gap
            numbers.append(number)
            begins.append(at)
            at += near + _GAP
        find_near()
        parts.append(self._far(pieces, skipped, lengths))
        hashes, piece, start = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(piece.astype(np.uint16), kind="stable")
        hashes, piece, start = hashes[order], piece[order], start[order]
        end = np.append(start[1:], 0)
        last = np.flatnonzero(np.append(piece[1:] != piece[:-1], True))[: len(piece)]
        end[last] = lengths[piece[last]]
        return Anchors(hashes, piece, start, end - start)

    def _near(
        self, tokens: NDArray[np.uint32], numbers: Ints, begins: Ints, lengths: Ints
    ) -> tuple[Hashes, Ints, Ints]:
        """The anchors before `FINE_TOKENS` of pieces that lie in `tokens` with gaps between."""
        count = len(tokens)
        self._fit(count + 2 * REACH + 8)
        low, mixed, least, other = self._bytes[:, : count + 2 * REACH]
        _mix(tokens, low[REACH:-REACH], mixed[REACH:-REACH])
        mixed[-REACH:] = 255
        for begin in begins.tolist():
            mixed[REACH + begin - _GAP : REACH + begin] = 255
        places = self._minima(mixed, least, other)
        owner = np.searchsorted(begins, places, side="right") - 1
        start, piece = places - begins[owner], numbers[owner]
        # All of an anchor's window must be there.
        kept = start < np.minimum(lengths - WINDOW + 1, FINE_TOKENS)[piece]
        return self._hash(_windows(tokens)[places[kept]]), piece[kept], start[kept]

    def _far(
        self, pieces: Sequence[Tokens], skipped: Sequence[int], lengths: Ints
    ) -> tuple[Hashes, Ints, Ints]:
        """The anchors from `FINE_TOKENS` on: only places with small bytes can be or prevent one."""
        numbers = np.flatnonzero(lengths >= FINE_TOKENS + WINDOW)
        begin = FINE_TOKENS - REACH
        found, values, windows = [], [], []
        owners = []  # of each part, which of the numbers
        for order, number in enumerate(numbers.tolist()):
            # One token more: the first place has one before it.
            tokens = np.frombuffer(pieces[number], np.uint32)[skipped[number] + begin - 1 :]
            for first in range(0, len(tokens) - 1, _GROUP_TOKENS):
                part = tokens[first : first + _GROUP_TOKENS + 1]
                self._fit(len(part))
                low, mixed = self._bytes[:2, : len(part)]
                _mix(part, low, mixed)
                mask = self._masks[0, : len(part)]
                np.less(mixed, _LEAST_BYTES, out=mask)
                mask[0] = False
                places = mask.nonzero()[0]
                values.append(mixed[places])
                places += first
                found.append(places)
                owners.append(order)
                windows.append(_windows(tokens)[np.minimum(places, len(tokens) - WINDOW)])
        if not found:
            none = np.zeros(0, np.int64)
            return none.astype(np.uint64), none, none
        counts = np.array([len(places) for places in found])
        start = np.concatenate(found)
        start += begin - 1
        owner = np.repeat(np.array(owners), counts)
        piece = numbers[owner]
        before = np.cumsum(lengths[numbers]) - lengths[numbers]  # so that pieces are far apart
        kept = _least_around(start + before[owner], np.concatenate(values))
        kept &= (start >= FINE_TOKENS) & (start <= lengths[piece] - WINDOW)
        return self._hash(np.concatenate(windows)[kept]), piece[kept], start[kept]

    def _fit(self, count: int) -> None:
        """Makes the buffers at least `count` long."""
        if self._bytes.shape[1] < count:
            self._bytes = np.empty((4, count * 5 // 4 & -8), np.uint8)
            self._masks = np.empty((2, count * 5 // 4 & -8), np.bool_)

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
        before, after = self._masks[:, : count - 2 * REACH]
        np.less(mixed[inner], least[: count - 2 * REACH], out=before)
        np.less_equal(mixed[inner], least[REACH + 1 : count - REACH + 1], out=after)
        before &= after
        # Among eight places there is at most one anchor, so eight are tested as one word.
        mask = self._masks[0, : -(-len(before) // 8) * 8]
        mask[len(before) :] = False
        words = mask.view("<u8")
        places = np.flatnonzero(words != 0)
        lanes = words[places] * _LANES
        lanes >>= np.uint64(56)
        places *= 8
        places += lanes.astype(np.int64)
        return places

    def _hash(self, windows: NDArray[np.void]) -> Hashes:
        words = windows.view(np.uint64).reshape(-1, WINDOW // 2)
        hashes = words[:, 0] * self._multipliers[0]
        for column in range(1, WINDOW // 2):
            hashes += words[:, column] * self._multipliers[column]
        hashes += _CONTENT
        return hashes


def _windows(tokens: NDArray[np.uint32]) -> NDArray[np.void]:
    """All windows of the tokens as overlapping items, which numpy copies whole."""
    return np.ndarray(len(tokens) - WINDOW + 1, f"V{WINDOW * TOKEN_BYTES}", tokens, 0, TOKEN_BYTES)


def _mix(tokens: NDArray[np.uint32], low: NDArray[np.uint8], mixed: NDArray[np.uint8]) -> None:
    """The low byte of each token, and the same mixed with that of the token before."""
    np.copyto(low, tokens, casting="unsafe")
    np.multiply(low, _BYTE, out=mixed)
    mixed[1:] ^= low[:-1]


def _least_around(places: Ints, values: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which places have the least value within `REACH` of them, the first one of equals."""
    kept = np.ones(len(places), np.bool_)
    for shift in range(1, min(REACH + 1, len(places))):
        near = places[shift:] - places[:-shift] <= REACH
        if not near.any():
            break
        first, second = values[:-shift], values[shift:]
        kept[shift:] &= ~(near & (first <= second))
        kept[:-shift] &= ~(near & (second < first))
    return kept
