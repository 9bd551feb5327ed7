"""Products of float32 rows with float weights, for compiled code to call.

``float_panels`` has the product of a panel, which is called by its address.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from coppice.kernels.cpu.code.calls import run_share
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.memory import lines
from coppice.kernels.cpu.code.pairs import round_row
from coppice.kernels.cpu.code.simd import ROWS
from coppice.kernels.cpu.code.team import (
    Member,
    came_together,
    gathered,
    meet,
    member,
    new_team,
)
from coppice.kernels.cpu.layer.matmul.row_blocks import PAIRS, TILES, Panels, lay_share
from coppice.kernels.cpu.layer.matmul.tiles import shares

# Multiplications from which panels are shared among threads: below, waking them takes longer.
_SHARED_FROM = 1 << 19
# Bytes of rows that are multiplied together: the second-level cache holds them for all panels.
_TOGETHER = 600_000

_tile_share, _tile_numbers = shares.multiply_share, shares.laid_numbers


@njit
def _parts(rows: int, inner: int) -> int:
    """The number of parts of the rows that are multiplied one after the other."""
    return max(min(-(-4 * rows * inner // _TOGETHER), -(-rows // ROWS)), 1)


@njit
def laid_numbers(rows: int, inner: int) -> int:
    """Float32 numbers that ``multiply_share`` needs to lay out up to ``rows`` rows of ``inner``."""
    # Rounded up, and one more each for an incomplete block and for an uneven division into parts.
    most = _TOGETHER // (4 * inner * ROWS) + 3
    return max(min(most * ROWS, rows) * inner, _tile_numbers(rows, inner))


@njit
def multiply_share(
    team: Member,
    met: int,
    panels: Panels,
    x: np.ndarray,
    weight: int,
    bias: int,
    out: np.ndarray,
    laid: np.ndarray,
) -> int:
    """A team member's share of ``multiply_rows``; returns when all members have finished.

    ``met`` and the result are those of ``meet``. All members share ``laid``, float32 of at least
    ``laid_numbers``.
    """
    if panels.kind == TILES:
        return _tile_share(team, met, panels, x, weight, bias, out, laid)
    rows, inner = x.shape
    width = out.shape[1]
    me, threads = team.me, team.threads
    count = -(-width // panels.width)
    frame = np.empty(8, np.int64)
    frame[1], frame[2], frame[4], frame[5] = inner, width, weight, bias
    frame[7] = panels.kind
    blocks, parts = -(-rows // ROWS), _parts(rows, inner)
    pairs = panels.kind == PAIRS
    alone = np.empty(inner // 2 if pairs else 0, np.float32)
    for part in range(parts):
        first, last = part * blocks // parts, (part + 1) * blocks // parts
        begin, end = first * ROWS, min(last * ROWS, rows)
        frame[0] = end - begin
        frame[3], frame[6] = x[begin:].ctypes.data, out[begin:].ctypes.data
        if end - begin > 1:
            one = (last - first) * me // threads * ROWS
            other = min((last - first) * (me + 1) // threads * ROWS, end - begin)
            if pairs:
                # Half of what is laid out for float32 takes the rounded rows, half their blocks.
                rounded = laid.ctypes.data + 2 * (end - begin) * inner
                for row in range(one, other):
                    round_row(frame[3] + 4 * row * inner, inner, rounded + 2 * row * inner)
                lay_share(one, other, rounded, inner // 2, laid.ctypes.data)
            else:
                lay_share(one, other, frame[3], inner, laid.ctypes.data)
            met = meet(team, met)
            frame[3] = laid.ctypes.data
        elif pairs:
            round_row(frame[3], inner, alone.ctypes.data)
            frame[3] = alone.ctypes.data
        address = frame.ctypes.data
        run_share(panels.run, address, count * me // threads, count * (me + 1) // threads)
        met = meet(team, met)
    # numba frees an array after its last use by name, not by address.
    frame[0] = 0
    if pairs:
        alone[0] = 0
    return met


@njit(parallel=True)
def _multiply_shares(
    threads: int,
    state: int,
    panels: Panels,
    x: np.ndarray,
    weight: int,
    bias: int,
    out: np.ndarray,
    laid: np.ndarray,
) -> None:
    for me in prange(threads):
        if gathered(state, threads):
            multiply_share(
                member(me, threads, state), 0, panels, x, weight, bias, out, laid
            )  # fmt: skip


@njit
def multiply_rows(
    panels: Panels,
    x: np.ndarray,
    weight: int,
    bias: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """``out`` float32 ``[T, N]`` = ``x`` float32 ``[T, K]`` times a packed weight, plus bias.

    ``weight`` is the address of a packed one of the kind of ``panels``, and ``bias`` that of
    float32 ``[N]`` or 0.
    """
    rows, inner = x.shape
    laid = lines(laid_numbers(rows, inner) if rows > 1 else 0)
    state = new_team()
    address = state.ctypes.data
    if rows * inner * out.shape[1] >= _SHARED_FROM and threads > 1:
        _multiply_shares(
            threads, address, panels, x, weight, bias, out, laid
        )  # fmt: skip
        if came_together(state):
            return
    multiply_share(member(0, 1, address), 0, panels, x, weight, bias, out, laid)
