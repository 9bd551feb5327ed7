"""Rows times a panel of weights by tiles: what products of bfloat16 and of int8 have in common.

A panel has ``PANEL`` outputs, two tiles, of int8 three, and inputs in whole tiles: for each 4 bytes
of inputs (a pair of bfloat16, or four of int8) those of all outputs, one after the other. Rows lie
one after the other, as they are, and 32 of them are multiplied at a time. While a panel's
first rows are multiplied, what is two rounds of the loop over inputs ahead is fetched to the second
cache: two threads, which wait for memory, take 0.65 to 0.85 of the time with up to 64 rows, one
thread as long. With the rows after them the panel that follows is fetched, a little each round:
prompts in bfloat16 take 0.92 of the time, in int8 0.97.

The instructions wait for tiles rather than the tiles for instructions: from the first cache a tile
comes in about the time of one instruction, from the second one in twice that. So a part of a panel
is to stay in the first cache while all rows are multiplied with it, and a row, which is needed
once, is loaded with the hint not to keep it there.

Where rows are no multiple of 16, the last 16 are taken again with some that were computed already,
and get the same bits; fewer than 16 have smaller tiles. So a sum adds its inputs in order, and
depends on its row and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import cgutils

from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.simd import LONG, constant, prefetch
from coppice.kernels.cpu.code.tiles import (
    TILE_BYTES,
    TILE_ROWS,
    clear_tile,
    configuration,
    load_tile,
    multiply_tiles,
    store_tile,
)

#: Outputs of a panel of bfloat16 and of one of int8.
PANEL, BYTE_PANEL = 2 * TILE_ROWS, 3 * TILE_ROWS
# Blocks of rows after the first one that fetch the panel that follows. Half as many, which fetch
# twice as much in a round, are slower.
_TURNS = 8
# Configurations by the rows that there are, up to a whole tile. Tiles of weights have all rows.
_SHAPES, _BYTE_SHAPES = (
    np.stack([configuration(max(rows, 1), *few) for rows in range(TILE_ROWS + 1)])
    for few in ((0, 1, 2, 3, 6, 7), range(7))
)


@njit
def shape_for(rows: int) -> np.ndarray:
    """A new array, for ``configure``: that of products of so many rows in bfloat16."""
    return _SHAPES[min(rows, TILE_ROWS)].copy()


@njit
def byte_shape_for(rows: int) -> np.ndarray:
    """The same for products of int8."""
    return _BYTE_SHAPES[min(rows, TILE_ROWS)].copy()


@njit
def first_rows(row: int, rows: int) -> tuple[int, int]:
    """The first rows of two blocks that have those from ``row`` on; below 0: one block has all."""
    return (
        max(min(row, rows - TILE_ROWS), 0),
        min(row + TILE_ROWS, rows - TILE_ROWS) if row + TILE_ROWS < rows else -1,
    )


@njit
def following(weights: int, row: int, length: int, panel: int) -> int:
    """The address from which the block of rows from ``row`` on fetches weights of the next panel.

    0 for the first block, which fetches its own. ``weights`` is the address of its panel, of
    ``panel`` outputs with ``length`` bytes of inputs each.
    """
    if row == 0:
        return 0
    turn = min(row // (2 * TILE_ROWS), _TURNS) - 1
    return weights + panel * length + turn * (panel // _TURNS) * length


def _fetch_ahead(b: Any, here: Any, panel: int) -> None:
    """Fetches what the loop over tiles of inputs needs two rounds after those at an address."""
    for line in range(2 * panel, 3 * panel):
        prefetch(b, b.add(here, constant(TILE_BYTES * line)))


def _fetch_following(b: Any, follows: Any, index: Any, panel: int) -> None:
    """Fetches what a round of that index does of the panel that follows."""
    lines = panel // _TURNS
    here = b.add(follows, b.mul(index, constant(TILE_BYTES * lines)))
    for line in range(lines):
        prefetch(b, b.add(here, constant(TILE_BYTES * line)))


def multiply_pairs(
    b: Any,
    blocks: list[tuple[Any, Any]],
    apart: Any,
    length: Any,
    weights: Any,
    stride: Any,
    *,
    follows: Any = None,
    once: bool = False,
    more: Any = None,
) -> None:
    """The float32 sums of one or two blocks of rows, each from an address, to another address.

    Rows of bfloat16 lie ``apart`` bytes from each other, and ``length`` of each are multiplied, a
    multiple of ``TILE_BYTES``; the results are ``stride`` apart. Without ``follows`` the weights
    themselves are fetched, as is right for the first rows that they are multiplied with; for the
    others it is what ``following`` gave. ``once``: no line of the rows is kept in the first cache.
    Where ``more`` is not 0, what lies at the results is added to.
    """
    wide = PANEL // TILE_ROWS
    sums = [(block * wide + i, block, i) for block in range(len(blocks)) for i in range(wide)]

    def result(block: int, i: int) -> Any:
        return b.add(blocks[block][1], constant(TILE_BYTES * i))

    def clear() -> None:
        for tile, _, _ in sums:
            clear_tile(b, tile)

    if more is None:
        clear()
    else:
        with b.if_else(b.icmp_signed("!=", more, constant(0))) as (yes, no):
            with yes:
                for tile, block, i in sums:
                    load_tile(b, tile, result(block, i), stride)
            with no:
                clear()
    with cgutils.for_range(b, b.sdiv(length, constant(TILE_BYTES)), intp=LONG) as loop:
        here = b.add(weights, b.mul(loop.index, constant(PANEL * TILE_BYTES)))
        along = b.mul(loop.index, constant(TILE_BYTES))
        if follows is None:
            _fetch_ahead(b, here, PANEL)
        else:
            _fetch_following(b, follows, loop.index, PANEL)
        for tile, block, i in sums:
            if not i:
                load_tile(b, 6 + block, b.add(blocks[block][0], along), apart, once=once)
            if not block:
                load_tile(b, 4 + i, b.add(here, constant(TILE_BYTES * i)), constant(4 * PANEL))
            multiply_tiles(b, tile, 6 + block, 4 + i)
    for tile, block, i in sums:
        store_tile(b, tile, result(block, i), stride)


def multiply_bytes(
    b: Any,
    blocks: list[tuple[Any, Any]],
    length: Any,
    weights: Any,
    stride: Any,
    *,
    follows: Any = None,
) -> None:
    """The int32 sums of one or two blocks of rows of unsigned bytes, as ``multiply_pairs``."""
    wide = BYTE_PANEL // TILE_ROWS
    for tile in range(len(blocks) * wide):
        clear_tile(b, tile)
    with cgutils.for_range(b, b.sdiv(length, constant(TILE_BYTES)), intp=LONG) as loop:
        here = b.add(weights, b.mul(loop.index, constant(BYTE_PANEL * TILE_BYTES)))
        along = b.mul(loop.index, constant(TILE_BYTES))
        if follows is None:
            _fetch_ahead(b, here, BYTE_PANEL)
        else:
            _fetch_following(b, follows, loop.index, BYTE_PANEL)
        for block, (rows, _) in enumerate(blocks):
            load_tile(b, 6, b.add(rows, along), length, once=len(blocks) > 1)
            # The second block goes back from the weights with which the first one ended.
            for i in reversed(range(wide)) if block else range(wide):
                if not block or i < wide - 1:
                    at = b.add(here, constant(TILE_BYTES * i))
                    load_tile(b, 7, at, constant(4 * BYTE_PANEL))
                multiply_tiles(b, block * wide + i, 6, 7, bytes_=True)
    for block, (_, to) in enumerate(blocks):
        for i in range(wide):
            store_tile(b, block * wide + i, b.add(to, constant(TILE_BYTES * i)), stride)
