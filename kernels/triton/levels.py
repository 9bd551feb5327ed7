"""The Triton kernels around FlashInfer's: page ids for its launches, the merge of their results.

FlashInfer wants the page ids of a launch in one line. They are gathered from the page tables of the
step where these are, so that no id is sent twice. Its own kernel that merges two partial results
takes 16-bit numbers, rounds to them each time, and has a block for all heads of a row, which more
than 64 heads of 128 exceed; ours merges all levels at once, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice.kernels.triton.dependent import begin, dependent

# Page ids that a program gathers.
_GATHERED = 512

# The most heads of a row that a program merges.
_MERGED_HEADS = 16


def gather_runs(
    tables: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    begins: torch.Tensor,
    pages: torch.Tensor,
    longest: int,
) -> None:
    """Launches ``gather_pages`` for runs of at most ``longest`` entries."""
    gather_pages[(len(starts), triton.cdiv(longest, _GATHERED))](
        tables, starts, counts, begins, pages,
        BLOCK=_GATHERED, num_warps=4, **dependent(pages.device),
    )  # fmt: skip


def merge_parts(
    parts: torch.Tensor,
    parts_lse: torch.Tensor,
    bounds: torch.Tensor,
    places: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches ``merge_levels``: results ``[T, Hq, D]``, and natural log-sum-exps ``[T, Hq]``.

    ``group``: query heads of a KV head.
    """
    levels, rows, heads, head_dim = parts.shape
    out, lse = torch.empty_like(parts[0]), torch.empty_like(parts_lse[0])
    block = min(triton.next_power_of_2(heads), _MERGED_HEADS)
    merge_levels[(rows, triton.cdiv(heads, block))](
        parts, parts_lse, bounds, bounds if places is None else places,
        lse if v_scales is None else v_scales, out, lse, rows, levels,
        HEADS=heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_H=block,
        BLOCK_D=triton.next_power_of_2(head_dim), PLACED=places is not None,
        SCALED=v_scales is not None, num_warps=4, **dependent(parts.device),
    )  # fmt: skip
    return out, lse


@triton.jit
def gather_pages(
    tables: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    begins: tl.tensor,
    pages: tl.tensor,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """``counts`` entries of ``tables`` from ``starts`` on, to ``pages`` from ``begins`` on.

    All int32, the first three of one length; grid ``(runs, longest / BLOCK)``.
    """
    begin(DEPENDENT)
    run = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.load(counts + run)
    found = tl.load(tables + tl.load(starts + run) + at, mask=mask)
    tl.store(pages + tl.load(begins + run) + at, found, mask=mask)


@triton.jit(do_not_specialize=["rows", "levels"])
def merge_levels(
    parts: tl.tensor,
    parts_lse: tl.tensor,
    bounds: tl.tensor,
    places: tl.tensor,
    v_scales: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    levels: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PLACED: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """BLOCK_H heads of one row from its partial results: grid ``(rows, HEADS / BLOCK_H)``.

    ``parts [levels, rows, HEADS, HEAD_DIM]`` and ``parts_lse`` float32 ``[levels, rows, HEADS]``,
    to base 2, are in the order of places; level n has those from ``bounds[n, 0]`` to ``bounds[n,
    1]``, int32, the first level all of them. PLACED: row r is at ``places[r]``, int64, else at r.
    SCALED: results are multiplied by the scale of their KV head. ``lse`` is natural.
    """
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    place = row
    if PLACED:
        place = tl.load(places + row)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    real = head < HEADS
    mask = real[:, None] & (d < HEAD_DIM)[None, :]
    accumulator = tl.full([BLOCK_H, BLOCK_D], 0.0, tl.float32)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.full([BLOCK_H], 0.0, tl.float32)
    for level in range(levels):
        inside = (place >= tl.load(bounds + 2 * level)) & (place < tl.load(bounds + 2 * level + 1))
        at = (tl.cast(level, tl.int64) * rows + place) * HEADS + head
        log = tl.load(parts_lse + at, mask=real & inside, other=float("-inf"))
        seen = log != float("-inf")  # else the partial result is that of no keys
        part = tl.load(
            parts + at[:, None] * HEAD_DIM + d[None, :], mask=mask & seen[:, None], other=0.0
        ).to(tl.float32)
        new_peak = tl.maximum(peak, log)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(log - base)
        shrink = tl.exp2(peak - base)
        accumulator = accumulator * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)
    result = accumulator / total[:, None]
    if SCALED:
        result *= tl.load(v_scales + head // GROUP, mask=real, other=0.0)[:, None]
    to = row * HEADS + head
    tl.store(lse + to, (peak + tl.log2(total)) * 0.6931471805599453, mask=real)
    tl.store(out + to[:, None] * HEAD_DIM + d[None, :], result.to(out.dtype.element_ty), mask=mask)
