"""Products of float32 rows with float weights, panel by panel, computed in float32.

Most models are published in bfloat16, others in float16. A step of few tokens takes the time of
reading the weights, so they keep their type and become float32 in the registers: bfloat16 by a
shift or a mask, since it is the upper half of a float32, float16 by the processor's conversion
(F16C); both are exact. The results are those of float32, from half of the memory. Weights of
float32 run through the same code.

A weight is laid out in panels of ``PANEL`` outputs, one input after the other (of bfloat16 two of
an output side by side, if ``PAIRED``), so that a panel is read once, in order. Up to ``ROWS`` rows,
laid side by side (``row_blocks``), are multiplied at a time, with their sums in registers.
Meanwhile the next panel is prefetched: products of up to 8 rows take the time of reading memory,
1.3 to 1.5 times less than without. A sum adds the inputs in order, and depends on its row and
nothing else.

To import this module on a processor without fused multiplication of vectors is an ``ImportError``;
``float_numba`` has the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.kept import cfunc
from coppice.kernels.cpu.code.memory import room_for
from coppice.kernels.cpu.code.pairs import HAS_PAIRS, dot_pairs
from coppice.kernels.cpu.code.processor import compiled_path
from coppice.kernels.cpu.code.simd import (
    FETCHED_FROM,
    INTS,
    LANES,
    LONG,
    ROWS,
    VECTOR,
    at_float,
    call,
    constant,
    load,
    prefetch,
    splat,
    store,
    zeros,
)
from coppice.kernels.cpu.code.tiles import HAS_TILES
from coppice.kernels.cpu.layer.matmul.row_blocks import PAIRS, TILES, Panels, to_fetch
from coppice.kernels.cpu.layer.matmul.tiles.blocks import PANEL as TILE_PANEL
from coppice.kernels.cpu.layer.matmul.tiles.shares import whole_inputs

compiled_path("float")

_WIDE = 3
#: Outputs of a panel.
PANEL = _WIDE * LANES
# Bytes of a line of the cache, and the lines that a panel of 16 bits has for each two inputs.
_LINE = 64
_PARTS = -(-4 * PANEL // _LINE)
#: Whether panels of bfloat16 have pairs of inputs, which one load brings. 16 registers do not hold
#: both inputs of a pair beside the sums.
PAIRED = ROWS == 8
# Numbers and addresses that ``run_panels`` is given.
_FRAME = 8
#: Types of weights. The kind of a weight in compiled code is its place here.
KINDS = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT32 = KINDS.index(torch.float32)
# Vectors of float16 and of the bits of bfloat16.
_HALVES, _SHORTS = (ir.VectorType(kind, LANES) for kind in (ir.HalfType(), ir.IntType(16)))


@dataclass(frozen=True, slots=True, eq=False)
class PackedFloat:
    """A weight in panels, ``memory [panels, in_features, PANEL]`` of its type.

    Of bfloat16, if ``PAIRED`` or in ``pairs``, it is ``[panels, in_features / 2, PANEL, 2]``.
    ``pairs``: rows are rounded to bfloat16, too, and multiplied in pairs, or by tiles, whose panels
    have ``TILE_PANEL`` outputs, and ``in_features`` filled up with zeros to whole tiles.
    """

    out_features: int
    in_features: int
    address: int
    memory: torch.Tensor
    pairs: bool = False

    @property
    def kind(self) -> int:
        """The place of its type in ``KINDS``, or ``PAIRS``."""
        if self.pairs:
            return TILES if HAS_TILES else PAIRS
        return KINDS.index(self.memory.dtype)


def pack(weight: torch.Tensor, *, pairs: bool = False) -> PackedFloat | None:
    """A weight ``[N, K]`` in panels, N filled up to whole ones; None if K is odd or 0.

    It is of one of ``KINDS``, for products of ``pairs`` of bfloat16.
    """
    assert weight.dtype in KINDS
    assert not pairs or (HAS_PAIRS and weight.dtype == torch.bfloat16)
    width, inner = weight.shape
    if inner % 2 or not weight.numel():
        return None
    by_tiles = pairs and HAS_TILES
    wide, whole_inner = (TILE_PANEL, whole_inputs(inner)) if by_tiles else (PANEL, inner)
    panels = -(-width // wide)
    memory = room_for(panels * whole_inner * wide * weight.element_size()).view(weight.dtype)
    parts = weight.detach().contiguous()
    if weight.dtype == torch.bfloat16 and (PAIRED or pairs):
        memory = memory.view(panels, whole_inner // 2, wide, 2)
        memory[:, inner // 2 :] = 0
        # A pair is moved as one number of 32 bits: a fifth of the time.
        laid, parts = memory.view(torch.int32)[:, : inner // 2, :, 0], parts.view(torch.int32)
    else:
        memory = laid = memory.view(panels, inner, wide)
    whole = width // wide
    laid[:whole] = parts[: whole * wide].view(whole, wide, parts.shape[1]).transpose(1, 2)
    if whole < panels:
        laid[whole] = 0
        laid[whole, :, : width - whole * wide] = parts[whole * wide :].t()
    return PackedFloat(width, inner, memory.data_ptr(), memory, pairs)


def _from_bfloat16(b: Any, weights: Any, place: Any) -> list[list[Any]]:
    """The weights of two inputs as float32, from the 32 bits with that number on."""
    if not PAIRED:
        shift = ir.Constant(INTS, [16] * LANES)
        bits = [b.zext(each, INTS) for each in _both_inputs(b, weights, place, _SHORTS)]
        vectors = [b.bitcast(b.shl(each, shift), VECTOR) for each in bits]
        return [vectors[:_WIDE], vectors[_WIDE:]]
    pairs = [
        b.bitcast(load(b, weights, b.add(place, constant(LANES * i))), INTS) for i in range(_WIDE)
    ]
    shift, mask = (ir.Constant(INTS, [number] * LANES) for number in (16, -(2**16)))
    return [
        [b.bitcast(b.shl(pair, shift), VECTOR) for pair in pairs],
        [b.bitcast(b.and_(pair, mask), VECTOR) for pair in pairs],
    ]


def _from_float32(b: Any, weights: Any, place: Any) -> list[list[Any]]:
    """The weights of two inputs, which are float32 already."""
    first = b.shl(place, constant(1))
    vectors = [load(b, weights, b.add(first, constant(LANES * i))) for i in range(2 * _WIDE)]
    return [vectors[:_WIDE], vectors[_WIDE:]]


def _from_float16(b: Any, weights: Any, place: Any) -> list[list[Any]]:
    """The same of float16."""
    vectors = [b.fpext(each, VECTOR) for each in _both_inputs(b, weights, place, _HALVES)]
    return [vectors[:_WIDE], vectors[_WIDE:]]


def _both_inputs(b: Any, weights: Any, place: Any, kind: Any) -> list[Any]:
    """Vectors of 16 bits a weight: of two inputs, one after the other."""
    vectors = []
    for i in range(2 * _WIDE):
        address = b.add(weights, b.add(b.shl(place, constant(2)), constant(2 * LANES * i)))
        vectors.append(b.load(b.inttoptr(address, kind.as_pointer())))
        vectors[-1].align = 2
    return vectors


@intrinsic(prefer_literal=True)
def _multiply_panel(
    typing: Any,
    rows: Any,
    kind: Any,
    x: Any,
    inner: Any,
    weights: Any,
    first: Any,
    second: Any,
    third: Any,
    bias: Any,
    out: Any,
    width: Any,
) -> Any:
    """``out`` float32 ``[rows, PANEL]``, rows ``width`` apart: ``x`` times a panel, plus bias.

    ``rows`` is a constant; the others, except ``kind``, are addresses and sizes. ``x`` is a block
    of ``row_blocks``, float32 ``[inner, rows]``, or of ``PAIRS`` bfloat16 ``[inner / 2, rows, 2]``;
    ``bias`` is float32 ``[PANEL]``. With each two inputs a cache line (of float32 two) is
    prefetched at each of ``first``, ``second`` and ``third``: from ``FETCHED_FROM`` rows on, with
    weights of 16 bits that become float32 from 4 on at the latest.
    """
    many = rows.literal_value
    signature = types.void(types.IntegerLiteral(many), *[types.int64] * 10)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, kind, x, inner, weights, first, second, third, bias, out, width = arguments

        def work(
            widened: Callable[[Any, Any, Any], list[list[Any]]], lines: int, least: int
        ) -> None:
            sums = [zeros(b, _WIDE) for _ in range(many)]
            with cgutils.for_range(b, b.lshr(inner, constant(1)), intp=LONG) as loop:
                vectors = widened(b, weights, b.mul(loop.index, constant(PANEL)))
                for ahead in (first, second, third) if many >= least else ():
                    line = b.add(ahead, b.mul(loop.index, constant(lines * _LINE)))
                    for i in range(lines):
                        prefetch(b, b.add(line, constant(i * _LINE)))
                here = b.add(x, b.mul(loop.index, constant(2 * 4 * many)))
                for which, mine in enumerate(vectors):
                    for row, totals in enumerate(sums):
                        number = splat(b, b.load(at_float(b, here, constant(which * many + row))))
                        for total, vector in zip(totals, mine, strict=True):
                            b.store(call(b, "fma", vector, number, b.load(total)), total)
            finish(sums)

        def work_pairs() -> None:
            sums = [zeros(b, _WIDE) for _ in range(many)]
            with cgutils.for_range(b, b.lshr(inner, constant(1)), intp=LONG) as loop:
                place = b.mul(loop.index, constant(PANEL))
                mine = [load(b, weights, b.add(place, constant(LANES * i))) for i in range(_WIDE)]
                for ahead in (first, second, third) if many >= FETCHED_FROM else ():
                    prefetch(b, b.add(ahead, b.mul(loop.index, constant(_LINE))))
                here = b.add(x, b.mul(loop.index, constant(4 * many)))
                for row, totals in enumerate(sums):
                    pair = splat(b, b.load(at_float(b, here, constant(row))))
                    for total, vector in zip(totals, mine, strict=True):
                        b.store(dot_pairs(b, b.load(total), vector, pair), total)
            finish(sums)

        def finish(sums: list[list[Any]]) -> None:
            added = [load(b, bias, constant(LANES * i)) for i in range(_WIDE)]
            for row, totals in enumerate(sums):
                begin = b.mul(width, constant(row))
                for i, total in enumerate(totals):
                    value = b.fadd(b.load(total), added[i])
                    store(b, value, out, b.add(begin, constant(LANES * i)))

        def is_kind(which: int) -> Any:
            return b.icmp_signed("==", kind, constant(which))

        # Of weights that become float32 four rows are slower than memory already.
        least = min(FETCHED_FROM, 4)
        ways: list[tuple[int, Callable[[], None]]] = [
            (KINDS.index(torch.bfloat16), lambda: work(_from_bfloat16, 1, least)),
            (KINDS.index(torch.float16), lambda: work(_from_float16, 1, least)),
            (_FLOAT32, lambda: work(_from_float32, 2, FETCHED_FROM)),
        ]
        if HAS_PAIRS:
            ways.append((PAIRS, work_pairs))
        for which, way in ways:
            with b.if_then(is_kind(which)):
                way()
        return context.get_dummy_value()

    return signature, generate


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_panels(frame: int, begin: int, end: int) -> None:
    """Panels ``begin .. end`` of what ``float_numba.multiply_rows`` has laid out in a frame."""
    f = carray(pointer(frame), (_FRAME,), np.int64)
    rows, inner, width, kind = f[0], f[1], f[2], f[7]
    size = 4 if kind == _FLOAT32 else 2
    biased = f[5] != 0
    # The last panel's outputs that there are, and its biases.
    edge, edge_bias = np.empty((ROWS, PANEL), np.float32), np.zeros(PANEL, np.float32)
    for panel in range(begin, end):
        weights = f[4] + size * panel * inner * PANEL
        first = panel * PANEL
        count = min(PANEL, width - first)
        whole = count == PANEL
        bias = f[5] + 4 * first
        if biased and not whole:
            edge_bias[:count] = carray(pointer(bias), (count,), np.float32)
        if not (whole and biased):
            bias = edge_bias.ctypes.data
        row = 0
        while row < rows:
            start = f[3] + (2 if kind == PAIRS else 4) * row * inner
            # While rows are worked with this panel the next one comes.
            one = two = three = start
            if panel + 1 < end:
                following, part = weights + size * inner * PANEL, size // 2 * _LINE * (inner // 2)
                one, two, three = to_fetch(row, rows, following, part, _PARTS, start)
            to, stride = f[6] + 4 * (row * width + first), width
            if not whole:
                to, stride = edge.ctypes.data, PANEL
            left = rows - row
            # The first argument is a constant of what is compiled.
            if ROWS == 8 and left >= 8:
                many = 8
                _multiply_panel(
                    8, kind, start, inner, weights, one, two, three, bias, to, stride
                )  # fmt: skip
            elif left >= 4:
                many = 4
                _multiply_panel(
                    4, kind, start, inner, weights, one, two, three, bias, to, stride
                )  # fmt: skip
            elif left >= 2:
                many = 2
                _multiply_panel(
                    2, kind, start, inner, weights, one, two, three, bias, to, stride
                )  # fmt: skip
            else:
                many = 1
                _multiply_panel(
                    1, kind, start, inner, weights, one, two, three, bias, to, stride
                )  # fmt: skip
            if not whole:
                for i in range(many):
                    at = pointer(f[6] + 4 * ((row + i) * width + first))
                    carray(at, (count,), np.float32)[:] = edge[i, :count]
            row += many
    edge[0, 0] = edge_bias[0] = 0


def product(kind: int) -> Panels:
    """The product of panels for compiled code, of weights of a kind."""
    if kind == TILES:
        from coppice.kernels.cpu.layer.matmul.tiles import panels  # compiled when imported

        return panels.product()
    return Panels(run_panels.address, PANEL, kind)
