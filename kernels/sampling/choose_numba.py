"""Tokens by temperature, top-k, top-p and min-p on a CPU: compiled, in a few passes.

The results are those of ``choose``. The last token that a filter keeps is found by the bits of its
probability, ten at a time: one pass over a row adds up the weights in each of 1,024 ranges of
probabilities, and only the range in which the filter ends is divided again. That takes two passes
where bisection takes thirty.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, types

from coppice.kernels.cpu.code.calls import pointer, run_shares
from coppice.kernels.cpu.code.kept import cfunc, njit
from coppice.kernels.sampling.columns import COLUMNS, MIN_P, TEMPERATURE, TOP_K, TOP_P, UNIFORM

_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Logits of all rows from which threads share the rows.
_SHARED_FROM = 1 << 16
# Bits of a key that a pass reads, of 30: the key of 1.0, the greatest, has 30.
_BITS = 10
_BINS = 1 << _BITS
# Kept weights are added up in pieces of this length; only one is read again to find the token.
_PIECE = 1024
# Numbers at a time of what needs a buffer: it stays in the nearest cache.
_TILE = 64
_FRAME = 7

_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts, the first of few bits, so that its multiples are exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# Below this exp is less than the least of the usual floats, and taken for 0.
_LEAST = np.float32(-126 * math.log(2.0))
# exp on half an octave to either side of 1, Taylor coefficients 1 / n!
_E2, _E3, _E4, _E5, _E6, _E7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))


@njit(fastmath=_FAST)
def _greatest(row: np.ndarray) -> np.float32:
    """The maximum of a row, by integers in the order of its floats: their maximum vectorises."""
    bits, most = row.view(np.int32), np.int32(-0x80000000)
    for i in range(len(row)):
        ordered = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        most = max(most, ordered)
    found = np.empty(1, np.int32)
    found[0] = most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF))
    return found.view(np.float32)[0]


# Nothing may be reordered here: the two parts of ln 2 are there for their rounding.
@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def _weigh(row: np.ndarray, top: np.float32, temperature: np.float32, weights: np.ndarray) -> None:
    """``exp((row - top) / temperature)``, to a unit or two in the last place; 0 of NaN and -inf."""
    x, bits = np.zeros(_TILE, np.float32), np.empty(_TILE, np.int32)
    powers = bits.view(np.float32)
    for at in range(0, len(row), _TILE):
        count = min(_TILE, len(row) - at)
        theirs, mine = row[at : at + count], weights[at : at + count]
        for t in range(count):
            each = (theirs[t] - top) / temperature
            x[t] = each if each > _LEAST else _LEAST  # so is NaN
        for t in range(_TILE):
            power = np.int32(x[t] * _LOG2E + np.float32(127.5))
            n = np.float32(power) - np.float32(127)
            r = (x[t] - n * _LN2_HIGH) - n * _LN2_LOW
            inner = _E3 + r * (_E4 + r * (_E5 + r * (_E6 + r * _E7)))
            bits[t] = power << np.int32(23) if x[t] > _LEAST else np.int32(0)
            x[t] = np.float32(1) + r * (np.float32(1) + r * (_E2 + r * inner))
        for t in range(count):
            mine[t] = x[t] * powers[t]


@njit(fastmath=_FAST)
def _sum(weights: np.ndarray) -> float:
    total = 0.0
    for i in range(len(weights)):
        total += np.float64(weights[i])
    return total


@njit
def _walk(
    counts: np.ndarray, sums: np.ndarray, target: float, counted: bool, above: int, mass: float
) -> tuple[int, int, float]:
    """The highest range with which the target is reached, and what is above that range.

    ``above`` keys and their ``mass`` lie above all ranges. -1 if the target is not reached.
    """
    for place in range(_BINS - 1, -1, -1):
        more, heavier = above + counts[place], mass + sums[place]
        if counts[place] and (more if counted else heavier) >= target:
            return place, above, mass
        above, mass = more, heavier
    return -1, above, mass


@njit
def _last_kept(
    weights: np.ndarray,
    target: float,
    counted: bool,
    counts: np.ndarray,
    sums: np.ndarray,
    inside: np.ndarray,
) -> tuple[int, int, float]:
    """The key with which the target is reached, and the number and weight of keys above it.

    The target is a number of tokens if ``counted``, else a weight. Key 0 if it is not reached.
    """
    keys, chosen = weights.view(np.int32), inside.view(np.int32)
    counts[:] = 0
    sums[:] = 0
    for i in range(len(keys)):
        place = keys[i] >> np.int32(2 * _BITS)
        counts[place] += 1
        sums[place] += np.float64(weights[i])
    first, above, mass = _walk(counts, sums, target, counted, 0, 0.0)
    if first < 0:
        return 0, above, mass
    number = 0
    for i in range(len(keys)):
        if keys[i] >> np.int32(2 * _BITS) == first:
            chosen[number] = keys[i]
            number += 1
    prefix = first
    for shift in (_BITS, 0):
        counts[:] = 0
        sums[:] = 0
        least = _BINS
        for i in range(number):
            if chosen[i] >> np.int32(shift + _BITS) == prefix:
                place = (chosen[i] >> np.int32(shift)) & np.int32(_BINS - 1)
                counts[place] += 1
                sums[place] += np.float64(inside[i])
                least = min(least, place)
        found, more, heavier = _walk(counts, sums, target, counted, above, mass)
        if found < 0:  # by rounding, since there was as much before
            found, more, heavier = least, more - counts[least], heavier - sums[least]
        prefix, above, mass = prefix << _BITS | found, more, heavier
    return prefix, above, mass


@njit
def _draw(
    weights: np.ndarray, last: int, equals: float, least: np.float32, uniform: float,
    sums: np.ndarray, ranks: np.ndarray,
) -> int:  # fmt: skip
    """The first token at which the running sum of what is kept exceeds ``uniform`` of all of it.

    Kept are keys above ``last`` and the first ``equals`` that equal it, of at least the weight
    ``least``. Where rounding passes the very end, the last kept token is chosen.
    """
    width, keys = len(weights), weights.view(np.int32)
    pieces, rank, total = -(-width // _PIECE), 0, 0.0
    for piece in range(pieces):
        begin, end = piece * _PIECE, min(width, (piece + 1) * _PIECE)
        ranks[piece] = rank
        if last <= 0 and least <= np.float32(0):
            sums[piece] = _sum(weights[begin:end])
        else:
            kept = 0.0
            for i in range(begin, end):
                if keys[i] < last or weights[i] < least:
                    continue
                if keys[i] == last:
                    rank += 1
                    if rank > equals:
                        continue
                kept += np.float64(weights[i])
            sums[piece] = kept
        total += sums[piece]
    threshold, running, latest = uniform * total, 0.0, 0
    for piece in range(pieces):
        if not sums[piece]:
            continue
        latest = piece
        if running + sums[piece] > threshold:
            token, found = _within(
                weights, piece, last, equals, least, threshold, running, ranks[piece]
            )
            if found:  # else this sum, in another order, has been smaller
                return token
        running += sums[piece]
    return _within(weights, latest, last, equals, least, np.inf, 0.0, ranks[latest])[0]


@njit
def _within(
    weights: np.ndarray, piece: int, last: int, equals: float, least: np.float32,
    threshold: float, running: float, rank: int,
) -> tuple[int, bool]:  # fmt: skip
    """The token of a piece at which the sum exceeds the threshold; else its last one, and False."""
    keys, token = weights.view(np.int32), 0
    for i in range(piece * _PIECE, min(len(weights), (piece + 1) * _PIECE)):
        if keys[i] < last or weights[i] < least or not weights[i]:
            continue
        if keys[i] == last:
            rank += 1
            if rank > equals:
                continue
        token = i
        running += np.float64(weights[i])
        if running > threshold:
            return token, True
    return token, False


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_rows(frame: int, begin: int, end: int) -> None:
    """The tokens of the places ``begin .. end`` of what ``choose_rows`` has laid out in a frame."""
    f = carray(pointer(frame), (_FRAME,), np.int64)
    num_rows, width, chosen = f[0], f[1], f[2]
    logits = carray(pointer(f[3]), (num_rows, width), np.float32)
    columns = carray(pointer(f[4]), (num_rows, COLUMNS), np.float64)
    rows = carray(pointer(f[5]), (chosen,), np.int64)
    tokens = carray(pointer(f[6]), (num_rows,), np.int64)
    weights, inside = np.empty(width, np.float32), np.empty(width, np.float32)
    counts, sums = np.empty(_BINS, np.int64), np.empty(_BINS)
    pieces = -(-width // _PIECE)
    piece_sums, ranks = np.empty(pieces), np.empty(pieces, np.int64)
    value = np.empty(1, np.int32)
    for place in range(begin, end):
        row = rows[place]
        top_k, top_p = columns[row, TOP_K], columns[row, TOP_P]
        temperature = np.float32(columns[row, TEMPERATURE])
        _weigh(logits[row], _greatest(logits[row]), temperature, weights)
        last, equals = 0, np.inf
        if top_k < width or top_p < 1:
            total = _sum(weights)
            if top_k < width:
                last, above, mass = _last_kept(weights, top_k, True, counts, sums, inside)
                equals = top_k - above
                value[0] = last
                total = mass + equals * np.float64(value.view(np.float32)[0])
            if top_p < 1:
                target = top_p * total
                key, above, mass = _last_kept(weights, target, False, counts, sums, inside)
                if key:
                    value[0] = key
                    each = np.float64(value.view(np.float32)[0])
                    count = max(math.ceil((target - mass) / each), 1.0)
                    if key > last:
                        last, equals = key, count
                    elif key == last:
                        equals = min(equals, count)
        least, uniform = np.float32(columns[row, MIN_P]), columns[row, UNIFORM]
        tokens[row] = _draw(weights, last, equals, least, uniform, piece_sums, ranks)


def choose_rows(
    logits: np.ndarray, columns: np.ndarray, rows: np.ndarray, tokens: np.ndarray, num_threads: int
) -> None:
    """Writes the tokens of some ``rows`` to ``tokens``; see ``choose.choose``.

    ``logits`` float32 ``[R, V]``, ``columns`` float64 ``[R, COLUMNS]``, ``tokens`` int64 ``[R]``,
    and ``rows`` int64 indices, all contiguous; many are shared among up to ``num_threads``
    threads. O(rows * V).
    """
    num_rows, width = logits.shape
    held = [logits, columns, rows, tokens]
    frame = np.array([num_rows, width, len(rows), *(each.ctypes.data for each in held)], np.int64)
    if len(rows) == 1 or num_threads == 1 or len(rows) * width < _SHARED_FROM:
        run_rows.ctypes(frame.ctypes.data, 0, len(rows))
        return
    shares = min(len(rows), num_threads)
    run_shares(run_rows.address, frame.ctypes.data, np.arange(shares + 1) * len(rows) // shares)
