"""The feed-forward part of a layer by tiles, of a thread's own rows: its activations stay in cache.

The products of gates and of what they gate would be 12 bytes for each 2 that the last product
reads, and pass through memory. Here a block of columns of both is computed, gated and rounded to
bfloat16 at a time, as the last product reads it. The operations on a number are those of the
products and of ``gate_share`` one by one, so the bits are.
"""

from __future__ import annotations

import numpy as np
from numba import carray, prange, types

from coppice.kernels.cpu.code.calls import pointer, run_share
from coppice.kernels.cpu.code.kept import cfunc, njit
from coppice.kernels.cpu.code.memory import lines
from coppice.kernels.cpu.code.pairs import round_row
from coppice.kernels.cpu.code.team import (
    Member,
    came_together,
    gathered,
    meet,
    member,
    new_team,
)
from coppice.kernels.cpu.code.tiles import TILE_ROWS
from coppice.kernels.cpu.layer.matmul.row_blocks import Panels
from coppice.kernels.cpu.layer.matmul.tiles import shares
from coppice.kernels.cpu.layer.matmul.tiles.blocks import PANEL
from coppice.kernels.cpu.layer.rows_numba import gate_share

_whole_inputs, _round_row = shares.whole_inputs, shares.round_tile_row
_by_rows = shares.by_rows

# Columns that are gated at a time: whole panels, and whole runs of ``gate_share``.
_COLUMNS = 192
# Float32 numbers of a row of a block: gates, what they gate, and the results. Columns may begin
# within a panel.
_NUMBERS = 3 * (_COLUMNS + PANEL) + PANEL
# Bytes of what belongs to the rows that are worked together: a part of the second-level cache.
_TOGETHER = 2_000_000
# The fewest of them: the weights are read again for each.
_FEWEST = 128


@njit
def gates_by_rows(panels: Panels, rows: int, inner: int, bias: int, threads: int) -> bool:
    """Whether the feed-forward part of so many rows is computed here; ``bias``: that of gates."""
    return panels.gated != 0 and bias == 0 and inner % 32 == 0 and _by_rows(rows, threads)


@njit
def _each_row(hidden: int, inner: int) -> int:
    """Float32 numbers that belong to a row: its inputs and activations, and a block of columns."""
    return -(-((hidden + inner) // 2 + _NUMBERS) // 16) * 16


@njit
def _rows_together(rows: int, hidden: int, inner: int, threads: int) -> int:
    """Rows of a thread that are worked together, about as many each time."""
    each = 4 * _each_row(hidden, inner)
    most = max(_TOGETHER // each // TILE_ROWS * TILE_ROWS, _FEWEST)
    mine = -(-rows // threads)
    return -(-mine // -(-mine // most))


@njit
def gated_numbers(panels: Panels, rows: int, hidden: int, inner: int, threads: int) -> int:
    """Float32 numbers that ``feed_forward_share`` needs in ``laid``."""
    if not gates_by_rows(panels, rows, inner, 0, threads):
        return 0
    together = _rows_together(rows, _whole_inputs(hidden), inner, threads)
    return threads * together * _each_row(_whole_inputs(hidden), inner)


@njit
def feed_forward_share(
    team: Member,
    met: int,
    panels: Panels,
    x: np.ndarray,
    gate_up: int,
    gelu: bool,
    inner: int,
    down: int,
    bias: int,
    out: np.ndarray,
    laid: np.ndarray,
) -> int:
    """A team member's share of ``out`` float32 ``[T, N]`` from ``x`` float32 ``[T, K]``.

    ``gate_up`` is the packed weight of both products, ``down`` that of the last one. ``met`` and
    the result are those of ``meet``; all members share ``laid``, of ``gated_numbers``.
    """
    rows, hidden = x.shape
    me, threads = team.me, team.threads
    whole = _whole_inputs(hidden)
    together = _rows_together(rows, whole, inner, threads)
    size = together * _each_row(whole, inner)
    rounded = laid.ctypes.data + 4 * me * size
    active = rounded + 2 * together * whole
    frame, last = np.empty(9, np.int64), np.empty(9, np.int64)
    frame[1], frame[3], frame[4], frame[5] = whole, rounded, gate_up, gelu
    frame[6], frame[7], frame[8] = active, inner, active + 2 * together * inner
    width = out.shape[1]
    last[1], last[2], last[3], last[4], last[5] = inner, width, active, down, bias
    last[8] = width
    stop = rows * (me + 1) // threads
    for begin in range(rows * me // threads, stop, together):
        many = min(together, stop - begin)
        for row in range(many):
            _round_row(x[begin + row], rounded + 2 * row * whole)
        frame[0] = last[0] = many
        frame[2] = panels.run
        run_share(panels.gated, frame.ctypes.data, 0, inner)
        last[6] = out[begin:].ctypes.data
        run_share(panels.run, last.ctypes.data, 0, -(-width // panels.width))
    frame[0] = last[0] = 0  # numba frees an array after its last use by name, not by address
    return meet(team, met)


@njit(parallel=True)
def feed_forward(
    panels: Panels,
    x: np.ndarray,
    gate_up: int,
    gelu: bool,
    inner: int,
    down: int,
    bias: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """``feed_forward_share`` of all members of a team."""
    laid = lines(gated_numbers(panels, len(x), x.shape[1], inner, threads))
    state = new_team()
    address = state.ctypes.data
    for me in prange(threads):
        if gathered(address, threads):
            feed_forward_share(
                member(me, threads, address), 0, panels, x, gate_up, gelu, inner, down, bias, out,
                laid,
            )  # fmt: skip
    if not came_together(state):
        feed_forward_share(
            member(0, 1, address), 0, panels, x, gate_up, gelu, inner, down, bias, out, laid
        )


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_gated(frame: int, begin: int, end: int) -> None:
    """Columns ``begin .. end`` of what ``feed_forward_share`` has laid out in a frame, gated."""
    f = carray(pointer(frame), (9,), np.int64)
    rows, hidden, run, inner, room = f[0], f[1], f[2], f[7], f[8]
    wide = _COLUMNS + PANEL
    both = carray(pointer(room), (rows, 2 * wide), np.float32)
    results = room + 8 * rows * wide
    given = np.empty(9, np.int64)
    given[0], given[1], given[3], given[4], given[5] = rows, hidden, f[3], f[4], 0
    given[2], given[8] = 2 * inner, 2 * wide
    for column in range(begin, end, _COLUMNS):
        count = min(_COLUMNS, end - column)
        shift = 0
        for part in range(2):
            first = part * inner + column
            start = first // PANEL
            shift = first - start * PANEL
            # Column 0 of the weight would lie before the room by what is left out.
            given[6] = room + 4 * (part * wide - start * PANEL)
            run_share(run, given.ctypes.data, start, -(-(first + count) // PANEL))
        product = carray(pointer(results), (rows, wide + shift), np.float32)
        gate_share(0, rows, 0, count, f[5] != 0, both, product)
        for row in range(rows):
            to = f[6] + 2 * (row * inner + column)
            round_row(product[row].ctypes.data, count, to)
    given[0] = 0  # numba frees an array after its last use by name, not by address
