"""A linear projection on a GPU whose result for a row does not depend on the rest of the batch.

Libraries choose a kernel by the number of rows, and each adds up in another order: a token gets
other bits alone than in a batch, and other bits in a prefill than in the chunk after a hit. This
kernel has a single tile and adds the inputs in one order, for any number of rows, as
``deterministic`` engines need it. It is slower than the best kernel for each number of rows.

The inputs are added in parts, whose number follows from the shape of the weight alone, and then the
parts, in order. With few rows each part has programs of its own, which fill the chip; with many
rows a program computes all parts, and gets the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice.kernels.schedule.cost import H100_MULTIPROCESSORS
from coppice.kernels.schedule.tiles import ProductTile, product_tile
from coppice.kernels.triton.base import INTERPRETED, on
from coppice.kernels.triton.dependent import begin, dependent

# Programs that parts are made for: what is resident on a chip. The guarantee would not survive
# another number, so it is not that of the device.
_PROGRAMS = 2 * H100_MULTIPROCESSORS
# With fewer inputs a part is mostly the first tile's wait for memory.
_PART_INPUTS = 1024
_MOST_PARTS = 8
# Parts have programs of their own where a product has fewer tiles than this.
_DIVIDED_BELOW = H100_MULTIPROCESSORS
# Results that a program adds the parts of.
_ADDED = 1024


@triton.jit(do_not_specialize=["rows"])
def multiply_rows(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PART: tl.constexpr,
    DIVIDED: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """A tile ``[ROWS, COLUMNS]`` of ``x weight^T + bias``: grid ``(row tiles * column tiles,)``.

    The row tiles of the same columns lie side by side, so that the weight is read once. ``x`` is
    ``[rows, INPUTS]``, ``weight [OUTPUTS, INPUTS]``, ``out [rows, OUTPUTS]``; sums are float32,
    of PART inputs each. DIVIDED: a program computes one of them, by the second number of the grid,
    without a bias; ``out`` is then float32 ``[parts, rows, OUTPUTS]``, for ``add_parts``.
    """
    begin(DEPENDENT)
    row_tiles = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row < rows, column < OUTPUTS
    x_at = x + row.to(tl.int64)[:, None] * x_stride
    weight_at = weight + column.to(tl.int64)[:, None] * INPUTS
    to = row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    start, stop = 0, INPUTS
    if DIVIDED:
        start = tl.program_id(1) * PART
        stop = tl.minimum(start + PART, INPUTS)
        to += tl.program_id(1).to(tl.int64) * rows * OUTPUTS
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for part in range(start, stop, PART):
        summed = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        for first in range(part, tl.minimum(part + PART, INPUTS), STEP):
            at = first + tl.arange(0, STEP)
            inside = (at < INPUTS)[None, :]
            left = tl.load(x_at + at[None, :], mask=here[:, None] & inside, other=0.0)
            right = tl.load(weight_at + at[None, :], mask=there[:, None] & inside, other=0.0)
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            summed = tl.dot(left, tl.trans(right), summed, input_precision="ieee")
        total += summed
    if BIASED and not DIVIDED:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The sums that ``multiply_rows`` makes undivided: grid ``(rows * OUTPUTS / BLOCK,)``.

    ``parts`` is float32 ``[PARTS, rows, OUTPUTS]``, ``out [rows, OUTPUTS]``.
    """
    begin(DEPENDENT)
    numbers = rows.to(tl.int64) * OUTPUTS
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
    total = tl.full([BLOCK], 0.0, tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * numbers + at, mask=mask, other=0.0)
    if BIASED:
        total += tl.load(bias + at % OUTPUTS, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def part_inputs(inputs: int, outputs: int, tile: ProductTile) -> int:
    """The inputs of a part, a multiple of the tile's step, for a weight of that shape."""
    columns = triton.cdiv(outputs, tile.columns)
    parts = max(1, min(_MOST_PARTS, _PROGRAMS // columns, inputs // _PART_INPUTS))
    return triton.cdiv(triton.cdiv(inputs, parts), tile.step) * tile.step


def steady_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [T, inputs]`` times ``weight [outputs, inputs]`` plus ``bias``, a new ``[T, outputs]``.

    Each row's bits are those that it gets alone. All are of one floating type; rows of ``x`` and
    the others are contiguous: ``ValueError``.
    """
    outputs, inputs = weight.shape
    if x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1 or x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; it must be "
            f"{weight.dtype} (T, {inputs}), contiguous within a row"
        )
    if not weight.is_contiguous():
        raise ValueError(f"weight has strides {weight.stride()}; it must be contiguous")
    upcast = INTERPRETED and x.dtype != torch.float32
    made = torch.float32 if upcast else x.dtype
    out = torch.empty((len(x), outputs), dtype=made, device=x.device)
    tile = product_tile(x.dtype.itemsize)
    grid = triton.cdiv(len(x), tile.rows) * triton.cdiv(outputs, tile.columns)
    part = part_inputs(inputs, outputs, tile)
    parts = triton.cdiv(inputs, part)
    divided = parts > 1 and grid < _DIVIDED_BELOW
    given = weight if bias is None else bias
    if grid:
        to = out
        if divided:
            to = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
        with on(x.device):
            multiply_rows[(grid, parts if divided else 1)](
                x, weight, given, to, len(x), x.stride(0),
                INPUTS=inputs, OUTPUTS=outputs, ROWS=tile.rows, COLUMNS=tile.columns,
                STEP=tile.step, PART=part, DIVIDED=divided, BIASED=bias is not None,
                UPCAST=upcast, num_warps=tile.warps, num_stages=tile.stages,
                **dependent(x.device),
            )  # fmt: skip
            if divided:
                add_parts[(triton.cdiv(out.numel(), _ADDED),)](
                    to, given, out, len(x),
                    OUTPUTS=outputs, PARTS=parts, BLOCK=_ADDED, BIASED=bias is not None,
                    num_warps=4, **dependent(x.device),
                )  # fmt: skip
    return out.to(x.dtype)
