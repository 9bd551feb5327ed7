"""Products of rows and weights of bfloat16 by the processor's tiles (AMX), panel by panel.

The panels are those of ``float_panels`` for pairs of bfloat16, their inputs filled up with zeros to
whole tiles: three tiles for each 32 inputs. Rows lie one after the other, as they are, and 32 of
them are multiplied at a time: six tiles have their sums. Where rows are no multiple of 16, the last
16 are taken again with some that were computed already, and get the same bits; fewer than 16 have
smaller tiles. Nothing is prefetched: that made products of up to 64 rows slower. A sum adds its inputs in order, and depends on its row and nothing else.

``tile_numba`` has the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.kept import cfunc, njit
from coppice.kernels.cpu.code.simd import LONG, constant
from coppice.kernels.cpu.code.tiles import (
    TILE_BYTES,
    TILE_ROWS,
    clear_tile,
    configuration,
    configure,
    load_tile,
    multiply_tiles,
    release,
    store_tile,
)
from coppice.kernels.cpu.layer.matmul.float_panels import PANEL
from coppice.kernels.cpu.layer.matmul.row_blocks import TILES, Panels
from coppice.kernels.cpu.layer.matmul.tile_numba import TILE_INPUTS

# Tiles of a panel; those of sums come first, then one of rows, then one of weights.
_WIDE = PANEL // 16
_ROWS, _WEIGHTS = 2 * _WIDE, 2 * _WIDE + 1
# Bytes of a panel for each pair of inputs, and of its part for a tile of inputs.
_PAIR, _PART = 4 * PANEL, 4 * PANEL * TILE_INPUTS // 2
# Numbers and addresses that ``run_panels`` is given.
_FRAME = 8
_WHOLE = configuration(TILE_ROWS)


@intrinsic(prefer_literal=True)
def _multiply_panel(
    typing: Any,
    blocks: Any,
    x: Any,
    second: Any,
    inner: Any,
    weights: Any,
    out: Any,
    other: Any,
    stride: Any,
) -> Any:
    """``out`` and ``other`` float32 ``[16, PANEL]`` = rows from ``x`` and ``second`` on x a panel.

    ``blocks`` is a constant, 1 or 2: whether there is a ``second``. Rows of the results lie
    ``stride`` bytes apart, those of ``x``, bfloat16, ``2 * inner``.
    """
    many = blocks.literal_value
    signature = types.void(types.IntegerLiteral(many), *[types.int64] * 7)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, second, inner, weights, out, other, stride = arguments
        for tile in range(many * _WIDE):
            clear_tile(b, tile)
        apart = b.shl(inner, constant(1))
        with cgutils.for_range(b, b.sdiv(inner, constant(TILE_INPUTS)), intp=LONG) as loop:
            here = b.add(weights, b.mul(loop.index, constant(_PART)))
            along = b.mul(loop.index, constant(TILE_BYTES))
            for block, rows in enumerate((x, second)[:many]):
                load_tile(b, _ROWS, b.add(rows, along), apart)
                for i in range(_WIDE):
                    load_tile(b, _WEIGHTS, b.add(here, constant(TILE_BYTES * i)), constant(_PAIR))
                    multiply_tiles(b, block * _WIDE + i, _ROWS, _WEIGHTS)
        for block, to in enumerate((out, other)[:many]):
            for i in range(_WIDE):
                store_tile(b, block * _WIDE + i, b.add(to, constant(TILE_BYTES * i)), stride)
        return context.get_dummy_value()

    return signature, generate


@njit
def _finish(
    made: np.ndarray, rows: int, bias: int, out: int, width: int, count: int
) -> None:
    """``out`` = the first ``count`` of ``PANEL`` results of each row, plus bias, if there is one."""
    added = carray(pointer(bias), (count,), np.float32)
    for row in range(rows):
        to = carray(pointer(out + 4 * row * width), (count,), np.float32)
        if bias:
            for i in range(count):
                to[i] = made[row, i] + added[i]
        else:
            for i in range(count):
                to[i] = made[row, i]


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_panels(frame: int, begin: int, end: int) -> None:
    """Panels ``begin .. end`` of what ``tile_numba.multiply_share`` has laid out in a frame."""
    f = carray(pointer(frame), (_FRAME,), np.int64)
    rows, inner, width, x, bias = f[0], f[1], f[2], f[3], f[5]
    shape = _WHOLE.copy()
    height = min(rows, TILE_ROWS)
    for tile in range(_ROWS + 1):
        shape[48 + tile] = height
    configure(shape.ctypes.data)
    made = np.empty((2 * TILE_ROWS, PANEL), np.float32)
    room, half = made.ctypes.data, made[TILE_ROWS:].ctypes.data
    for panel in range(begin, end):
        weights = f[4] + _PAIR // 2 * panel * inner
        first = panel * PANEL
        count = min(PANEL, width - first)
        direct = count == PANEL and bias == 0
        to, row = f[6] + 4 * first, 0
        while row < rows:
            # Rows that were computed before are computed again, so that there are 16.
            one = max(min(row, rows - TILE_ROWS), 0)
            other = min(row + TILE_ROWS, rows - TILE_ROWS)
            first_to, other_to, apart = room, half, 4 * PANEL
            if direct:
                first_to, other_to = to + 4 * one * width, to + 4 * other * width
                apart = 4 * width
            if row + TILE_ROWS < rows:
                _multiply_panel(
                    2, x + 2 * one * inner, x + 2 * other * inner, inner, weights, first_to,
                    other_to, apart,
                )  # fmt: skip
            else:
                _multiply_panel(1, x + 2 * one * inner, 0, inner, weights, first_to, 0, apart)
            if not direct:
                at = bias + 4 * first if bias else 0
                _finish(made, height, at, to + 4 * one * width, width, count)
                if row + TILE_ROWS < rows:
                    _finish(made[TILE_ROWS:], height, at, to + 4 * other * width, width, count)
            row += 2 * TILE_ROWS
    release()
    shape[0] = made[0, 0] = 0  # numba frees an array after its last use by name, not by address


def product() -> Panels:
    """The product of panels for compiled code."""
    return Panels(run_panels.address, PANEL, TILES)
