"""Products of float32 rows that are rounded to levels of 8 bits, for compiled code to call.

``int8_panels`` has the product of a panel of int8 weights, ``group_panels`` that of weights in
groups; they are called by their address. For int8 weights a row is transformed by a Hadamard matrix
and has one scale, for weights in groups each chunk of its inputs has its own.
"""

from __future__ import annotations

import numpy as np
from numba import carray, prange

from coppice.kernels.cpu.code.calls import pointer, run_share
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.memory import lines
from coppice.kernels.cpu.code.simd import ROWS
from coppice.kernels.cpu.code.team import (
    Member,
    came_together,
    gathered,
    meet,
    member,
    new_team,
)
from coppice.kernels.cpu.layer.matmul.grouped import BLOCK
from coppice.kernels.cpu.layer.matmul.row_blocks import GROUPED, INT8, Panels, lay_share
from coppice.kernels.cpu.layer.matmul.tiles.levels import takes_tiles
from coppice.kernels.cpu.layer.rows_numba import quantize_share

_FAST = {"contract", "reassoc", "arcp", "nsz"}

# Multiplications from which panels are shared among threads: below, waking them takes longer.
_SHARED_FROM = 1 << 19


@njit
def takes_levels(panels: Panels) -> bool:
    """Whether a product's rows are rounded to levels."""
    return panels.kind == INT8 or panels.kind == GROUPED


@njit
def peak_numbers(panels: Panels, inner: int) -> int:
    """The most float32 numbers that say what the levels of a row of ``inner`` stand for."""
    return 2 * (inner // BLOCK) if panels.kind == GROUPED else 1


@njit
def chunk_of(panels: Panels, weight: int) -> int:
    """Inputs of a chunk of the rows that are multiplied with a packed weight; 0: a row is one."""
    if panels.kind == GROUPED:
        return int(carray(pointer(weight), (2,), np.int64)[1])
    return 0


@njit
def round_share(
    begin: int, end: int, chunk: int, x: np.ndarray, levels: np.ndarray, peaks: np.ndarray
) -> None:
    """Rows ``begin .. end`` of ``x [T, K]`` as ``levels`` int8 ``[T, K]``; see ``chunk_of``.

    ``peaks`` float32 are the rows' largest numbers, or in turn the factor of a chunk's levels and
    their sum, of each row one after the other.
    """
    if chunk:
        _round_chunks(begin, end, chunk, x, levels, peaks)
    else:
        quantize_share(begin, end, x, np.int32(128), levels, peaks)


@njit(fastmath=_FAST)
def _round_chunks(
    begin: int, end: int, size: int, x: np.ndarray, levels: np.ndarray, peaks: np.ndarray
) -> None:
    chunks = x.shape[1] // size
    top = np.empty(1, np.int32)
    for row in range(begin, end):
        for chunk in range(chunks):
            mine = x[row, chunk * size : chunk * size + size]
            result = levels[row, chunk * size : chunk * size + size]
            # As in ``quantize_share``.
            bits, most = mine.view(np.int32), np.int32(0)
            for d in range(size):
                most = max(most, np.int32(bits[d] & np.int32(0x7FFFFFFF)))
            top[0] = most
            peak = max(top.view(np.float32)[0], np.float32(1e-30))
            scale, total = np.float32(127) / peak, np.int32(0)
            for d in range(size):
                level = np.int32(mine[d] * scale + np.float32(127.5)) - np.int32(127)
                result[d] = np.int8(level)
                total += np.int32(level)
            at = 2 * (row * chunks + chunk)
            peaks[at], peaks[at + 1] = peak / np.float32(127), np.float32(total)


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
    and as long as ``x`` has numbers, and ``peaks`` float32, ``peak_numbers`` for each row.
    """
    me, threads = team.me, team.threads
    rows, inner = x.shape
    width = out.shape[1]
    blocks = -(-rows // ROWS)
    begin = blocks * me // threads * ROWS
    end = min(blocks * (me + 1) // threads * ROWS, rows)
    mine = levels[: rows * inner].reshape(rows, inner)
    chunk = chunk_of(panels, weight)
    round_share(begin, end, chunk, x, mine, peaks)
    frame = np.empty(10, np.int64)
    frame[0], frame[1], frame[2] = rows, inner, width
    frame[3], frame[4], frame[5] = levels.ctypes.data, peaks.ctypes.data, weight
    frame[6], frame[7], frame[8], frame[9] = scale, bias, out.ctypes.data, chunk
    if panels.kind == INT8:
        frame[9] = takes_tiles(rows, inner)
    if rows > 1 and not (panels.kind == INT8 and frame[9]):
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

    Rows of ``x`` are rounded to 127 levels of their largest number, or of that of each chunk.
    ``weight`` is the address of a packed weight of the kind of ``panels``, ``scale`` that of
    float32 ``[N]``, the scale of each output (of int8 divided by 127), and ``bias`` that of float32
    ``[N]`` or 0.
    """
    rows, inner = x.shape
    levels = lines(-(-rows * inner // 4)).view(np.int8)
    peaks = np.empty(rows * peak_numbers(panels, inner), np.float32)
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
