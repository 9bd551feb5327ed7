"""Rows times a panel of weights by tiles: what products of bfloat16 and of int8 have in common.

A panel has ``PANEL`` outputs, three tiles, and inputs in whole tiles: for each 4 bytes of inputs (a
pair of bfloat16, or four of int8) those of all outputs, one after the other. Rows lie one after the
other, as they are, and 32 of them are multiplied at a time: six tiles have their sums. Nothing is
prefetched: that made products of up to 64 rows slower.

Where rows are no multiple of 16, the last 16 are taken again with some that were computed already,
and get the same bits; fewer than 16 have smaller tiles. So a sum adds its inputs in order, and
depends on its row and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import cgutils

from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.simd import LONG, constant
from coppice.kernels.cpu.code.tiles import (
    TILE_BYTES,
    TILE_ROWS,
    clear_tile,
    configuration,
    load_tile,
    multiply_tiles,
    store_tile,
)

# Tiles of a panel; those of sums come first, then one of rows, then one of weights.
_WIDE = 3
_ROWS, _WEIGHTS = 2 * _WIDE, 2 * _WIDE + 1
#: Outputs of a panel.
PANEL = 16 * _WIDE
# Bytes of a panel for each 4 bytes of inputs, and for a tile of them.
_STEP, _PART = 4 * PANEL, 4 * PANEL * TILE_BYTES // 4
# Configurations by the rows that there are, up to a whole tile.
_SHAPES = np.stack(
    [configuration(max(rows, 1), *range(_ROWS + 1)) for rows in range(TILE_ROWS + 1)]
)


@njit
def shape_for(rows: int) -> np.ndarray:
    """A new array, for ``configure``: that of products of so many rows."""
    return _SHAPES[min(rows, TILE_ROWS)].copy()


@njit
def first_rows(row: int, rows: int) -> tuple[int, int]:
    """The first rows of two blocks that have those from ``row`` on; below 0: one block has all."""
    return (
        max(min(row, rows - TILE_ROWS), 0),
        min(row + TILE_ROWS, rows - TILE_ROWS) if row + TILE_ROWS < rows else -1,
    )


def multiply_blocks(
    b: Any, blocks: list[tuple[Any, Any]], length: Any, weights: Any, stride: Any, *, bytes_: bool
) -> None:
    """Writes the sums of one or two blocks of rows, each from an address, to another address.

    Rows have ``length`` bytes, a multiple of ``TILE_BYTES``; the results are ``stride`` apart. Sums
    are int32 for ``bytes_``, rows unsigned, else float32.
    """
    for tile in range(len(blocks) * _WIDE):
        clear_tile(b, tile)
    with cgutils.for_range(b, b.sdiv(length, constant(TILE_BYTES)), intp=LONG) as loop:
        here = b.add(weights, b.mul(loop.index, constant(_PART)))
        along = b.mul(loop.index, constant(TILE_BYTES))
        for block, (rows, _) in enumerate(blocks):
            load_tile(b, _ROWS, b.add(rows, along), length)
            for i in range(_WIDE):
                load_tile(b, _WEIGHTS, b.add(here, constant(TILE_BYTES * i)), constant(_STEP))
                multiply_tiles(b, block * _WIDE + i, _ROWS, _WEIGHTS, bytes_=bytes_)
    for block, (_, to) in enumerate(blocks):
        for i in range(_WIDE):
            store_tile(b, block * _WIDE + i, b.add(to, constant(TILE_BYTES * i)), stride)
