"""Products of float32 rows with bfloat16 weights, panel by panel, computed in float32.

Most models are published in bfloat16. Their numbers as float32 are the same numbers with zeros
behind; what a step of few tokens takes is the time to read them. So they are kept in 16 bits and
become float32 in the registers, by a shift or a mask: the results are float32's, from half of the
memory.

A weight is laid out in panels of ``PANEL`` outputs, two inputs of each side by side, so that a
panel is read once, in order; up to ``ROWS`` rows, laid side by side (``row_blocks``), are worked at
a time, with their sums in registers. While a panel is worked the next one is fetched: products of
up to 8 rows take no longer than memory does, 1.3 to 1.5 times less than without. A result adds up
in the order of the inputs and depends on its row and nothing else.
Importing this where a processor has no vectors with fused multiplication is an ``ImportError``;
``half_numba`` has the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.row_blocks import to_fetch
from coppice.kernels.tasks_numba import pointer
from coppice.kernels.vector_code import (
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

#: A digest of ``row_blocks.py``, ``vector_code.py`` and ``tasks_numba.py``; see ``items_numba``.
SOURCES = "3c09c58586e0"

if not llvm.get_host_cpu_features().get("fma"):
    raise ImportError("this processor has no vectors with fused multiplication (FMA)")

_WIDE = 3
#: Outputs of a panel.
PANEL = _WIDE * LANES
# Bytes of a line of the cache, and the lines that a panel has for each two inputs.
_LINE = 64
_PARTS = -(-4 * PANEL // _LINE)
# Numbers and addresses that ``run_panels`` is given.
_FRAME = 7


@dataclass(frozen=True, slots=True, eq=False)
class PackedHalf:
    """A bfloat16 weight in panels; ``memory`` bfloat16 ``[panels, in_features / 2, PANEL, 2]``."""

    out_features: int
    in_features: int
    address: int
    memory: torch.Tensor


def pack(weight: torch.Tensor) -> PackedHalf | None:
    """A bfloat16 weight ``[N, K]`` in panels, N filled up to whole ones; None if K is odd or 0."""
    width, inner = weight.shape
    if inner % 2 or not weight.numel():
        return None
    panels, pairs = -(-width // PANEL), inner // 2
    numbers = panels * inner * PANEL
    buffer = torch.empty(2 * numbers + _LINE, dtype=torch.uint8)
    first = -buffer.data_ptr() % _LINE
    memory = buffer[first : first + 2 * numbers].view(torch.bfloat16).view(panels, pairs, PANEL, 2)
    whole = width // PANEL
    parts = weight.detach().view(width, pairs, 2)
    memory[:whole] = parts[: whole * PANEL].view(whole, PANEL, pairs, 2).transpose(1, 2)
    if whole < panels:
        memory[whole] = 0
        memory[whole, :, : width - whole * PANEL] = parts[whole * PANEL :].transpose(0, 1)
    return PackedHalf(width, inner, memory.data_ptr(), memory)


def _widened(b: Any, pairs: Any, which: int) -> Any:
    """The lower (0) or the upper (1) halves of 32 bits as float32."""
    bits = b.bitcast(pairs, INTS)
    if which == 0:
        bits = b.shl(bits, ir.Constant(INTS, [16] * LANES))
    else:
        bits = b.and_(bits, ir.Constant(INTS, [-(2**16)] * LANES))
    return b.bitcast(bits, VECTOR)


@intrinsic(prefer_literal=True)
def _multiply_panel(
    typing: Any,
    rows: Any,
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

    How many rows is a constant, the others are addresses and sizes. ``x`` is a block of
    ``row_blocks``, float32 ``[inner, rows]``, ``bias`` float32 ``[PANEL]``; of what lies at
    ``first``, ``second`` and ``third`` a line of the cache is fetched with each two inputs.
    """
    many = rows.literal_value
    signature = types.void(types.IntegerLiteral(many), *[types.int64] * 9)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, inner, weights, first, second, third, bias, out, width = arguments
        sums = [zeros(b, _WIDE) for _ in range(many)]
        with cgutils.for_range(b, b.lshr(inner, constant(1)), intp=LONG) as loop:
            place = b.mul(loop.index, constant(PANEL))
            pairs = [load(b, weights, b.add(place, constant(LANES * i))) for i in range(_WIDE)]
            for ahead in (first, second, third):
                prefetch(b, b.add(ahead, b.mul(loop.index, constant(_LINE))))
            here = b.add(x, b.mul(loop.index, constant(2 * 4 * many)))
            for which in range(2):
                vectors = [_widened(b, pair, which) for pair in pairs]
                for row, mine in enumerate(sums):
                    number = splat(b, b.load(at_float(b, here, constant(which * many + row))))
                    for total, vector in zip(mine, vectors, strict=True):
                        b.store(call(b, "fma", vector, number, b.load(total)), total)
        added = [load(b, bias, constant(LANES * i)) for i in range(_WIDE)]
        for row, mine in enumerate(sums):
            begin = b.mul(width, constant(row))
            for i, total in enumerate(mine):
                value = b.fadd(b.load(total), added[i])
                store(b, value, out, b.add(begin, constant(LANES * i)))
        return context.get_dummy_value()

    return signature, generate


@cfunc(types.void(*[types.int64] * 3), error_model="numpy", cache=True)
def run_panels(frame: int, begin: int, end: int) -> None:
    """Panels ``begin .. end`` of what ``half_numba.multiply_rows`` has laid out in a frame."""
    f = carray(pointer(frame), (_FRAME,), np.int64)
    rows, inner, width = f[0], f[1], f[2]
    biased = f[5] != 0
    # The last panel's outputs that there are, and its biases.
    edge, edge_bias = np.empty((ROWS, PANEL), np.float32), np.zeros(PANEL, np.float32)
    for panel in range(begin, end):
        weights = f[4] + 2 * panel * inner * PANEL
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
            start = f[3] + 4 * row * inner
            # While rows are worked with this panel the next one comes.
            one = two = three = start
            if panel + 1 < end:
                following, part = weights + 2 * inner * PANEL, _LINE * (inner // 2)
                one, two, three = to_fetch(row, rows, following, part, _PARTS, start)
            to, stride = f[6] + 4 * (row * width + first), width
            if not whole:
                to, stride = edge.ctypes.data, PANEL
            left = rows - row
            # The first argument is a constant of what is compiled.
            if ROWS == 8 and left >= 8:
                many = 8
                _multiply_panel(
                    8, start, inner, weights, one, two, three, bias, to, stride
                )  # fmt: skip
            elif left >= 4:
                many = 4
                _multiply_panel(
                    4, start, inner, weights, one, two, three, bias, to, stride
                )  # fmt: skip
            elif left >= 2:
                many = 2
                _multiply_panel(
                    2, start, inner, weights, one, two, three, bias, to, stride
                )  # fmt: skip
            else:
                many = 1
                _multiply_panel(
                    1, start, inner, weights, one, two, three, bias, to, stride
                )  # fmt: skip
            if not whole:
                for i in range(many):
                    at = pointer(f[6] + 4 * ((row + i) * width + first))
                    carray(at, (count,), np.float32)[:] = edge[i, :count]
            row += many
    edge[0, 0] = edge_bias[0] = 0
