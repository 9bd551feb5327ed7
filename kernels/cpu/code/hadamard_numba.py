"""``hadamard`` for compiled code: a row's blocks times a Hadamard matrix, in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from coppice.kernels.cpu.code.hadamard import LONGEST, SHORTEST
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.simd import (
    INTS,
    LANES,
    VECTOR,
    call,
    constant,
    counting,
    load,
    store,
)

# Numbers that are transformed at a time with all of them in registers, and the part of a block that
# is left to do for longer ones.
_HELD = 64
_REST = LONGEST // _HELD


def _within(b: Any, vector: Any) -> Any:
    """A vector times the Hadamard matrix of its lanes."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    span = 1
    while span < LANES:
        crossed = ir.Constant(INTS, [lane ^ span for lane in range(LANES)])
        signs = ir.Constant(VECTOR, [-1.0 if lane & span else 1.0 for lane in range(LANES)])
        partners = b.shuffle_vector(vector, undefined, crossed)
        vector = call(b, "fma", vector, signs, partners)
        span *= 2
    return vector


def _among(b: Any, vectors: list[Any]) -> list[Any]:
    """Vectors, a power of 2 of them, times the Hadamard matrix of their number."""
    span = 1
    while span < len(vectors):
        made = list(vectors)
        for at in range(len(vectors)):
            if not at & span:
                made[at] = b.fadd(vectors[at], vectors[at + span])
                made[at + span] = b.fsub(vectors[at], vectors[at + span])
        vectors, span = made, 2 * span
    return vectors


@intrinsic(prefer_literal=True)
def _transform_held(typing: Any, block: Any, x: Any, width: Any, out: Any) -> Any:
    """``out [width]`` = ``x [width]`` with blocks of ``block`` numbers transformed; a constant."""
    held = block.literal_value // LANES
    signature = types.void(types.IntegerLiteral(block.literal_value), *[types.int64] * 3)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, width, out = arguments
        with counting(b, 0, width, held * LANES) as first:
            places = [b.add(first, constant(i * LANES)) for i in range(held)]
            vectors = [_within(b, load(b, x, place)) for place in places]
            for vector, place in zip(_among(b, vectors), places, strict=True):
                store(b, vector, out, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def _transform_rest(typing: Any, parts: Any, x: Any, width: Any) -> Any:
    """Transforms blocks of ``parts``, a constant, parts of ``_HELD`` transformed numbers."""
    many = parts.literal_value
    signature = types.void(types.IntegerLiteral(many), *[types.int64] * 2)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, width = arguments
        with counting(b, 0, width, many * _HELD) as first:
            for lane in range(0, _HELD, LANES):
                places = [b.add(first, constant(i * _HELD + lane)) for i in range(many)]
                vectors = _among(b, [load(b, x, place) for place in places])
                for vector, place in zip(vectors, places, strict=True):
                    store(b, vector, x, place)
        return context.get_dummy_value()

    return signature, generate


@njit
def transform_row(x: int, width: int, out: int) -> bool:
    """``out [width]`` = a row ``x [width]`` transformed; both are addresses of float32.

    False, and nothing is written, where such rows stay as they are.
    """
    block = min(width & -width, LONGEST)
    if block < SHORTEST:
        return False
    # The first argument is a constant of what is compiled.
    if block >= _HELD:
        _transform_held(64, x, width, out)
        parts = block // _HELD
        if parts == 8:
            _transform_rest(8, out, width)
        elif parts == 4:
            _transform_rest(4, out, width)
        elif parts == 2:
            _transform_rest(2, out, width)
    elif block == 32:
        _transform_held(32, x, width, out)
    else:
        _transform_held(16, x, width, out)
    return True
