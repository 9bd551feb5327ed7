"""Int8 products of float32 rows, for compiled code to call: quantize, multiply, rescale.

``int8_panels`` has the product of a panel, which is called by its address.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from coppice.kernels.cpu.code.calls import run_share
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.simd import ROWS
from coppice.kernels.cpu.code.team import (
    Member,
    came_together,
    gathered,
    meet,
    member,
    new_team,
)
from coppice.kernels.cpu.layer.matmul.row_blocks import Panels, lay_share
from coppice.kernels.cpu.layer.rows_numba import quantize_share

# Multiplications from which panels are shared among threads: below, waking them takes longer.
_SHARED_FROM = 1 << 19


@njit
def multiply_share(
    team: Member,
    met: int,
    panels: Panels,
    x: np.ndarray,
    weight: int,
    scale: int,
    bias: int,
    out: np.ndarray,
    levels: np.ndarray,
    laid: np.ndarray,
    peaks: np.ndarray,
) -> int:
    """A team member's share of ``multiply_rows``; returns when all members have finished.

    ``met`` and the result are those of ``meet``. All members share ``levels`` and ``laid``, int8
    and as long as ``x`` has numbers, and ``peaks`` float32 ``[T]``.
    """
    me, threads = team.me, team.threads
    rows, inner = x.shape
    width = out.shape[1]
    blocks = -(-rows // ROWS)
    begin = blocks * me // threads * ROWS
    end = min(blocks * (me + 1) // threads * ROWS, rows)
    mine = levels[: rows * inner].reshape(rows, inner)
    quantize_share(begin, end, x, np.int32(128), mine, peaks)
    frame = np.empty(9, np.int64)
    frame[0], frame[1], frame[2] = rows, inner, width
    frame[3], frame[4], frame[5] = levels.ctypes.data, peaks.ctypes.data, weight
    frame[6], frame[7], frame[8] = scale, bias, out.ctypes.data
    if rows > 1:
        lay_share(begin, end, levels.ctypes.data, inner // 4, laid.ctypes.data)
        frame[3] = laid.ctypes.data
    met = meet(team, met)
    count = -(-width // panels.width)
    address = frame.ctypes.data
    run_share(panels.run, address, count * me // threads, count * (me + 1) // threads)
    met = meet(team, met)
    # numba frees an array after its last use by name, not by address.
    frame[0] = 0
    return met


@njit(parallel=True)
def _multiply_shares(
    threads: int,
    state: int,
    panels: Panels,
    x: np.ndarray,
    weight: int,
    scale: int,
    bias: int,
    out: np.ndarray,
    levels: np.ndarray,
    laid: np.ndarray,
    peaks: np.ndarray,
) -> None:
    for me in prange(threads):
        if gathered(state, threads):
            multiply_share(
                member(me, threads, state), 0, panels, x, weight, scale, bias, out, levels, laid,
                peaks,
            )  # fmt: skip


@njit
def multiply_rows(
    panels: Panels,
    x: np.ndarray,
    weight: int,
    scale: int,
    bias: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """``out`` float32 ``[T, N]`` = ``x`` float32 ``[T, K]`` times a packed weight, plus bias.

    Each row of ``x`` is rounded to 127 levels of its largest number. ``weight`` is the address of a
    packed weight, ``scale`` that of float32 ``[N]``, the scale of each output divided by 127, and
    ``bias`` that of float32 ``[N]`` or 0.
    """
    rows, inner = x.shape
    levels, peaks = np.empty(rows * inner, np.int8), np.empty(rows, np.float32)
    laid = np.empty(rows * inner if rows > 1 else 0, np.int8)
    state = new_team()
    address = state.ctypes.data
    if rows * inner * out.shape[1] >= _SHARED_FROM and threads > 1:
        _multiply_shares(
            threads, address, panels, x, weight, scale, bias, out, levels, laid, peaks
        )  # fmt: skip
        if came_together(state):
            return
    multiply_share(
        member(0, 1, address), 0, panels, x, weight, scale, bias, out, levels, laid, peaks
    )
