"""Adds low-rank products to rows, ``y += B (A x)`` with matrices that differ by row, compiled.

A row's matrices are those of its group. The result of a row depends on that row and its group
alone: the same code, which is called by its address, computes it by itself and among others.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types

from coppice.kernels.cpu.code.calls import pointer, run_share, run_shares
from coppice.kernels.cpu.code.kept import cfunc, njit

_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Numbers of all rows from which threads share the rows: below, waking them takes longer.
_SHARED_FROM = 1 << 14
# Numbers and addresses that ``run_rows`` is given.
_FRAME = 10

#: What a row of ``pieces`` has: the addresses of A and B, the rank, the first column of ``y`` that
#: B adds to, and their number.
COLUMNS = ("down", "up", "rank", "first", "width")
#: Ranks are multiples of this: so many rows of A and B are read at a time.
RANKS = 4


@cfunc(types.void(*[types.int64] * 3), fastmath=_FAST, error_model="numpy")
def run_rows(frame: int, begin: int, end: int) -> None:
    """The entries ``begin .. end`` of the rows of ``add_low_rank``, which lays out the frame."""
    f = carray(pointer(frame), (_FRAME,), np.int64)
    count, width, out_width, num_groups, num_pieces = f[0], f[1], f[2], f[3], f[4]
    rows = carray(pointer(f[7]), (count,), np.int64)
    groups = carray(pointer(f[8]), (count,), np.int64)
    first_piece = carray(pointer(f[9]), (num_groups + 1,), np.int64)
    pieces = carray(pointer(f[9] + 8 * (num_groups + 1)), (num_pieces, 5), np.int64)
    for place in range(begin, end):
        row, group = rows[place], groups[place]
        mine = carray(pointer(f[5] + 4 * width * row), (width,), np.float32)
        for piece in range(first_piece[group], first_piece[group + 1]):
            rank, out = pieces[piece, 2], pieces[piece, 4]
            down = carray(pointer(pieces[piece, 0]), (rank, width), np.float32)
            up = carray(pointer(pieces[piece, 1]), (rank, out), np.float32)
            target = carray(
                pointer(f[6] + 4 * (out_width * row + pieces[piece, 3])), (out,), np.float32
            )
            for r in range(0, rank, 4):
                a0, a1, a2, a3 = down[r], down[r + 1], down[r + 2], down[r + 3]
                t0, t1, t2, t3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for d in range(width):
                    each = mine[d]
                    t0 += a0[d] * each
                    t1 += a1[d] * each
                    t2 += a2[d] * each
                    t3 += a3[d] * each
                b0, b1, b2, b3 = up[r], up[r + 1], up[r + 2], up[r + 3]
                for d in range(out):
                    target[d] += t0 * b0[d] + t1 * b1[d] + t2 * b2[d] + t3 * b3[d]


@njit
def _run_alone(function: int, frame: int, count: int) -> None:
    run_share(function, frame, 0, count)


def piece_table(pieces: list[list[list[int]]]) -> tuple[np.ndarray, int, int]:
    """The pieces of each group, rows of ``COLUMNS``, as ``add_low_rank`` reads them."""
    first = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(group) for group in pieces], out=first[1:])
    flat = [number for group in pieces for piece in group for number in piece]
    table = np.concatenate((first, np.array(flat, np.int64)))
    return table, len(pieces), int(first[-1])


def add_low_rank(
    x: np.ndarray,
    y: np.ndarray,
    rows: np.ndarray,
    groups: np.ndarray,
    table: tuple[np.ndarray, int, int],
    num_threads: int,
) -> None:
    """Adds to ``y`` float32 ``[T, N]``, in place, the products of ``x`` float32 ``[T, K]``.

    Both are contiguous. ``rows`` int64 ``[R]`` are the rows that have some, ``groups`` int64
    ``[R]`` the group of each, and ``table`` is what ``piece_table`` made of the groups' pieces: A
    float32 ``[rank, K]`` and B float32 ``[rank, width]`` (transposed), contiguous, of ranks that
    are multiples of ``RANKS``.
    """
    numbers, num_groups, num_pieces = table
    count, width = len(rows), x.shape[1]
    frame = np.array(
        [
            count, width, y.shape[1], num_groups, num_pieces, x.ctypes.data, y.ctypes.data,
            rows.ctypes.data, groups.ctypes.data, numbers.ctypes.data,
        ],
        np.int64,
    )  # fmt: skip
    shares = min(count, num_threads) if count * width >= _SHARED_FROM else 1
    if shares <= 1:
        _run_alone(run_rows.address, frame.ctypes.data, count)
    else:
        limits = np.arange(shares + 1) * count // shares
        run_shares(run_rows.address, frame.ctypes.data, limits)
