"""A tile of attention in whole vectors: products without a copy of the keys, softmax, weighted sum.

Queries lie transposed, ``[dim, vectors * LANES]``: a lane is one query head of one row, and a key's
element is multiplied with a whole vector of them. So scores come out with the lanes side by side,
their softmax needs nothing across lanes, and keys and values are read where they lie, whatever page
that is, an element at a time. All query heads that share a KV head, of as many rows as there are,
fill the lanes. One row alone leaves most of them idle: with heads of 64 that still takes about as
long as its keys take to come from memory, with heads of 128 and two query heads twice as long.

numba has no vector types, and LLVM would not keep a tile's sums in registers of its own accord,
hence these functions written in LLVM's own operations, for numba's compiled functions to call. They
take addresses, as int64, and their first argument is a constant: the vectors of a row of lanes, one
of ``VECTORS``. Nothing is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def _layout() -> tuple[int, tuple[int, int, int, int], int]:
    """Lanes of a register, the vectors that a row of lanes may have, and how many sums are kept.

    The sums of a product stay in registers, beside the vectors of one row and an element.
    """
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, (1, 2, 3, 4), 24  # 32 registers
    if features.get("avx"):
        return 8, (1, 2, 3, 3), 12  # 16 registers
    return 4, (1, 2, 3, 4), 24  # 32 registers on ARM; SSE's 16 spill


LANES, VECTORS, _SUMS = _layout()
#: Lanes of the widest row.
MOST_LANES = LANES * VECTORS[-1]
#: Keys a tile. Its scores (12 KiB with 4 vectors of 16) and the queries or values that they are
#: made of or multiplied with (16 and 12 KiB for heads of 64) stay in the nearest cache together.
TILE = 48

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT, LANES)
# 2**f on [-1/2, 1/2], Taylor coefficients (ln 2)**n / n!, from n = 6 down: relative error 2e-7.
_POWER_OF_2 = [math.log(2.0) ** n / math.factorial(n) for n in range(6, -1, -1)]
# Exponents below are 0: smaller powers would be denormal.
_LEAST_POWER = -127.0
_CACHE_LINE = 64


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _all(value: float) -> Any:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * LANES)


def _at(b: Any, address: Any, index: Any, kind: Any = _FLOAT) -> Any:
    """Pointer to ``kind`` at the float with that index from an address."""
    return b.inttoptr(b.add(address, b.shl(index, _long(2))), kind.as_pointer())


def _load(b: Any, address: Any, index: Any) -> Any:
    value = b.load(_at(b, address, index, _VECTOR))
    value.align = 4
    return value


def _store(b: Any, value: Any, address: Any, index: Any) -> None:
    b.store(value, _at(b, address, index, _VECTOR)).align = 4


def _load_long(b: Any, address: Any, index: Any) -> Any:
    return b.load(b.inttoptr(b.add(address, b.shl(index, _long(3))), _LONG.as_pointer()))


def _splat(b: Any, scalar: Any) -> Any:
    one = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    zeros = ir.Constant(_INTS, [0] * LANES)
    return b.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros)


def _call(b: Any, name: str, *values: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(values))
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.{name}.v{LANES}f32")
    return b.call(function, values)


def _greater(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _power_of_2(b: Any, x: Any) -> Any:
    """``2**x`` of a vector; 0 below 2**-126 and of NaN, which -inf less -inf is."""
    x = _greater(b, x, _all(_LEAST_POWER))
    whole = _call(b, "rint", x)
    fraction = b.fsub(x, whole)
    power = _all(_POWER_OF_2[0])
    for coefficient in _POWER_OF_2[1:]:
        power = _call(b, "fmuladd", power, fraction, _all(coefficient))
    biased = b.add(b.fptosi(whole, _INTS), ir.Constant(_INTS, [127] * LANES))
    return b.fmul(power, b.bitcast(b.shl(biased, ir.Constant(_INTS, [23] * LANES)), _VECTOR))


def _prefetch(b: Any, address: Any) -> None:
    pointer = b.inttoptr(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    # For reading, into the second-level cache, data.
    b.call(function, [pointer, *(ir.Constant(_INT, n) for n in (0, 2, 1))])


def _zeros(b: Any, count: int) -> list[Any]:
    sums = [cgutils.alloca_once(b, _VECTOR) for _ in range(count)]
    for each in sums:
        b.store(_all(0.0), each)
    return sums


def _at_once(wide: int) -> int:
    """Keys or elements whose sums are made together: 4, 6 or 8, which divide ``TILE``."""
    return max(n for n in (4, 6, 8) if n == 4 or n * wide <= _SUMS)


def _unrolled(b: Any, count: Any, body: Callable[[Any], None]) -> None:
    """``body(i)`` for i below ``count``, two at a time: half the counting."""
    even = b.shl(b.ashr(count, _long(1)), _long(1))
    with cgutils.for_range_slice(b, _long(0), even, _long(2), intp=_LONG) as (index, _):
        body(index)
        body(b.add(index, _long(1)))
    with cgutils.for_range_slice(b, even, count, _long(1), intp=_LONG) as (index, _):
        body(index)


def _transposed(b: Any, rows: list[Any]) -> list[Any]:
    """``LANES`` vectors as the columns of what they were the rows of."""
    half = LANES // 2
    low, high = (
        ir.Constant(_INTS, [n for i in range(half) for n in (at + i, at + i + LANES)])
        for at in (0, half)
    )
    for _ in range(LANES.bit_length() - 1):
        rows = [
            b.shuffle_vector(rows[i // 2], rows[i // 2 + half], (low, high)[i % 2])
            for i in range(LANES)
        ]
    return rows


def _multiply_in(b: Any, sums: list[Any], vectors: list[Any], scalar: Any) -> None:
    """``sums[i] += vectors[i] * scalar``."""
    factor = _splat(b, scalar)
    for total, vector in zip(sums, vectors, strict=True):
        b.store(_call(b, "fmuladd", vector, factor, b.load(total)), total)


@intrinsic(prefer_literal=True)
def scores(
    typing: Any,
    vectors: Any,
    queries: Any,
    keys: Any,
    values: Any,
    at: Any,
    count: Any,
    following: Any,
    fetched: Any,
    dim: Any,
    out: Any,
) -> Any:
    """Products of a tile's keys with all lanes, into ``out``.

    ``queries`` is float32 ``[dim, lanes]``. Key t of the tile is ``dim`` floats from float
    ``at[t]`` of ``keys`` on, ``at`` int64 ``[TILE]``, all of them readable. The first ``count``
    rows of ``out [TILE, lanes]`` are what was asked for. Of each key at ``following`` (as ``at``),
    and its value, ``fetched`` bytes are brought near meanwhile.
    """
    wide = vectors.literal_value
    together = _at_once(wide)
    signature = types.void(types.IntegerLiteral(wide), *[types.int64] * 9)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, queries, keys, values, at, count, following, fetched, dim, out = arguments
        lanes = wide * LANES
        with cgutils.for_range_slice(b, _long(0), count, _long(together), intp=_LONG) as (first, _):
            starts = []
            for j in range(together):
                index = b.add(first, _long(j))
                starts.append(b.add(keys, b.shl(_load_long(b, at, index), _long(2))))
                ahead = b.shl(_load_long(b, following, index), _long(2))
                with cgutils.for_range_slice(
                    b, _long(0), fetched, _long(_CACHE_LINE), intp=_LONG
                ) as (line, _):
                    _prefetch(b, b.add(b.add(keys, ahead), line))
                    _prefetch(b, b.add(b.add(values, ahead), line))
            sums = [_zeros(b, wide) for _ in range(together)]

            def element(d: Any) -> None:
                row = b.mul(d, _long(lanes))
                here = [_load(b, queries, b.add(row, _long(i * LANES))) for i in range(wide)]
                for start, mine in zip(starts, sums, strict=True):
                    _multiply_in(b, mine, here, b.load(_at(b, start, d)))

            _unrolled(b, dim, element)
            for j, mine in enumerate(sums):
                row = b.mul(b.add(first, _long(j)), _long(lanes))
                for i, total in enumerate(mine):
                    _store(b, b.load(total), out, b.add(row, _long(i * LANES)))
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def weigh(
    typing: Any, vectors: Any, scores: Any, count: Any, top: Any, total: Any, out: Any, dim: Any
) -> Any:
    """Turns a tile's scores, in base 2, into weights under the running maximum of each lane.

    ``scores`` is ``[count, lanes]``; ``top``, ``total`` ``[lanes]`` and ``out [dim, lanes]`` hold
    what was before: the maximum, the sum of weights, and the weighted sum of values. They are
    rescaled to the new maximum where it is greater, and ``total`` grows by the tile's weights. A
    lane that has seen no key has top -inf and the rest 0.
    """
    wide = vectors.literal_value
    signature = types.void(types.IntegerLiteral(wide), *[types.int64] * 6)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, scores, count, top, total, out, dim = arguments
        lanes = wide * LANES
        places = [_long(i * LANES) for i in range(wide)]
        old = [_load(b, top, place) for place in places]
        best = [cgutils.alloca_once_value(b, each) for each in old]
        with cgutils.for_range(b, count, intp=_LONG) as loop:
            row = b.mul(loop.index, _long(lanes))
            for each, place in zip(best, places, strict=True):
                b.store(_greater(b, _load(b, scores, b.add(row, place)), b.load(each)), each)
        new = [b.load(each) for each in best]
        grew = ir.Constant(ir.IntType(1), 0)
        for before, after in zip(old, new, strict=True):
            grown = b.fcmp_ordered(">", after, before)
            grew = b.or_(
                grew,
                b.icmp_unsigned(
                    "!=", b.bitcast(grown, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0)
                ),
            )
        with b.if_then(grew):
            # The first tile comes here with top -inf: what it shrinks is 0.
            shrink = [
                _power_of_2(b, b.fsub(before, after))
                for before, after in zip(old, new, strict=True)
            ]
            for place, after, factor in zip(places, new, shrink, strict=True):
                _store(b, after, top, place)
                _store(b, b.fmul(_load(b, total, place), factor), total, place)
            with cgutils.for_range(b, dim, intp=_LONG) as loop:
                row = b.mul(loop.index, _long(lanes))
                for place, factor in zip(places, shrink, strict=True):
                    index = b.add(row, place)
                    _store(b, b.fmul(_load(b, out, index), factor), out, index)
        sums = [cgutils.alloca_once_value(b, _load(b, total, place)) for place in places]
        with cgutils.for_range(b, count, intp=_LONG) as loop:
            row = b.mul(loop.index, _long(lanes))
            for place, highest, mine in zip(places, new, sums, strict=True):
                index = b.add(row, place)
                weight = _power_of_2(b, b.fsub(_load(b, scores, index), highest))
                _store(b, weight, scores, index)
                b.store(b.fadd(b.load(mine), weight), mine)
        for place, mine in zip(places, sums, strict=True):
            _store(b, b.load(mine), total, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def gather(
    typing: Any, vectors: Any, weights: Any, values: Any, at: Any, count: Any, out: Any, dim: Any
) -> Any:
    """``out [dim, lanes] +=`` a tile's values, each times its weights ``[count, lanes]``.

    Value t is ``dim`` floats, an even number, from float ``at[t]`` of ``values`` on.
    """
    wide = vectors.literal_value
    together = 16 if wide == 1 else 8 if 8 * wide <= _SUMS else 4
    signature = types.void(types.IntegerLiteral(wide), *[types.int64] * 6)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, weights, values, at, count, out, dim = arguments
        lanes = wide * LANES

        def elements(first: Any, number: int) -> None:
            sums = []
            for j in range(number):
                row = b.mul(b.add(first, _long(j)), _long(lanes))
                sums.append(
                    [
                        cgutils.alloca_once_value(b, _load(b, out, b.add(row, _long(i * LANES))))
                        for i in range(wide)
                    ]
                )

            def value(t: Any) -> None:
                row = b.mul(t, _long(lanes))
                here = [_load(b, weights, b.add(row, _long(i * LANES))) for i in range(wide)]
                # Constants come last, or each sum takes a register for its address.
                start = b.add(values, b.shl(b.add(_load_long(b, at, t), first), _long(2)))
                for j, mine in enumerate(sums):
                    _multiply_in(b, mine, here, b.load(_at(b, start, _long(j))))

            _unrolled(b, count, value)
            for j, mine in enumerate(sums):
                row = b.mul(b.add(first, _long(j)), _long(lanes))
                for i, each in enumerate(mine):
                    _store(b, b.load(each), out, b.add(row, _long(i * LANES)))

        whole = b.mul(b.sdiv(dim, _long(together)), _long(together))
        with cgutils.for_range_slice(b, _long(0), whole, _long(together), intp=_LONG) as (first, _):
            elements(first, together)
        with cgutils.for_range_slice(b, whole, dim, _long(2), intp=_LONG) as (first, _):
            elements(first, 2)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def lay_across(typing: Any, lanes: Any, sources: Any, count: Any, factor: Any, out: Any) -> Any:
    """``LANES`` lines of numbers become ``LANES`` columns of ``out [count, lanes]``.

    ``sources`` are the addresses of the lines, int64; ``count`` is a multiple of ``LANES``. All is
    multiplied by ``factor``, a float32.
    """
    signature = types.void(*[types.int64] * 3, types.float32, types.int64)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        lanes, sources, count, factor, out = arguments
        factors = _splat(b, factor)
        with cgutils.for_range_slice(b, _long(0), count, _long(LANES), intp=_LONG) as (first, _):
            lines = [_load(b, _load_long(b, sources, _long(i)), first) for i in range(LANES)]
            for i, column in enumerate(_transposed(b, lines)):
                place = b.mul(b.add(first, _long(i)), lanes)
                _store(b, b.fmul(column, factors), out, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def lay_along(typing: Any, lanes: Any, columns: Any, count: Any, factors: Any, targets: Any) -> Any:
    """``LANES`` columns of ``columns [count, lanes]`` become lines at the addresses ``targets``.

    Each is multiplied by its own of ``factors [LANES]``. ``count`` is a multiple of ``LANES``.
    """
    signature = types.void(*[types.int64] * 5)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        lanes, columns, count, factors, targets = arguments
        scale = _load(b, factors, _long(0))
        with cgutils.for_range_slice(b, _long(0), count, _long(LANES), intp=_LONG) as (first, _):
            rows = [
                b.fmul(_load(b, columns, b.mul(b.add(first, _long(i)), lanes)), scale)
                for i in range(LANES)
            ]
            for i, line in enumerate(_transposed(b, rows)):
                _store(b, line, _load_long(b, targets, _long(i)), first)
        return context.get_dummy_value()

    return signature, generate
