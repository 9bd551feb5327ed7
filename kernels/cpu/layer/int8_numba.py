"""Int8 products of float32 rows, as calls for compiled code: quantize, multiply, rescale.

``int8_panels`` has the product of a panel, which is called by its address.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from coppice.kernels.cpu.code.calls import run_share
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.simd import ROWS
from coppice.kernels.cpu.code.team import came_together, gathered, meet, new_team
from coppice.kernels.cpu.layer.row_blocks import lay_share
from coppice.kernels.cpu.layer.rows_numba import quantize_share

# Multiplications from which panels are shared among threads: below, waking them takes longer.
_SHARED_FROM = 1 << 19


@njit
def multiply_share(
    me: int,
    threads: int,
    team: int,
    met: int,
    function: int,
    panel: int,
    x: np.ndarray,
    weight: int,
    scale: int,
    bias: int,
    out: np.ndarray,
    levels: np.ndarray,
    laid: np.ndarray,
    peaks: np.ndarray,
) -> int:
    """What thread ``me`` of a team does of ``multiply_rows``, until all are through.

    ``met`` and what it returns are as ``meet`` has them. ``levels`` and ``laid``, int8 and as many
    as ``x`` has numbers, and ``peaks`` float32 ``[T]`` are theirs in common.
    """
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
    met = meet(team, threads, met)
    panels = -(-width // panel)
    address = frame.ctypes.data
    run_share(function, address, panels * me // threads, panels * (me + 1) // threads)
    met = meet(team, threads, met)
    # Numba frees what is not named any more, and addresses are no names.
    frame[0] = 0
    return met


@njit(parallel=True)
def _multiply_shares(
    threads: int,
    team: int,
    function: int,
    panel: int,
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
        if gathered(team, threads):
            multiply_share(
                me, threads, team, 0, function, panel, x, weight, scale, bias, out, levels, laid,
                peaks,
            )  # fmt: skip


@njit
def multiply_rows(
    function: int,
    panel: int,
    x: np.ndarray,
    weight: int,
    scale: int,
    bias: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """``out`` float32 ``[T, N]`` = ``x`` float32 ``[T, K]`` times a packed weight, plus bias.

    ``function`` is the address of ``int8_panels.run_panels``, ``panel`` the outputs of a panel. A
    row of ``x`` is taken in 127 levels of its largest. ``weight`` is the address of a packed one,
    ``scale`` that of float32 ``[N]``, of each output and divided by 127; ``bias``'s may be 0.
    """
    rows, inner = x.shape
    levels, peaks = np.empty(rows * inner, np.int8), np.empty(rows, np.float32)
    laid = np.empty(rows * inner if rows > 1 else 0, np.int8)
    team = new_team()
    address = team.ctypes.data
    if rows * inner * out.shape[1] >= _SHARED_FROM and threads > 1:
        _multiply_shares(
            threads, address, function, panel, x, weight, scale, bias, out, levels, laid, peaks
        )  # fmt: skip
        if came_together(team):
            return
    multiply_share(
        0, 1, address, 0, function, panel, x, weight, scale, bias, out, levels, laid, peaks
    )
