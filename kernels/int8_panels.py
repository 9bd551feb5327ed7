"""Products of int8 weights by the processor's dot products of four bytes (VNNI), panel by panel.

``vpdpbusd`` multiplies four unsigned bytes with four signed ones in each lane and adds the four
products to an int32: four times the multiplications of float32 in an instruction, exact. A weight
is laid out in panels: of ``PANEL`` outputs, four inputs of each side by side, so that a panel is
read once, in order, whatever the rows; up to ``ROWS`` rows are worked at a time, with their sums in
registers, and their levels are read where they lie. The weights are the unsigned side, with 128
added, of which each row's sum of levels takes away what is too much.

A result depends on its row and nothing else. Importing this where a processor has no VNNI is an
``ImportError``; ``int8_numba`` has the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.tasks_numba import pointer

#: A digest of ``tasks_numba.py``; see ``items_numba``.
SOURCES = "3542f99e1a9a"


def _layout() -> tuple[int, int]:
    """Lanes of int32 in a register, and rows at a time: their sums stay in registers."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512vnni"):
        return 16, 8  # 24 of 32 registers
    if features.get("avxvnni"):
        return 8, 4  # 12 of 16
    raise ImportError("this processor has no dot products of bytes (VNNI)")


LANES, ROWS = _layout()
_WIDE = 3
#: Outputs of a panel.
PANEL = _WIDE * LANES
# Numbers and addresses that ``run_panels`` is given.
_FRAME = 9

_BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_INTS = ir.VectorType(_INT, LANES)
# What the instruction's function takes its bytes as.
_BYTES = ir.VectorType(_BYTE, 4 * LANES) if llvm.llvm_version_info >= (21,) else _INTS


@dataclass(frozen=True, slots=True, eq=False)
class PackedInt8:
    """An int8 weight in panels; ``memory`` uint8 ``[panels, in_features / 4, PANEL, 4]``."""

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
    panels = -(-width // PANEL)
    memory = np.full((panels, inner // 4, PANEL, 4), 128, np.uint8)
    for panel in range(panels):
        part = weight[panel * PANEL : (panel + 1) * PANEL]
        raised = part.view(np.uint8) ^ np.uint8(128)  # adds 128
        memory[panel, :, : len(part)] = raised.reshape(len(part), inner // 4, 4).swapaxes(0, 1)
    return PackedInt8(width, inner, memory.ctypes.data, memory)


def _at(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


@intrinsic(prefer_literal=True)
def _multiply_panel(
    typing: Any, rows: Any, levels: Any, stride: Any, weights: Any, groups: Any, out: Any
) -> Any:
    """``out`` int32 ``[rows, PANEL]`` = levels times a panel's weights, all by address.

    How many rows is a constant. ``levels`` are int8, rows ``stride`` bytes apart; ``weights`` is
    uint8 ``[groups, PANEL, 4]``.
    """
    many = rows.literal_value
    signature = types.void(types.IntegerLiteral(many), *[types.int64] * 5)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, levels, stride, weights, groups, out = arguments
        kind = ir.FunctionType(_INTS, [_INTS, _BYTES, _BYTES])
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        multiply_in = cgutils.get_or_insert_function(b.module, kind, name)
        zeros = ir.Constant(_INTS, [0] * LANES)
        sums = [[cgutils.alloca_once_value(b, zeros) for _ in range(_WIDE)] for _ in range(many)]
        starts = [b.add(levels, b.mul(stride, ir.Constant(_LONG, row))) for row in range(many)]
        with cgutils.for_range(b, groups, intp=_LONG) as loop:
            place = b.add(weights, b.mul(loop.index, ir.Constant(_LONG, 4 * PANEL)))
            vectors = []
            for i in range(_WIDE):
                at = b.add(place, ir.Constant(_LONG, 4 * LANES * i))
                vector = b.load(_at(b, at, _INTS))
                vector.align = 4
                vectors.append(b.bitcast(vector, _BYTES))
            offset = b.shl(loop.index, ir.Constant(_LONG, 2))
            for start, mine in zip(starts, sums, strict=True):
                four = b.load(_at(b, b.add(start, offset), _INT))
                four.align = 1
                one = b.insert_element(ir.Constant(_INTS, ir.Undefined), four, _INT(0))
                splat = b.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), zeros)
                for total, vector in zip(mine, vectors, strict=True):
                    values = (b.load(total), vector, b.bitcast(splat, _BYTES))
                    b.store(b.call(multiply_in, values), total)
        for row, mine in enumerate(sums):
            for i, total in enumerate(mine):
                at = b.add(out, ir.Constant(_LONG, 4 * (row * PANEL + i * LANES)))
                b.store(b.load(total), _at(b, at, _INTS)).align = 4
        return context.get_dummy_value()

    return signature, generate


@cfunc(types.void(*[types.int64] * 3), fastmath={"contract"}, error_model="numpy", cache=True)
def run_panels(frame: int, begin: int, end: int) -> None:
    """Panels ``begin .. end`` of what ``int8_numba.multiply_rows`` has laid out in a frame."""
    f = carray(pointer(frame), (_FRAME,), np.int64)
    rows, inner, width = f[0], f[1], f[2]
    levels = carray(pointer(f[3]), (rows, inner), np.int8)
    peaks = carray(pointer(f[4]), (rows,), np.float32)
    scale = carray(pointer(f[6]), (width,), np.float32)
    biased = f[7] != 0
    bias = carray(pointer(f[7]), (width if biased else 0,), np.float32)
    out = carray(pointer(f[8]), (rows, width), np.float32)
    groups = inner // 4
    sums = np.empty(ROWS * PANEL, np.int32)
    excess = np.empty(rows, np.int32)
    for row in range(rows):
        total = np.int32(0)
        for d in range(inner):
            total += np.int32(levels[row, d])
        excess[row] = total * np.int32(128)
    for panel in range(begin, end):
        weights = f[5] + panel * groups * (4 * PANEL)
        first = panel * PANEL
        count = min(PANEL, width - first)
        row = 0
        while row < rows:
            start = f[3] + row * inner
            to = sums.ctypes.data
            left = rows - row
            # The first argument is a constant of what is compiled.
            if ROWS == 8 and left >= 8:
                many = 8
                _multiply_panel(8, start, inner, weights, groups, to)
            elif left >= 4:
                many = 4
                _multiply_panel(4, start, inner, weights, groups, to)
            elif left >= 2:
                many = 2
                _multiply_panel(2, start, inner, weights, groups, to)
            else:
                many = 1
                _multiply_panel(1, start, inner, weights, groups, to)
            for i in range(many):
                peak, less = peaks[row + i], excess[row + i]
                mine, result = sums[i * PANEL : (i + 1) * PANEL], out[row + i, first:]
                for j in range(count):
                    result[j] = np.float32(mine[j] - less) * scale[first + j] * peak
                if biased:
                    for j in range(count):
                        result[j] += bias[first + j]
            row += many
