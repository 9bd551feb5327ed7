"""The Triton kernel that merges the partial results of attention.

A row whose keys several programs walked has one from each, with its log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coppice.kernels.triton.dependent import begin


@triton.jit
def _merge_row(
    row: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    head: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One head of one row, from ``count`` slots from ``first`` on."""
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    accumulator = tl.full([BLOCK_D], 0.0, tl.float32)
    peak = -float("inf")
    total = 0.0
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        real = part < count
        at = (first + part).to(tl.int64) * HEADS + head
        log = tl.load(partial_lse + at, mask=real, other=float("-inf"))
        parts = tl.load(
            partial_out + at[:, None] * HEAD_DIM + d[None, :],
            mask=real[:, None] & in_head[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(log, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(log - base)
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 0)
        accumulator = accumulator * shrink + tl.sum(parts * weights[:, None], 0)
        peak = new_peak
    to = row.to(tl.int64) * HEADS + head
    tl.store(lse + to, (peak + tl.log2(total)) * 0.6931471805599453)
    tl.store(out + to * HEAD_DIM + d, (accumulator / total).to(out.dtype.element_ty), mask=in_head)


@triton.jit
def merge_partials(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    merges: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The partial results of each row and head, in the order of their slots: any grid of one axis.

    ``merges`` int32 ``[rows, 3]``: row, first slot, slots; of these ``count`` int32 ``[1]`` are
    merged. A program takes every so many of the rows and heads. A graph has room for more rows
    than a step merges.

    Weighing by log-sum-exp as in Milakov and Gimelshein 2018; the order is the same in every run,
    so the result is, bit for bit.
    """
    begin(DEPENDENT)
    number = tl.program_id(0)
    end = tl.load(count) * HEADS
    while number < end:
        merge = merges + number // HEADS * 3
        _merge_row(
            tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), number % HEADS, partial_out,
            partial_lse, out, lse, HEADS, HEAD_DIM, BLOCK_D, PARTS,
        )  # fmt: skip
        number += tl.num_programs(0)
