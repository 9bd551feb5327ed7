"""LLVM's operations on whole vectors of float32, in which the inner loops on a CPU are written.

numba has no vector types, and LLVM alone would not keep the sums of a tile in registers. So
attention (``full_lanes``, ``few_lanes``) and products are intrinsics in LLVM's own operations,
which numba's compiled functions call. They take addresses, as int64, and check nothing. ``b`` is
the IR builder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from coppice.kernels.cpu.code.processor import features, path_of


def _layout() -> tuple[int, tuple[int, int, int, int], int]:
    """Lanes of a register, numbers of vectors that a row of lanes may have, and sums in registers.

    The sums of a product stay in registers, beside the vectors of one row and an element.
    """
    if "avx512f" in features():
        return 16, (1, 2, 3, 4), 24  # 32 registers
    if "avx" in features():
        return 8, (1, 2, 3, 3), 12  # 16 registers
    return 4, (1, 2, 3, 4), 24  # 32 registers on ARM; SSE's 16 spill


LANES, VECTORS, SUMS = _layout()
#: Rows that a product works together: their sums with three vectors of weights stay in registers.
ROWS = SUMS // 3
#: Rows from which a product prefetches its weights. AMD's Zen 4 fetches what is read in order by
#: itself: told to, products of one to four rows took 1.1 to 1.6 times as long on one thread. Two
#: threads share the memory's speed: whole steps took 1.03 to 1.1 times as long. With more rows
#: products are slower than memory, and prefetching gains a little.
FETCHED_FROM = ROWS if path_of("memory") == "read" else 1
FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
# 2**f on [-1/2, 1/2], the polynomial of least relative error, from f**5 down. With its rounding the
# error is 2e-7.
_POWER_OF_2 = (
    0.0013276444402220812, 0.009675537697142467, 0.055507133152361235, 0.2402211979327866,
    0.693146967067949, 1.0000000716400315,
)  # fmt: skip
# Exponents from here down are 0: smaller powers would be denormal.
_LEAST_POWER = -127.0
_CACHE_LINE = 64


def constant(value: int) -> Any:
    return ir.Constant(LONG, value)


def everywhere(value: float) -> Any:
    return ir.Constant(VECTOR, [float(np.float32(value))] * LANES)


def at_float(b: Any, address: Any, index: Any, kind: Any = FLOAT) -> Any:
    """Pointer to ``kind`` at the float with that index from an address."""
    return b.inttoptr(b.add(address, b.shl(index, constant(2))), kind.as_pointer())


def load(b: Any, address: Any, index: Any) -> Any:
    value = b.load(at_float(b, address, index, VECTOR))
    value.align = 4
    return value


def store(b: Any, value: Any, address: Any, index: Any) -> None:
    b.store(value, at_float(b, address, index, VECTOR)).align = 4


def load_long(b: Any, address: Any, index: Any) -> Any:
    return b.load(b.inttoptr(b.add(address, b.shl(index, constant(3))), LONG.as_pointer()))


def splat(b: Any, scalar: Any) -> Any:
    one = b.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(INT, 0))
    zeros = ir.Constant(INTS, [0] * LANES)
    return b.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), zeros)


def call(b: Any, name: str, *values: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(values))
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.{name}.v{LANES}f32")
    return b.call(function, values)


def greater(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def any_of(b: Any, lanes: Any) -> Any:
    """Whether a comparison holds in any lane."""
    bits = ir.IntType(LANES)
    return b.icmp_unsigned("!=", b.bitcast(lanes, bits), ir.Constant(bits, 0))


def power_of_2(b: Any, x: Any) -> Any:
    """``2**x`` of a vector; 0 below 2**-126 and of NaN, which -inf less -inf is."""
    scales = LANES == 16  # an instruction of AVX-512
    least = everywhere(_LEAST_POWER)
    above = b.fcmp_ordered(">", x, least)
    if not scales:
        x = b.select(above, x, least)
    whole = call(b, "rint", x)
    fraction = b.fsub(x, whole)
    power = everywhere(_POWER_OF_2[0])
    for coefficient in _POWER_OF_2[1:]:
        power = call(b, "fmuladd", power, fraction, everywhere(coefficient))
    if scales:
        mask = ir.IntType(LANES)
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3 + [mask, INT])
        function = cgutils.get_or_insert_function(
            b.module, kind, "llvm.x86.avx512.mask.scalef.ps.512"
        )
        rounding = ir.Constant(INT, 4)  # as the thread rounds
        return b.call(function, (power, whole, everywhere(0.0), b.bitcast(above, mask), rounding))
    biased = b.add(b.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES))
    return b.fmul(power, b.bitcast(b.shl(biased, ir.Constant(INTS, [23] * LANES)), VECTOR))


def prefetch(b: Any, address: Any, *, first: bool = False) -> None:
    """Fetches a cache line for reading into the second-level cache, or the first."""
    pointer = b.inttoptr(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, INT, INT, INT])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    # For reading, into that cache, data.
    b.call(function, [pointer, *(ir.Constant(INT, n) for n in (0, 3 if first else 2, 1))])


def zeros(b: Any, count: int) -> list[Any]:
    sums = [cgutils.alloca_once(b, VECTOR) for _ in range(count)]
    for each in sums:
        b.store(everywhere(0.0), each)
    return sums


@contextmanager
def counting(b: Any, begin: Any, end: Any, step: int) -> Iterator[Any]:
    """A loop whose body is written in this context; yields its index. ``begin`` may be a number."""
    begin = constant(begin) if isinstance(begin, int) else begin
    with cgutils.for_range_slice(b, begin, end, constant(step), intp=LONG) as (index, _):
        yield index


def unrolled(b: Any, count: Any, body: Callable[[Any], None]) -> None:
    """``body(i)`` for i below ``count``, two at a time: half the counting."""
    even = b.shl(b.ashr(count, constant(1)), constant(1))
    with counting(b, 0, even, 2) as index:
        body(index)
        body(b.add(index, constant(1)))
    with counting(b, even, count, 1) as index:
        body(index)


def fetch(b: Any, key: Any, value: Any, count: Any) -> None:
    """Prefetches ``count`` bytes of a key and of a value from their addresses on."""
    with counting(b, 0, count, _CACHE_LINE) as line:
        prefetch(b, b.add(key, line))
        prefetch(b, b.add(value, line))


def transposed(b: Any, rows: list[Any]) -> list[Any]:
    """The columns of the square of which these ``LANES`` vectors are the rows."""
    half = LANES // 2
    low, high = (
        ir.Constant(INTS, [n for i in range(half) for n in (at + i, at + i + LANES)])
        for at in (0, half)
    )
    for _ in range(LANES.bit_length() - 1):
        rows = [
            b.shuffle_vector(rows[i // 2], rows[i // 2 + half], (low, high)[i % 2])
            for i in range(LANES)
        ]
    return rows


def multiply_in(b: Any, sums: list[Any], vectors: list[Any], scalar: Any) -> None:
    """``sums[i] += vectors[i] * scalar``."""
    multiply_by(b, sums, vectors, splat(b, scalar))


def multiply_by(b: Any, sums: list[Any], vectors: list[Any], factor: Any) -> None:
    """``sums[i] += vectors[i] * factor``, a vector."""
    for total, vector in zip(sums, vectors, strict=True):
        b.store(call(b, "fmuladd", vector, factor, b.load(total)), total)
