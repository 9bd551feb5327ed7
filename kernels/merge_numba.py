"""The CPU backend's compiled kernels around a product: merge by log-sum-exp, gather by head.

Compiled and kept on disk as ``paged_numba`` is. numba looks at the file of the function that it
loads, and not at those of the functions that one calls, so no compiled function here is called by a
compiled one there, nor the other way round.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

# As in ``paged_numba``: an lse may be -inf.
_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Numbers from which a merge is shared among threads: below, it takes no longer than waking them.
MERGE_SHARED_FROM = 1 << 18
_NEG_INF = np.float32(-np.inf)


@njit(fastmath=_FAST, cache=True)
def _merge_head(
    out: np.ndarray, lse: np.float32, other: np.ndarray, other_lse: np.float32, dim: int
) -> np.float32:
    """Merge one head's result over other keys into ``out`` [dim]; returns the new lse."""
    high = max(lse, other_lse)
    if high == _NEG_INF:
        return high
    mine, theirs = np.float32(math.exp(lse - high)), np.float32(math.exp(other_lse - high))
    both = mine + theirs
    mine /= both
    theirs /= both
    for d in range(dim):
        out[d] = mine * out[d] + theirs * other[d]
    return high + np.float32(math.log(both))


@njit(fastmath=_FAST, cache=True)
def merge_extras(
    merges: np.ndarray,
    dim: int,
    out: np.ndarray,
    lse: np.ndarray,
    extra_out: np.ndarray,
    extra_lse: np.ndarray,
) -> None:
    """Merge the extra parts of rows that were cut; arguments as of ``paged_numba.attend_rows``."""
    for n in range(len(merges)):
        row = merges[n, 0]
        for extra in range(merges[n, 1], merges[n, 2]):
            for j in range(lse.shape[1]):
                lse[row, j] = _merge_head(
                    out[row, j * dim : j * dim + dim], lse[row, j],
                    extra_out[extra, j * dim : j * dim + dim], extra_lse[extra, j], dim,
                )  # fmt: skip


@njit(fastmath=_FAST, cache=True)
def _merge_range(
    begin: int,
    end: int,
    out: np.ndarray,
    lse: np.ndarray,
    rows: np.ndarray,
    other: np.ndarray,
    other_lse: np.ndarray,
) -> None:
    kv_heads, group = other.shape[0], other.shape[2]
    for n in range(begin, end):
        row = rows[n]
        for h in range(kv_heads):
            for g in range(group):
                j = h * group + g
                lse[row, j] = _merge_head(
                    out[row, j], lse[row, j], other[h, n, g], other_lse[h, n, g], out.shape[2]
                )


@njit(parallel=True, fastmath=_FAST, cache=True)
def _merge_shares(
    threads: int,
    out: np.ndarray,
    lse: np.ndarray,
    rows: np.ndarray,
    other: np.ndarray,
    other_lse: np.ndarray,
) -> None:
    for share in prange(threads):
        begin, end = len(rows) * share // threads, len(rows) * (share + 1) // threads
        _merge_range(begin, end, out, lse, rows, other, other_lse)


def merge_rows(
    out: np.ndarray,
    lse: np.ndarray,
    rows: np.ndarray,
    other: np.ndarray,
    other_lse: np.ndarray,
    threads: int,
) -> None:
    """Merge results over further keys into rows of ``out`` ``[T, heads, dim]``, ``lse``.

    ``rows`` int64 ``[R]``, no row twice. ``other`` float32 ``[kv_heads, R, group, dim]``,
    ``other_lse`` ``[kv_heads, R, group]``: the layout of query heads folded into rows.
    """
    if threads == 1 or other.size < MERGE_SHARED_FROM:
        _merge_range(0, len(rows), out, lse, rows, other, other_lse)
    else:
        _merge_shares(threads, out, lse, rows, other, other_lse)


@njit(parallel=True, cache=True)
def gather_heads(
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    pages: np.ndarray,
    first: int,
    count: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """Copy ``count`` tokens, from slot ``first`` of the first of ``pages`` on, into ``out``.

    The caches are ``[num_pages, page_size, kv_heads, dim]``, ``out``
    ``[2, kv_heads, count, dim]``, keys and values.
    """
    page_size, kv_heads, dim = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    for share in prange(threads):
        for t in range(count * share // threads, count * (share + 1) // threads):
            position = first + t
            page, slot = pages[position // page_size], position % page_size
            for h in range(kv_heads):
                for d in range(dim):
                    out[0, h, t, d] = k_cache[page, slot, h, d]
            for h in range(kv_heads):
                for d in range(dim):
                    out[1, h, t, d] = v_cache[page, slot, h, d]
