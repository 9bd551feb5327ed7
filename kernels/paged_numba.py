"""The CPU backend's compiled kernels: rows over pages in place; merge and gather are next door.

``attend_rows`` reads each key and value once for all query heads of its KV head, tile by tile with
an online softmax, straight from the pages. The work is a list of pieces (a row and a range of its
keys); the list is laid end to end and cut into one equal share of keys for each thread, so one long
sequence and many short ones both keep all threads busy. A row that ends up with several parts is
merged from them by log-sum-exp.

Softmax works in base 2 (scale carries log2 e), so that the exponential is a shift of exponent bits
and a polynomial, which vectorises where a call to libm does not: relative error 2e-7, and exactly 0
below 2**-126. Maxima may be -inf, hence no ``nnan`` or ``ninf`` among the fast-math flags.

Compiled on first use and kept on disk by numba (beside this file or, where that cannot be written,
in the user's cache folder; NUMBA_CACHE_DIR moves it).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from coppice.kernels.merge_numba import MERGE_SHARED_FROM, gather_heads, merge_extras, merge_rows

__all__ = ["MERGE_SHARED_FROM", "attend_rows", "gather_heads", "merge_rows"]

# No nnan and no ninf: -inf is the maximum of nothing and the log of no weight.
_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Keys a tile. K and V of a tile (32 x 8 heads x 128 x 4 B x 2 = 256 KiB) stay in a core's L2, and
# the exponential's loops are long enough to vectorise: 1.5 to 2 times the time at 16.
TILE = 32

_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_NEG_INF = np.float32(-np.inf)
# 2**f on [-1/2, 1/2], Taylor coefficients (ln 2)**n / n!
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(math.log(2.0) ** n / math.factorial(n)) for n in range(1, 7)
)


@njit(fastmath=_FAST, cache=True)
def _dot_2x4(
    q: np.ndarray, a: int, b: int, keys: np.ndarray, k0: int, k1: int, k2: int, k3: int, dim: int
) -> tuple[np.float32, ...]:
    """Products of the query vectors at offsets a and b with the keys at k0..k3."""
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = np.float32(0)
    qa, qb = q[a : a + dim], q[b : b + dim]
    x0, x1 = keys[k0 : k0 + dim], keys[k1 : k1 + dim]
    x2, x3 = keys[k2 : k2 + dim], keys[k3 : k3 + dim]
    for d in range(dim):
        x, y = qa[d], qb[d]
        s0 += x * x0[d]
        s1 += x * x1[d]
        s2 += x * x2[d]
        s3 += x * x3[d]
        t0 += y * x0[d]
        t1 += y * x1[d]
        t2 += y * x2[d]
        t3 += y * x3[d]
    return s0, s1, s2, s3, t0, t1, t2, t3


@njit(fastmath=_FAST, cache=True)
def _dot_1x4(
    q: np.ndarray, a: int, keys: np.ndarray, k0: int, k1: int, k2: int, k3: int, dim: int
) -> tuple[np.float32, ...]:
    s0 = s1 = s2 = s3 = np.float32(0)
    qa = q[a : a + dim]
    x0, x1 = keys[k0 : k0 + dim], keys[k1 : k1 + dim]
    x2, x3 = keys[k2 : k2 + dim], keys[k3 : k3 + dim]
    for d in range(dim):
        x = qa[d]
        s0 += x * x0[d]
        s1 += x * x1[d]
        s2 += x * x2[d]
        s3 += x * x3[d]
    return s0, s1, s2, s3


@njit(fastmath=_FAST, cache=True)
def _add_2x4(
    acc: np.ndarray,
    a: int,
    b: int,
    w: np.ndarray,
    p: int,
    r: int,
    values: np.ndarray,
    k0: int,
    k1: int,
    k2: int,
    k3: int,
    dim: int,
) -> None:
    """acc at a and b plus the values at k0..k3, weighted by w[p..p+3] and w[r..r+3]."""
    ya, yb = acc[a : a + dim], acc[b : b + dim]
    x0, x1 = values[k0 : k0 + dim], values[k1 : k1 + dim]
    x2, x3 = values[k2 : k2 + dim], values[k3 : k3 + dim]
    p0, p1, p2, p3 = w[p], w[p + 1], w[p + 2], w[p + 3]
    r0, r1, r2, r3 = w[r], w[r + 1], w[r + 2], w[r + 3]
    for d in range(dim):
        ya[d] += p0 * x0[d] + p1 * x1[d] + p2 * x2[d] + p3 * x3[d]
        yb[d] += r0 * x0[d] + r1 * x1[d] + r2 * x2[d] + r3 * x3[d]


@njit(fastmath=_FAST, cache=True)
def _add_1x4(
    acc: np.ndarray,
    a: int,
    w: np.ndarray,
    p: int,
    values: np.ndarray,
    k0: int,
    k1: int,
    k2: int,
    k3: int,
    dim: int,
) -> None:
    ya = acc[a : a + dim]
    x0, x1 = values[k0 : k0 + dim], values[k1 : k1 + dim]
    x2, x3 = values[k2 : k2 + dim], values[k3 : k3 + dim]
    p0, p1, p2, p3 = w[p], w[p + 1], w[p + 2], w[p + 3]
    for d in range(dim):
        ya[d] += p0 * x0[d] + p1 * x1[d] + p2 * x2[d] + p3 * x3[d]


@njit(fastmath=_FAST, cache=True)
def _softmax_tile(
    s: np.ndarray,
    count: int,
    j: int,
    top: np.ndarray,
    total: np.ndarray,
    acc: np.ndarray,
    bits: np.ndarray,
    powers: np.ndarray,
    dim: int,
) -> None:
    """Turn head j's scores of a tile into weights under its running maximum; rescale what it has.

    ``s`` holds the head's TILE scores. Those from ``count`` on are padding and get weight 0.
    ``bits`` and ``powers`` are one buffer seen as int32 and as float32.
    """
    for t in range(count, TILE):
        s[t] = _NEG_INF
    best = top[j]
    for t in range(TILE):
        best = max(best, s[t])
    if best > top[j]:
        # The first tile comes here with top -inf and no weight yet: 2**-inf is 0, and 0 * 0 is 0.
        shrink = np.float32(2.0 ** (top[j] - best))
        top[j] = best
        total[j] *= shrink
        for d in range(j * dim, j * dim + dim):
            acc[d] *= shrink
    for t in range(TILE):
        x = max(s[t] - best, np.float32(-127))
        whole = np.int32(x - np.float32(0.5))
        f = x - np.float32(whole)
        bits[t] = (whole + np.int32(127)) << np.int32(23)
        poly = _C3 + f * (_C4 + f * (_C5 + f * _C6))
        s[t] = np.float32(1) + f * (_C1 + f * (_C2 + f * poly))
    weight = np.float32(0)
    for t in range(TILE):
        w = s[t] * powers[t]
        s[t] = w
        weight += w
    total[j] += weight


@njit(fastmath=_FAST, cache=True)
def _one_piece(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    table: np.ndarray,
    start: int,
    stop: int,
    page_size: int,
    kv_heads: int,
    heads: int,
    dim: int,
    scale: np.float32,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """One row over its keys start <= t < stop: out [heads * dim], lse [heads], both overwritten."""
    group = heads // kv_heads
    odd = group % 2
    scaled = np.empty(heads * dim, np.float32)
    for d in range(heads * dim):
        scaled[d] = q[d] * (scale * _LOG2E)
        out[d] = np.float32(0)
    top = np.full(heads, _NEG_INF)
    total = np.zeros(heads, np.float32)
    s = np.empty(heads * TILE, np.float32)
    bits = np.empty(TILE, np.int32)
    powers = bits.view(np.float32)
    at = np.empty(TILE, np.int64)
    for begin in range(start, stop, TILE):
        count = min(TILE, stop - begin)
        for t in range(TILE):
            # Padding reads the last key again: memory that the sequence owns, at weight 0.
            position = min(begin + t, stop - 1)
            page = np.int64(table[position // page_size])
            at[t] = (page * page_size + position % page_size) * (kv_heads * dim)
        # Four keys at a time with all their heads: memory is read in order, which prefetching
        # needs. Head by head over the whole tile it came at a third of the speed.
        for t in range(0, count, 4):
            k0, k1, k2, k3 = at[t], at[t + 1], at[t + 2], at[t + 3]
            for h in range(kv_heads):
                for j in range(h * group, h * group + group - 1, 2):
                    a = j * TILE + t
                    b = a + TILE
                    s[a], s[a + 1], s[a + 2], s[a + 3], s[b], s[b + 1], s[b + 2], s[b + 3] = (
                        _dot_2x4(scaled, j * dim, j * dim + dim, keys, k0, k1, k2, k3, dim)
                    )
                if odd:
                    j = h * group + group - 1
                    a = j * TILE + t
                    s[a], s[a + 1], s[a + 2], s[a + 3] = _dot_1x4(
                        scaled, j * dim, keys, k0, k1, k2, k3, dim
                    )
                k0 += dim
                k1 += dim
                k2 += dim
                k3 += dim
        for j in range(heads):
            _softmax_tile(
                s[j * TILE : (j + 1) * TILE], count, j, top, total, out, bits, powers, dim
            )
        for t in range(0, count, 4):
            k0, k1, k2, k3 = at[t], at[t + 1], at[t + 2], at[t + 3]
            for h in range(kv_heads):
                for j in range(h * group, h * group + group - 1, 2):
                    a = j * TILE + t
                    _add_2x4(
                        out, j * dim, j * dim + dim, s, a, a + TILE, values, k0, k1, k2, k3, dim
                    )
                if odd:
                    j = h * group + group - 1
                    _add_1x4(out, j * dim, s, j * TILE + t, values, k0, k1, k2, k3, dim)
                k0 += dim
                k1 += dim
                k2 += dim
                k3 += dim
    for j in range(heads):
        inverse = np.float32(1) / total[j]
        lse[j] = top[j] * _LN2 + np.float32(math.log(total[j]))
        for d in range(j * dim, j * dim + dim):
            out[d] *= inverse


@njit(fastmath=_FAST, cache=True)
def _work_share(
    begin: int,
    end: int,
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    page_indices: np.ndarray,
    pieces: np.ndarray,
    page_size: int,
    kv_heads: int,
    dim: int,
    scale: np.float32,
    out: np.ndarray,
    lse: np.ndarray,
    extra_out: np.ndarray,
    extra_lse: np.ndarray,
) -> None:
    """Pieces ``begin:end``, one after another."""
    heads = q.shape[1] // dim
    for n in range(begin, end):
        row, table, goes = pieces[n, 0], pieces[n, 1], pieces[n, 4]
        if goes < 0:
            piece_out, piece_lse = out[row], lse[row]
        else:
            piece_out, piece_lse = extra_out[goes], extra_lse[goes]
        _one_piece(
            q[row], keys, values, page_indices[table:], pieces[n, 2], pieces[n, 3],
            page_size, kv_heads, heads, dim, scale, piece_out, piece_lse,
        )  # fmt: skip


@njit(parallel=True, fastmath=_FAST, cache=True)
def _work_shares(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    page_indices: np.ndarray,
    pieces: np.ndarray,
    shares: np.ndarray,
    page_size: int,
    kv_heads: int,
    dim: int,
    scale: np.float32,
    out: np.ndarray,
    lse: np.ndarray,
    extra_out: np.ndarray,
    extra_lse: np.ndarray,
) -> None:
    for share in prange(len(shares) - 1):
        _work_share(
            shares[share], shares[share + 1], q, keys, values, page_indices, pieces,
            page_size, kv_heads, dim, scale, out, lse, extra_out, extra_lse,
        )  # fmt: skip


def attend_rows(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    page_indices: np.ndarray,
    pieces: np.ndarray,
    shares: np.ndarray,
    merges: np.ndarray,
    page_size: int,
    kv_heads: int,
    dim: int,
    scale: np.float32,
    out: np.ndarray,
    lse: np.ndarray,
    extra_out: np.ndarray,
    extra_lse: np.ndarray,
) -> None:
    """Attend rows to ranges of their keys, read from the pages in place.

    ``q``, ``out`` float32 ``[T, heads * dim]``, ``lse`` ``[T, heads]``; ``keys`` and ``values`` the
    layer's cache, flat. ``pieces`` int64 ``[n, 5]``: row, offset of its page table in
    ``page_indices``, first key, one past the last (never empty), and where the result goes: -1 for
    ``out`` itself, else a row of ``extra_out`` ``[e, heads * dim]``, ``extra_lse``. ``shares``
    int64 ``[threads + 1]``: thread i works pieces ``shares[i]:shares[i + 1]``. ``merges`` int64
    ``[m, 3]``: row, and the extra rows ``[a, b)`` to be merged into it afterwards.
    """
    rest = (page_size, kv_heads, dim, scale, out, lse, extra_out, extra_lse)
    # Waking threads costs more than a small batch, so what is one share is worked right here.
    if len(shares) == 2:
        _work_share(0, len(pieces), q, keys, values, page_indices, pieces, *rest)
    else:
        _work_shares(q, keys, values, page_indices, pieces, shares, *rest)
    if len(merges):
        merge_extras(merges, dim, out, lse, extra_out, extra_lse)
