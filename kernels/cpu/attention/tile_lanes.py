"""The products of ``full_lanes`` for pages in bfloat16 by the processor's tiles (AMX).

Queries and weights lie as ``full_lanes`` lays them for pairs, which is how a tile takes its
columns: they are lanes. Rows are keys in one product and the numbers of a head in the other, so a
tile's keys are copied together, wherever their pages are, and its values are transposed. Heads have
a multiple of ``NUMBERS`` numbers.

What is written here becomes part of the functions there, which see to the configuration.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from coppice.kernels.cpu.attention.stored import Stored
from coppice.kernels.cpu.code.simd import (
    LANES,
    VECTOR,
    constant,
    counting,
    everywhere,
    fetch,
    load,
    load_long,
    store,
    transposed,
)
from coppice.kernels.cpu.code.tiles import (
    TILE_BYTES,
    TILE_ROWS,
    clear_tile,
    load_tile,
    multiply_tiles,
    store_tile,
)

#: Numbers of bfloat16 in a row of a tile.
NUMBERS = TILE_BYTES // 2
# Tiles: those of sums come first, one for each vector of lanes, then one of rows, one of columns.
_ROWS, _COLUMNS = 4, 5


def _bytes(b: Any, address: Any, index: Any, size: int) -> Any:
    return b.add(address, b.mul(index, constant(size)))


def tile_scores(
    b: Any,
    wide: int,
    stored: Stored,
    queries: Any,
    keys: Any,
    values: Any,
    at: Any,
    count: Any,
    following: Any,
    fetched: Any,
    dim: Any,
    room: Any,
    fresh: Any,
    out: Any,
) -> None:
    """As ``full_lanes.scores``; ``room`` has the keys of the tile, unless they are ``fresh``.

    Rows of ``out`` up to the next multiple of 16 are written, too.
    """
    lanes = wide * LANES
    line = b.shl(dim, constant(1))
    end = b.shl(b.lshr(b.add(count, constant(TILE_ROWS - 1)), constant(4)), constant(4))
    with b.if_then(b.icmp_signed("!=", fresh, constant(0))), counting(b, 0, end, 1) as t:
        start, to = stored.place(b, keys, load_long(b, at, t)), b.add(room, b.mul(t, line))
        with counting(b, 0, line, TILE_BYTES) as place:
            store(b, load(b, b.add(start, place), constant(0)), b.add(to, place), constant(0))
        ahead = load_long(b, following, t)
        fetch(b, stored.place(b, keys, ahead), stored.place(b, values, ahead), fetched)
    with counting(b, 0, end, TILE_ROWS) as first:
        for i in range(wide):
            clear_tile(b, i)
        rows, to = b.add(room, b.mul(first, line)), _bytes(b, out, first, 4 * lanes)
        with counting(b, 0, line, TILE_BYTES) as place:
            load_tile(b, _ROWS, b.add(rows, place), line)
            columns = _bytes(b, queries, b.lshr(place, constant(2)), 4 * lanes)
            for i in range(wide):
                here = b.add(columns, constant(4 * LANES * i))
                load_tile(b, _COLUMNS, here, constant(4 * lanes))
                multiply_tiles(b, i, _ROWS, _COLUMNS)
        for i in range(wide):
            store_tile(b, i, b.add(to, constant(4 * LANES * i)), constant(4 * lanes))


def _transpose(
    b: Any, stored: Stored, values: Any, at: Any, keys: range, dim: Any, out: Any
) -> None:
    """Values of up to 32 keys become lines ``[dim, 32]`` in bfloat16, two tiles' rows apart."""
    starts = [stored.place(b, values, load_long(b, at, constant(key))) for key in keys]
    nothing = everywhere(0.0)
    # The numbers of a head in the order in which two lines become pairs: by halves of 16 bytes.
    halves = [[n for n in range(NUMBERS) if n // 4 % 2 == half] for half in range(2)]
    mixed = ir.VectorType(ir.IntType(16), NUMBERS)
    with counting(b, 0, dim, NUMBERS) as d:
        for numbers in halves:
            order = ir.Constant(
                ir.VectorType(ir.IntType(32), NUMBERS),
                [n + i for n in numbers for i in (0, NUMBERS)],
            )
            rows = []
            for pair in zip(starts[::2], starts[1::2], strict=True):
                both = [
                    b.bitcast(load(b, stored.place(b, start, d), constant(0)), mixed)
                    for start in pair
                ]
                rows.append(b.bitcast(b.shuffle_vector(*both, order), VECTOR))
            rows += [nothing] * (LANES - len(rows))
            for n, row in zip(numbers, transposed(b, rows), strict=True):
                place = b.mul(b.add(d, constant(n)), constant(2 * TILE_BYTES))
                store(b, row, b.add(out, place), constant(0))


def tile_gather(
    b: Any,
    wide: int,
    stored: Stored,
    weights: Any,
    values: Any,
    at: Any,
    tile: int,
    count: Any,
    out: Any,
    dim: Any,
    room: Any,
    fresh: Any,
) -> None:
    """As ``full_lanes.gather``, for weights of pairs.

    ``room`` has the values of the tile, transposed, unless they are ``fresh``.

    ``weights`` has rows for a multiple of 32 keys; those of keys that there are not become 0.
    ``at`` tells of ``tile`` keys, of which the first ``count`` matter.
    """
    lanes = wide * LANES
    steps = b.lshr(b.add(count, constant(NUMBERS - 1)), constant(5))
    pairs = b.lshr(b.add(count, constant(1)), constant(1))
    with counting(b, pairs, b.shl(steps, constant(4)), 1) as row:
        for i in range(wide):
            index = b.add(b.mul(row, constant(lanes)), constant(LANES * i))
            store(b, everywhere(0.0), weights, index)
    # Transposed values: a line has all keys, two tiles of them.
    line = 2 * TILE_BYTES
    for begin in range(0, tile, NUMBERS):
        new = b.icmp_signed("!=", fresh, constant(0))
        with b.if_then(b.and_(new, b.icmp_signed(">", count, constant(begin)))):
            to = b.add(room, constant(2 * begin))
            _transpose(b, stored, values, at, range(begin, min(begin + NUMBERS, tile)), dim, to)
    with counting(b, 0, dim, TILE_ROWS) as first:
        to = _bytes(b, out, first, 4 * lanes)
        for i in range(wide):
            load_tile(b, i, b.add(to, constant(4 * LANES * i)), constant(4 * lanes))
        with counting(b, 0, steps, 1) as step:
            rows = b.add(_bytes(b, room, first, line), b.shl(step, constant(6)))
            load_tile(b, _ROWS, rows, constant(line))
            columns = _bytes(b, weights, step, 4 * lanes * TILE_ROWS)
            for i in range(wide):
                here = b.add(columns, constant(4 * LANES * i))
                load_tile(b, _COLUMNS, here, constant(4 * lanes))
                multiply_tiles(b, i, _ROWS, _COLUMNS)
        for i in range(wide):
            store_tile(b, i, b.add(to, constant(4 * LANES * i)), constant(4 * lanes))
