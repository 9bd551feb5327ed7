"""Pairs of bfloat16: rows rounded to them, and the processor's products of pairs.

``vdpbf16ps`` multiplies, in each lane, two numbers of bfloat16 with two others and adds both
products to a float32: twice the multiplications of float32 in an instruction. It rounds to nearest,
ties to even, and takes denormal numbers as zeros. A pair is two neighbours of a row, so that a row
of pairs is simply a row of bfloat16, read as numbers of 32 bits.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.processor import path_of
from coppice.kernels.cpu.code.simd import INTS, LANES, VECTOR, at_float, constant, counting, load

#: Whether the processor multiplies pairs.
HAS_PAIRS = path_of("bfloat16") in ("amx", "avx512bf16")


class _BFloat(ir.Type):
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_ONE = _BFloat()
_LANES = ir.VectorType(_ONE, LANES)
_BOTH = ir.VectorType(ir.IntType(16), 2 * LANES)
# The type in which LLVM's function of the instruction takes pairs.
_PAIRS = ir.VectorType(_ONE, 2 * LANES) if llvm.llvm_version_info >= (16,) else INTS


def dot_pairs(b: Any, total: Any, one: Any, other: Any) -> Any:
    """``total`` plus both products of the pairs in each lane of two vectors of 32 bits."""
    kind = ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"
    function = cgutils.get_or_insert_function(b.module, kind, name)
    return b.call(function, (total, b.bitcast(one, _PAIRS), b.bitcast(other, _PAIRS)))


def in_pairs(b: Any, one: Any, other: Any, apart: int = LANES) -> Any:
    """Two vectors of float32 as pairs, rounded to nearest even.

    A pair are two numbers of both vectors, one after the other, that lie ``apart``; the first one
    is the lower half. By default a pair is a lane of both.
    """
    both = ir.VectorType(_ONE, 2 * LANES)
    function = cgutils.get_or_insert_function(
        b.module,
        ir.FunctionType(both, [VECTOR, VECTOR]),
        f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * LANES}",
    )
    numbers = b.bitcast(b.call(function, (other, one)), _BOTH)
    first = [n for n in range(2 * LANES) if n // apart % 2 == 0]
    order = ir.Constant(
        ir.VectorType(ir.IntType(32), 2 * LANES), [n + i for n in first for i in (0, apart)]
    )
    turned = b.shuffle_vector(numbers, ir.Constant(_BOTH, ir.Undefined), order)
    return b.bitcast(turned, VECTOR)


def store_rounded(b: Any, vector: Any, address: Any, index: Any) -> None:
    """Stores a vector of float32 as bfloat16, from the number with that index on."""
    place = b.inttoptr(b.add(address, b.shl(index, constant(1))), _LANES.as_pointer())
    b.store(b.fptrunc(vector, _LANES), place).align = 2


@intrinsic
def round_row(typing: Any, x: Any, width: Any, out: Any) -> Any:
    """``out`` bfloat16 ``[width]`` = ``x`` float32 ``[width]``; both are addresses."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, width, out = arguments
        if not HAS_PAIRS:  # nobody calls it; LLVM would call a function that is not there
            return context.get_dummy_value()

        whole = b.mul(b.sdiv(width, constant(LANES)), constant(LANES))
        with counting(b, 0, whole, LANES) as i:
            store_rounded(b, load(b, x, i), out, i)
        with counting(b, whole, width, 1) as i:
            place = b.inttoptr(b.add(out, b.shl(i, constant(1))), _ONE.as_pointer())
            b.store(b.fptrunc(b.load(at_float(b, x, i)), _ONE), place).align = 2
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate
