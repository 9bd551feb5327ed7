"""Rows laid side by side, as the products of panels read them.

A product multiplies a weight with a number of each of its ``ROWS`` rows. Where these lie side by
side it reads one cache line instead of one for each row, at constant offsets: a product of 256 rows
and more takes 1.08 times less. So rows are copied to blocks of ``ROWS``, the remaining ones to
blocks of 4, 2 and 1. A block is ``[width, its rows]``, and begins where its first row would.
Numbers have 32 bits: floats, or four levels of an int8 product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from coppice.kernels.cpu.code.calls import tuple_type
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.simd import (
    FETCHED_FROM,
    INTS,
    LANES,
    ROWS,
    at_float,
    constant,
    counting,
    load,
    store,
)


class Panels(NamedTuple):
    """A product of panels for compiled code, and the kind of weights that it is to take.

    ``run`` is the address of ``run_panels`` in ``float_panels``, ``int8_panels``,
    ``group_panels`` or ``tiles.panels``, ``width`` the outputs of a panel, and ``kind`` a place in
    ``float_panels.KINDS`` or one of the kinds below. ``gated`` is the address of
    ``tiles.gate.run_gated`` for products by tiles, else 0.
    """

    run: int
    width: int
    kind: int
    gated: int = 0


PANELS = tuple_type(Panels, "i i i i")
#: The kind of int8 weights.
INT8 = -1
#: The kind of products of bfloat16 weights with rows that are rounded to bfloat16, too.
PAIRS = -2
#: The kind of weights in groups, of 4 or 8 bits.
GROUPED = -3
#: The kind of products of ``PAIRS`` by tiles, whose rows are not laid side by side.
TILES = -4


def _interleaved(b: Any, rows: list[Any]) -> list[Any]:
    """Vectors of n rows, n a power of 2, as n vectors in which the rows' lanes alternate."""
    half = LANES // 2
    low, high = (
        ir.Constant(INTS, [n for i in range(half) for n in (at + i, at + i + LANES)])
        for at in (0, half)
    )
    many = len(rows)
    for _ in range(many.bit_length() - 1):
        rows = [
            b.shuffle_vector(rows[i // 2], rows[i // 2 + many // 2], (low, high)[i % 2])
            for i in range(many)
        ]
    return rows


@intrinsic(prefer_literal=True)
def _lay_block(typing: Any, rows: Any, x: Any, width: Any, out: Any) -> Any:
    """``out [width, rows]`` = ``x [rows, width]`` transposed; ``rows`` is a constant."""
    many = rows.literal_value
    signature = types.void(types.IntegerLiteral(many), *[types.int64] * 3)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, width, out = arguments
        starts = [b.mul(width, constant(row)) for row in range(many)]
        whole = b.mul(b.sdiv(width, constant(LANES)), constant(LANES))
        with counting(b, 0, whole, LANES) as column:
            vectors = [load(b, x, b.add(start, column)) for start in starts]
            to = b.mul(column, constant(many))
            for i, vector in enumerate(_interleaved(b, vectors)):
                store(b, vector, out, b.add(to, constant(i * LANES)))
        with counting(b, whole, width, 1) as column:
            to = b.mul(column, constant(many))
            for row, start in enumerate(starts):
                number = b.load(at_float(b, x, b.add(start, column)))
                b.store(number, at_float(b, out, b.add(to, constant(row))))
        return context.get_dummy_value()

    return signature, generate


@njit
def lay_share(begin: int, end: int, x: int, width: int, out: int) -> None:
    """Copies the rows ``begin .. end`` to blocks; the first row begins a block.

    ``x`` and ``out`` are the addresses of row 0, of ``width`` numbers each.
    """
    row = begin
    while row < end:
        here, to, left = x + 4 * row * width, out + 4 * row * width, end - row
        # The first argument is a constant of what is compiled.
        if ROWS == 8 and left >= 8:
            _lay_block(8, here, width, to)
            row += 8
        elif left >= 4:
            _lay_block(4, here, width, to)
            row += 4
        elif left >= 2:
            _lay_block(2, here, width, to)
            row += 2
        else:
            _lay_block(1, here, width, to)
            row += 1


@njit
def to_fetch(
    row: int, rows: int, panel: int, part: int, parts: int, here: int
) -> tuple[int, int, int]:
    """Addresses to prefetch while the block from ``row`` on is multiplied: three parts of a panel.

    The first blocks of ``rows`` that prefetch divide among them the ``parts`` parts, of ``part``
    bytes each, of the ``panel`` at that address. Where there are fewer parts, the address is
    ``here``, which is in the cache.
    """
    # Where blocks of fewer rows do not prefetch, whole ones take over their part.
    fetching = rows // ROWS if rows >= ROWS == FETCHED_FROM else -(-rows // ROWS)
    blocks, block = min(fetching, 3), row // ROWS
    one = two = three = here
    if row % ROWS == 0 and block < blocks:
        first, last = block * 3 // blocks, min((block + 1) * 3 // blocks, parts)
        if first < last:
            one = panel + first * part
        if first + 1 < last:
            two = panel + (first + 1) * part
        if first + 2 < last:
            three = panel + (first + 2) * part
    return one, two, three
