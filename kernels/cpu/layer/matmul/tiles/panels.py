"""Products of rows and weights of bfloat16 by the processor's tiles (AMX), panel by panel.

The panels are those of ``float_panels`` for pairs of bfloat16, their inputs filled up with zeros to
whole tiles; ``blocks`` multiplies them with rows, and ``shares`` has the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.kept import cfunc, njit
from coppice.kernels.cpu.code.simd import constant
from coppice.kernels.cpu.code.tiles import TILE_ROWS, configure, release
from coppice.kernels.cpu.layer.matmul.row_blocks import TILES, Panels
from coppice.kernels.cpu.layer.matmul.tiles.blocks import (
    PANEL,
    first_rows,
    following,
    multiply_pairs,
    shape_for,
)
from coppice.kernels.cpu.layer.matmul.tiles.gate import run_gated
from coppice.kernels.cpu.layer.matmul.tiles.shares import TILE_INPUTS

# Numbers and addresses that ``run_panels`` is given.
_FRAME = 9
# Inputs of a panel that the first cache holds, with room for rows and results that pass through.
_PART = 640
# Rows from which a panel is multiplied by parts: with fewer it is read from memory anyway.
_FEWEST_BY_PARTS = 4 * TILE_ROWS


@intrinsic
def _add_part(
    typing: Any,
    x: Any,
    second: Any,
    apart: Any,
    length: Any,
    weights: Any,
    out: Any,
    other: Any,
    stride: Any,
    more: Any,
    follows: Any,
) -> Any:
    """A part of the inputs, ``length`` bytes, of two whole blocks of rows times a panel.

    ``more`` is 0 for the first part, ``follows`` is what ``following`` gave; the others are as
    those of ``_multiply_panel``.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, second, apart, length, weights, out, other, stride, more, follows = arguments
        blocks = [(x, out), (second, other)]
        with b.if_else(b.icmp_signed("!=", follows, constant(0))) as (again, first):
            for when, fetched in ((again, follows), (first, None)):
                with when:
                    multiply_pairs(
                        b, blocks, apart, length, weights, stride, follows=fetched, once=True,
                        more=more,
                    )  # fmt: skip
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


@intrinsic
def _multiply_panel(
    typing: Any,
    x: Any,
    second: Any,
    inner: Any,
    weights: Any,
    out: Any,
    other: Any,
    stride: Any,
) -> Any:
    """``out`` and ``other`` float32 ``[16, PANEL]`` = rows from ``x`` and ``second`` on x a panel.

    Rows of the results lie ``stride`` bytes apart, those of ``x``, bfloat16, ``2 * inner``. Where
    ``second`` is 0 there are no others.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, second, inner, weights, out, other, stride = arguments
        length = b.shl(inner, constant(1))
        with b.if_else(b.icmp_signed("!=", second, constant(0))) as (two, one):
            with two:
                blocks = [(x, out), (second, other)]
                multiply_pairs(b, blocks, length, length, weights, stride)
            with one:
                multiply_pairs(b, [(x, out)], length, length, weights, stride)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@njit
def _finish(made: np.ndarray, rows: int, bias: int, out: int, width: int, count: int) -> None:
    """``out`` = the first ``count`` of a row's ``PANEL`` results, plus bias, if there is one."""
    added = carray(pointer(bias), (count,), np.float32)
    for row in range(rows):
        to = carray(pointer(out + 4 * row * width), (count,), np.float32)
        if bias:
            for i in range(count):
                to[i] = made[row, i] + added[i]
        else:
            for i in range(count):
                to[i] = made[row, i]


@njit
def _part_inputs(rows: int, inner: int) -> int:
    """Inputs of a panel that are multiplied with all rows before the next ones: about as many."""
    if rows < _FEWEST_BY_PARTS:
        return inner
    tiles = inner // TILE_INPUTS
    parts = -(-tiles // (_PART // TILE_INPUTS))
    return -(-tiles // parts) * TILE_INPUTS


@njit
def _add_bias(rows: int, bias: int, out: int, width: int) -> None:
    """Adds a panel's bias to the results of all rows."""
    added = carray(pointer(bias), (PANEL,), np.float32)
    for row in range(rows):
        to = carray(pointer(out + 4 * row * width), (PANEL,), np.float32)
        for i in range(PANEL):
            to[i] += added[i]


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_panels(frame: int, begin: int, end: int) -> None:
    """Panels ``begin .. end`` of what ``shares.multiply_share`` has laid out in a frame.

    Its last number is how far rows of the result lie apart.
    """
    f = carray(pointer(frame), (_FRAME,), np.int64)
    rows, inner, width, x, apart = f[0], f[1], f[2], f[3], f[8]
    shape = shape_for(rows)
    configure(shape.ctypes.data)
    height = min(rows, TILE_ROWS)
    made = np.empty((2, TILE_ROWS, PANEL), np.float32)
    part = _part_inputs(rows, inner)
    for panel in range(begin, end):
        weights = f[4] + 2 * PANEL * panel * inner
        column = panel * PANEL
        count = min(PANEL, width - column)
        bias, to = f[5] + 4 * column if f[5] else 0, f[6] + 4 * column
        # Rows whose sums are added up where the results are: each only once, and all outputs.
        whole = rows // (2 * TILE_ROWS) * (2 * TILE_ROWS) if count == PANEL else 0
        for first in range(0, inner, part):
            length, here = 2 * min(part, inner - first), weights + 2 * PANEL * first
            for row in range(0, whole, 2 * TILE_ROWS):
                one, two = row, row + TILE_ROWS
                _add_part(
                    x + 2 * (one * inner + first), x + 2 * (two * inner + first), 2 * inner,
                    length, here, to + 4 * one * apart, to + 4 * two * apart, 4 * apart, first,
                    following(here, row, length, PANEL),
                )  # fmt: skip
        if bias and whole:
            _add_bias(whole, bias, to, apart)
        for row in range(whole, rows, 2 * TILE_ROWS):
            one, other = first_rows(row, rows)
            here, second = x + 2 * one * inner, x + 2 * other * inner if other >= 0 else 0
            to_one, to_other = to + 4 * one * apart, to + 4 * other * apart
            if count == PANEL and not bias:
                _multiply_panel(here, second, inner, weights, to_one, to_other, 4 * apart)
                continue
            room, more = made[0].ctypes.data, made[1].ctypes.data
            _multiply_panel(here, second, inner, weights, room, more, 4 * PANEL)
            _finish(made[0], height, bias, to_one, apart, count)
            if other >= 0:
                _finish(made[1], height, bias, to_other, apart, count)
    release()
    shape[0] = made[0, 0, 0] = 0  # numba frees an array after its last use by name, not by address


def product() -> Panels:
    """The product of panels for compiled code."""
    return Panels(run_panels.address, PANEL, TILES, run_gated.address)
