"""Products of float32 rows, rounded to bfloat16, with weights of bfloat16 by tiles.

For compiled code to call; ``panels`` has the product of a panel, which is called by its
address.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from coppice.kernels.cpu.code.calls import pointer, run_share
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.memory import lines
from coppice.kernels.cpu.code.pairs import round_row
from coppice.kernels.cpu.code.team import Member, meet
from coppice.kernels.cpu.code.tiles import TILE_BYTES, TILE_ROWS
from coppice.kernels.cpu.layer.matmul.row_blocks import Panels

#: Inputs of a tile: those of a packed weight are a multiple.
TILE_INPUTS = TILE_BYTES // 2
# Bytes of rows that are multiplied together: a part of the second-level cache, which every thread
# has for itself, holds them for all panels.
_TOGETHER = 1_200_000
# Rows of a thread from which it multiplies them alone: with fewer the weights are read too often.
_OWN_ROWS = 128


@njit
def whole_inputs(inner: int) -> int:
    """The inputs of a weight in whole tiles."""
    return -(-inner // TILE_INPUTS) * TILE_INPUTS


@njit
def by_rows(rows: int, threads: int) -> bool:
    """Whether each thread multiplies its own rows with all panels, and not all with its own.

    The rows are those of ``rows * me // threads`` up to the next thread's: what a thread computes
    before and after a product then stays in its own cache. Each thread reads all weights.
    """
    return rows >= _OWN_ROWS * threads


@njit
def _rows_together(inner: int) -> int:
    """The most rows that are multiplied together, of ``inner`` inputs in whole tiles."""
    return max(_TOGETHER // (2 * inner) // (2 * TILE_ROWS), 1) * (2 * TILE_ROWS)


@njit
def laid_numbers(rows: int, inner: int) -> int:
    """Float32 numbers that ``multiply_share`` needs for up to ``rows`` rows of ``inner``."""
    # Where threads have their own rows, each has room for as many as any other.
    return (rows + rows // _OWN_ROWS + TILE_ROWS) * whole_inputs(inner) // 2


@njit
def round_tile_row(row: np.ndarray, to: int) -> None:
    """Writes a row as bfloat16, filled up with zeros to whole tiles, to an address."""
    inner = len(row)
    whole = whole_inputs(inner)
    round_row(row.ctypes.data, inner, to)
    if whole > inner:
        carray(pointer(to + 2 * inner), (whole - inner,), np.uint16)[:] = 0


@njit
def _round_rows(x: np.ndarray, begin: int, end: int, to: int) -> None:
    """Rows ``begin .. end`` one after the other; row 0 would be at ``to``."""
    for row in range(begin, end):
        round_tile_row(x[row], to + 2 * row * whole_inputs(x.shape[1]))


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
    """As ``float_numba.multiply_share``."""
    rows, width = out.shape
    me, threads = team.me, team.threads
    inner = whole_inputs(x.shape[1])
    count = -(-width // panels.width)
    frame = np.empty(9, np.int64)
    frame[1], frame[2], frame[4], frame[5], frame[8] = inner, width, weight, bias, width
    # One row is rounded by each thread for itself, so that they need not meet.
    alone = lines(inner // 2 if rows == 1 else 0)
    mine = by_rows(rows, threads)
    first, last = 0, rows
    begin_panel, end_panel = count * me // threads, count * (me + 1) // threads
    room = laid.ctypes.data
    together = _rows_together(inner)
    if mine:
        first, last = rows * me // threads, rows * (me + 1) // threads
        begin_panel, end_panel = 0, count
        together = min(together, -(-rows // threads))
        room += 2 * together * me * inner
    for begin in range(first, last, together):
        end = min(begin + together, last)
        part = x[begin:end]
        frame[0] = many = end - begin
        frame[6] = out[begin:].ctypes.data
        frame[3] = room
        if rows == 1:
            frame[3] = alone.ctypes.data
            _round_rows(part, 0, 1, frame[3])
        elif mine:
            _round_rows(part, 0, many, room)
        else:
            _round_rows(part, many * me // threads, many * (me + 1) // threads, room)
            met = meet(team, met)
        run_share(panels.run, frame.ctypes.data, begin_panel, end_panel)
        if not mine:
            met = meet(team, met)
    if mine:
        met = meet(team, met)
    frame[0] = 0  # numba frees an array after its last use by name, not by address
    if rows == 1:
        alone[0] = 0
    return met
