"""Products of int8 weights by the processor's products of four bytes (``fours``), panel by panel.

Four unsigned bytes are multiplied with four signed ones in each lane, and the products added to an
int32: with VNNI four times the multiplications of float32 in an instruction, exact. A weight is
laid out in panels of ``PANEL`` outputs, four inputs of each side by side, so that a panel is read
once, in order, for any number of rows. Up to ``ROWS`` rows, with their levels side by side by
fours (``row_blocks``), are multiplied at a time, with their sums in registers, while the next panel
is prefetched (from ``FETCHED_FROM`` rows on). The levels are the unsigned side, with 128 added;
what that adds to an output, 128 times the sum of its weights, lies at the end of the panel. With
tiles (``tiles.levels``) only a few rows come here.

A result depends on its row and nothing else, and is the same by all instructions. To import this
module on a processor with neither VNNI nor AVX2 is an ``ImportError``; ``level_numba`` has the
call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.fours import fours_of
from coppice.kernels.cpu.code.kept import cfunc
from coppice.kernels.cpu.code.memory import room_for
from coppice.kernels.cpu.code.processor import compiled_path
from coppice.kernels.cpu.code.simd import FETCHED_FROM, ROWS, prefetch
from coppice.kernels.cpu.layer.matmul.row_blocks import INT8, Panels, to_fetch
from coppice.kernels.cpu.layer.matmul.tiles.levels import run_tiles

_FOURS = fours_of(compiled_path("int8"))
#: Lanes of int32 in a register.
LANES = _FOURS.lanes
_WIDE = 3
#: Outputs of a panel.
PANEL = _WIDE * LANES
# Bytes of a line of the cache, and the lines that a panel has for each four inputs.
_LINE = 64
_PARTS = -(-4 * PANEL // _LINE)
# Numbers and addresses that ``run_panels`` is given.
_FRAME = 10

_INT, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, LANES), ir.VectorType(_FLOAT, LANES)


@dataclass(frozen=True, slots=True, eq=False)
class PackedInt8:
    """An int8 weight in panels; ``memory`` int8 ``[panels, in_features / 4 + 1, PANEL, 4]``.

    The last of a panel are int32 ``[PANEL]``: 128 times the sum of an output's weights.
    """

    out_features: int
    in_features: int
    address: int
    memory: np.ndarray


def pack(weight: np.ndarray) -> PackedInt8 | None:
    """An int8 weight ``[N, K]`` in panels, N filled up to whole ones.

    None if 4 does not divide K, and above 2^16, where a sum might not fit an int32.
    """
    width, inner = weight.shape
    if inner % 4 or inner > 2**16 or not weight.size:
        return None
    panels, groups = -(-width // PANEL), inner // 4
    memory = room_for(panels * (groups + 1) * PANEL * 4).numpy().view(np.int8)
    memory[:] = 0
    memory = memory.reshape(panels, groups + 1, PANEL, 4)
    # Four are moved as one number of 32 bits: a fifth of the time.
    weight = np.ascontiguousarray(weight)
    fours, to = weight.view(np.int32), memory.view(np.int32)[..., 0]
    for panel in range(panels):
        rows = slice(panel * PANEL, (panel + 1) * PANEL)
        part = weight[rows]
        to[panel, :groups, : len(part)] = fours[rows].T
        raised = memory[panel, groups].view(np.int32).reshape(PANEL)
        raised[: len(part)] = 128 * part.sum(axis=1, dtype=np.int32)
    return PackedInt8(width, inner, memory.ctypes.data, memory)


def _at(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


@intrinsic(prefer_literal=True)
def _multiply_panel(
    typing: Any,
    rows: Any,
    levels: Any,
    inner: Any,
    weights: Any,
    first: Any,
    second: Any,
    third: Any,
    peaks: Any,
    scales: Any,
    bias: Any,
    out: Any,
    width: Any,
) -> Any:
    """``out`` float32 ``[rows, PANEL]``, rows ``width`` apart: levels times a panel, rescaled.

    ``rows`` is a constant; the others are addresses and sizes. ``levels`` uint8, with 128 added, is
    a block of ``row_blocks``, ``[inner / 4, rows, 4]``; ``peaks`` is float32 ``[rows]``, ``scales``
    and ``bias`` float32 ``[PANEL]``. With each four inputs a cache line is prefetched at each of
    ``first``, ``second`` and ``third``, from ``FETCHED_FROM`` rows on.
    """
    many = rows.literal_value
    signature = types.void(types.IntegerLiteral(many), *[types.int64] * 11)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, levels, inner, weights, first, second, third, peaks, scales, bias, out, width = arguments
        zeros = ir.Constant(_INTS, [0] * LANES)

        def load(address: Any, offset: int, kind: Any) -> Any:
            value = b.load(_at(b, b.add(address, ir.Constant(_LONG, offset)), kind))
            value.align = 4 if kind is not _INT else 1
            return value

        def splat(value: Any, kind: Any) -> Any:
            one = b.insert_element(ir.Constant(kind, ir.Undefined), value, _INT(0))
            return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

        sums = [[cgutils.alloca_once_value(b, zeros) for _ in range(_WIDE)] for _ in range(many)]
        with cgutils.for_range(b, b.lshr(inner, ir.Constant(_LONG, 2)), intp=_LONG) as loop:
            place = b.add(weights, b.mul(loop.index, ir.Constant(_LONG, 4 * PANEL)))
            vectors = [_FOURS.signed(b, load(place, 4 * LANES * i, _INTS)) for i in range(_WIDE)]
            for ahead in (first, second, third) if many >= FETCHED_FROM else ():
                prefetch(b, b.add(ahead, b.mul(loop.index, ir.Constant(_LONG, _LINE))))
            here = b.add(levels, b.mul(loop.index, ir.Constant(_LONG, 4 * many)))
            for row, mine in enumerate(sums):
                four = _FOURS.unsigned(b, splat(load(here, 4 * row, _INT), _INTS))
                for total, vector in zip(mine, vectors, strict=True):
                    b.store(_FOURS.add(b, b.load(total), four, vector), total)
        # Here and not in a loop of numba's, which takes longer than the products of 576 inputs.
        factors = [load(scales, 4 * LANES * i, _FLOATS) for i in range(_WIDE)]
        end = b.add(weights, b.mul(inner, ir.Constant(_LONG, PANEL)))
        raised = [load(end, 4 * LANES * i, _INTS) for i in range(_WIDE)]
        added = [load(bias, 4 * LANES * i, _FLOATS) for i in range(_WIDE)]
        for row, mine in enumerate(sums):
            peak = splat(load(peaks, 4 * row, _FLOAT), _FLOATS)
            to = b.add(out, b.mul(width, ir.Constant(_LONG, 4 * row)))
            for i, total in enumerate(mine):
                product = b.sitofp(b.sub(b.load(total), raised[i]), _FLOATS)
                product = b.fmul(b.fmul(product, factors[i]), peak)
                at = _at(b, b.add(to, ir.Constant(_LONG, 4 * LANES * i)), _FLOATS)
                b.store(b.fadd(product, added[i]), at).align = 4
        return context.get_dummy_value()

    return signature, generate


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_panels(frame: int, begin: int, end: int) -> None:
    """Panels ``begin .. end`` of what ``level_numba.multiply_rows`` has laid out in a frame."""
    f = carray(pointer(frame), (_FRAME,), np.int64)
    rows, inner, width = f[0], f[1], f[2]
    if f[9]:
        run_tiles(frame, begin, end)
        return
    biased = f[7] != 0
    # The last panel's outputs that there are, and its scales and biases.
    edge = np.empty((ROWS, PANEL), np.float32)
    edge_scales, edge_bias = np.zeros(PANEL, np.float32), np.zeros(PANEL, np.float32)
    for panel in range(begin, end):
        weights = f[5] + panel * (inner + 4) * PANEL
        first = panel * PANEL
        count = min(PANEL, width - first)
        whole = count == PANEL
        scales, bias = f[6] + 4 * first, f[7] + 4 * first
        if not whole:
            edge_scales[:count] = carray(pointer(scales), (count,), np.float32)
            scales = edge_scales.ctypes.data
            if biased:
                edge_bias[:count] = carray(pointer(bias), (count,), np.float32)
        if not (whole and biased):
            bias = edge_bias.ctypes.data
        row = 0
        while row < rows:
            start, peaks = f[3] + row * inner, f[4] + 4 * row
            # While rows are worked with this panel the next one comes.
            one = two = three = start
            if panel + 1 < end:
                following, part = weights + (inner + 4) * PANEL, _LINE * (inner // 4)
                one, two, three = to_fetch(row, rows, following, part, _PARTS, start)
            to, stride = f[8] + 4 * (row * width + first), width
            if not whole:
                to, stride = edge.ctypes.data, PANEL
            left = rows - row
            # The first argument is a constant of what is compiled.
            if ROWS == 8 and left >= 8:
                many = 8
                _multiply_panel(
                    8, start, inner, weights, one, two, three, peaks, scales, bias, to, stride
                )  # fmt: skip
            elif left >= 4:
                many = 4
                _multiply_panel(
                    4, start, inner, weights, one, two, three, peaks, scales, bias, to, stride
                )  # fmt: skip
            elif left >= 2:
                many = 2
                _multiply_panel(
                    2, start, inner, weights, one, two, three, peaks, scales, bias, to, stride
                )  # fmt: skip
            else:
                many = 1
                _multiply_panel(
                    1, start, inner, weights, one, two, three, peaks, scales, bias, to, stride
                )  # fmt: skip
            if not whole:
                for i in range(many):
                    out = carray(
                        pointer(f[8] + 4 * ((row + i) * width + first)), (count,), np.float32
                    )
                    out[:] = edge[i, :count]
            row += many
    edge[0, 0] = edge_scales[0] = edge_bias[0] = 0


def product() -> Panels:
    """The product of panels for compiled code."""
    return Panels(run_panels.address, PANEL, INT8)
