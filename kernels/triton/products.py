"""A linear projection on a GPU whose result for a row does not depend on the rest of the batch.

Libraries choose a kernel by the number of rows, and each adds up in another order: a token gets
other bits alone than in a batch, and other bits in a prefill than in the chunk after a hit. This
kernel has a single tile and adds the inputs in order, for any number of rows, as ``deterministic``
engines need it. It is slower than the best kernel for each number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice.kernels.schedule.tiles import product_tile
from coppice.kernels.triton.base import INTERPRETED, on


@triton.jit
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
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """A tile ``[ROWS, COLUMNS]`` of ``x weight^T + bias``: grid ``(row tiles * column tiles,)``.

    The row tiles of the same columns lie side by side, so that the weight is read once. ``x`` is
    ``[rows, INPUTS]``, ``weight [OUTPUTS, INPUTS]``, ``out [rows, OUTPUTS]``; sums are float32.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row < rows, column < OUTPUTS
    x_at = x + row.to(tl.int64)[:, None] * x_stride
    weight_at = weight + column.to(tl.int64)[:, None] * INPUTS
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(0, INPUTS, STEP):
        at = first + tl.arange(0, STEP)
        inside = (at < INPUTS)[None, :]
        left = tl.load(x_at + at[None, :], mask=here[:, None] & inside, other=0.0)
        right = tl.load(weight_at + at[None, :], mask=there[:, None] & inside, other=0.0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


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
    if grid:
        with on(x.device):
            multiply_rows[(grid,)](
                x, weight, weight if bias is None else bias, out, len(x), x.stride(0),
                INPUTS=inputs, OUTPUTS=outputs, ROWS=tile.rows, COLUMNS=tile.columns,
                STEP=tile.step, BIASED=bias is not None, UPCAST=upcast,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return out.to(x.dtype)
