"""Products of int8 weights by the processor's tiles (AMX), from the panels of ``int8_panels``.

Sums are exact, so a result has the bits that ``vpdpbusd`` gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.simd import (
    INTS,
    LANES,
    LONG,
    VECTOR,
    at_float,
    constant,
    load,
    splat,
    store,
)
from coppice.kernels.cpu.code.tiles import (
    HAS_BYTE_TILES,
    TILE_BYTES,
    TILE_ROWS,
    configure,
    release,
)
from coppice.kernels.cpu.layer.matmul.tiles.blocks import BYTE_PANEL as PANEL
from coppice.kernels.cpu.layer.matmul.tiles.blocks import (
    byte_shape_for,
    first_rows,
    following,
    multiply_bytes,
)

# Rows from which they do: fewer take the time of reading the weights either way.
_FEWEST = 4
# Numbers and addresses of a frame.
_FRAME = 10


@njit
def takes_tiles(rows: int, inner: int) -> bool:
    """Whether products of so many rows of so many inputs go by tiles."""
    return HAS_BYTE_TILES and rows >= _FEWEST and inner % TILE_BYTES == 0


@intrinsic
def _multiply_panel(
    typing: Any,
    levels: Any,
    second: Any,
    inner: Any,
    weights: Any,
    out: Any,
    other: Any,
    follows: Any,
) -> Any:
    """``out`` and ``other`` int32 ``[16, PANEL]`` = rows from two addresses on times a panel.

    ``levels`` and ``second`` are uint8, with 128 added, ``inner`` of a row. Where ``second`` is 0
    there are no others. ``follows`` is what ``following`` gave.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if not HAS_BYTE_TILES:  # nobody calls it; LLVM would call functions that are not there
            return context.get_dummy_value()
        levels, second, inner, weights, out, other, follows = arguments
        stride = constant(4 * PANEL)
        with b.if_else(b.icmp_signed("!=", second, constant(0))) as (two, one):
            with two:
                blocks = [(levels, out), (second, other)]
                with b.if_else(b.icmp_signed("!=", follows, constant(0))) as (again, first):
                    for when, fetched in ((again, follows), (first, None)):
                        with when:
                            multiply_bytes(b, blocks, inner, weights, stride, follows=fetched)
            with one:
                multiply_bytes(b, [(levels, out)], inner, weights, stride)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def _rescale(
    typing: Any,
    made: Any,
    rows: Any,
    raised: Any,
    peaks: Any,
    scales: Any,
    bias: Any,
    out: Any,
    width: Any,
) -> Any:
    """``out`` float32 ``[rows, PANEL]``, rows ``width`` apart, from the sums ``made``.

    ``raised`` int32 ``[PANEL]`` is what 128 added to each level adds to an output; ``peaks`` is
    float32 ``[rows]``, ``scales`` and ``bias`` float32 ``[PANEL]``.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        made, rows, raised, peaks, scales, bias, out, width = arguments
        places = [constant(LANES * i) for i in range(PANEL // LANES)]
        factors, added, more = (
            [load(b, each, place) for place in places] for each in (scales, bias, raised)
        )
        with cgutils.for_range(b, rows, intp=LONG) as loop:
            peak = splat(b, b.load(at_float(b, peaks, loop.index)))
            row, to = b.mul(loop.index, constant(PANEL)), b.mul(loop.index, width)
            for i, place in enumerate(places):
                total = b.bitcast(load(b, made, b.add(row, place)), INTS)
                product = b.sitofp(b.sub(total, b.bitcast(more[i], INTS)), VECTOR)
                product = b.fmul(b.fmul(product, factors[i]), peak)
                store(b, b.fadd(product, added[i]), out, b.add(to, place))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@njit
def run_tiles(frame: int, begin: int, end: int) -> None:
    """Panels ``begin .. end`` of the product that a frame of ``int8_panels`` describes.

    Its levels lie row after row.
    """
    f = carray(pointer(frame), (_FRAME,), np.int64)
    rows, inner, width, levels, peaks = f[0], f[1], f[2], f[3], f[4]
    shape = byte_shape_for(rows)
    configure(shape.ctypes.data)
    height = min(rows, TILE_ROWS)
    made = np.empty((2, TILE_ROWS, PANEL), np.int32)
    edge = np.zeros((TILE_ROWS + 2, PANEL), np.float32)
    edge_scales, edge_bias = edge[TILE_ROWS], edge[TILE_ROWS + 1]
    for panel in range(begin, end):
        weights = f[5] + panel * (inner + 4) * PANEL
        column = panel * PANEL
        count = min(PANEL, width - column)
        whole = count == PANEL
        scales, bias = f[6] + 4 * column, f[7] + 4 * column
        if not whole:
            edge_scales[:count] = carray(pointer(scales), (count,), np.float32)
            scales = edge_scales.ctypes.data
            if f[7]:
                edge_bias[:count] = carray(pointer(bias), (count,), np.float32)
        if not (whole and f[7]):
            bias = edge_bias.ctypes.data
        for row in range(0, rows, 2 * TILE_ROWS):
            firsts = first_rows(row, rows)
            second = levels + firsts[1] * inner if firsts[1] >= 0 else 0
            _multiply_panel(
                levels + firsts[0] * inner, second, inner, weights, made[0].ctypes.data,
                made[1].ctypes.data, following(weights, row, inner, PANEL),
            )  # fmt: skip
            for block in range(2):
                first = firsts[block]
                if first < 0:
                    continue
                to, apart = f[8] + 4 * (first * width + column), width
                if not whole:
                    to, apart = edge.ctypes.data, PANEL
                _rescale(
                    made[block].ctypes.data, height, weights + inner * PANEL, peaks + 4 * first,
                    scales, bias, to, apart,
                )  # fmt: skip
                if not whole:
                    for i in range(height):
                        at = f[8] + 4 * ((first + i) * width + column)
                        carray(pointer(at), (count,), np.float32)[:] = edge[i, :count]
    release()
    shape[0] = made[0, 0, 0] = edge[0, 0] = edge_scales[0] = edge_bias[0] = 0
