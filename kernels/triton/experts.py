"""The experts of a layer on a GPU: rows grouped by the experts that they have chosen.

The pairs of a row and an expert are sorted by expert and cut into blocks of rows of one expert. One
kernel multiplies each block by its expert's gate and up and applies the gate, another multiplies
by its down and weighs; a row's results are then added in the order of its choices. No expert is
read that no row has chosen, nothing is added atomically, and all shapes follow from the number of
rows: a step with experts can be captured in a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice.kernels.schedule.tiles import expert_tile
from coppice.kernels.triton.base import INTERPRETED, on
from coppice.kernels.triton.dependent import begin, dependent


@triton.jit(do_not_specialize=["num_blocks"])
def gate_experts(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    x_stride: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BIASED: tl.constexpr,
    BOUNDED: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """``act(gate) * up`` of a block's rows, COLUMNS of them: grid ``(blocks * column tiles,)``.

    ``weight [experts, 2 INNER, HIDDEN]`` has gate before up. ``blocks`` int32 ``[n, 3]``: expert,
    or -1 for none, first pair and end of pairs in ``order`` int64 ``[P]``, which has the number of
    each pair. ``out [P, INNER]`` is in that order. BOUNDED: ``(up + 1) * gate * sigmoid(alpha *
    gate)``, with ``gate`` up to ``limit`` and ``up`` from ``-limit`` to it.
    """
    begin(DEPENDENT)
    block = blocks + tl.program_id(0) % num_blocks * 3
    expert = tl.load(block)
    if expert < 0:
        return
    pair = tl.load(block + 1) + tl.arange(0, ROWS)
    here = pair < tl.load(block + 2)
    column = tl.program_id(0) // num_blocks * COLUMNS + tl.arange(0, COLUMNS)
    there = column < INNER
    row = tl.load(order + pair, mask=here, other=0) // CHOSEN
    x_at = x + row[:, None] * x_stride
    start = expert.to(tl.int64) * (2 * INNER) + column
    gate_at = weight + start[:, None] * HIDDEN
    up_at = weight + (start + INNER)[:, None] * HIDDEN
    gate = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    up = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(0, HIDDEN, STEP):
        at = first + tl.arange(0, STEP)
        inside = (at < HIDDEN)[None, :]
        left = tl.load(x_at + at[None, :], mask=here[:, None] & inside, other=0.0)
        mask = there[:, None] & inside
        right = tl.load(gate_at + at[None, :], mask=mask, other=0.0)
        other = tl.load(up_at + at[None, :], mask=mask, other=0.0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
            other = other.to(tl.float32)
        gate = tl.dot(left, tl.trans(right), gate, input_precision="ieee")
        up = tl.dot(left, tl.trans(other), up, input_precision="ieee")
    if BIASED:
        gate += tl.load(bias + start, mask=there, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + start + INNER, mask=there, other=0.0).to(tl.float32)[None, :]
    if BOUNDED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        made = up * gate / (1.0 + tl.exp(-gate * alpha))
    else:
        made = gate / (1.0 + tl.exp(-gate)) * up
    to = out + pair.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(to, made.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def weigh_experts(
    active: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Each pair's result times its share: grid ``(blocks * column tiles,)``.

    ``active [P, INNER]`` is in the order of ``order``; ``weight [experts, HIDDEN, INNER]``;
    ``shares`` float32 ``[P]`` and ``out [P, HIDDEN]`` are in the order of the pairs' numbers.
    """
    begin(DEPENDENT)
    block = blocks + tl.program_id(0) % num_blocks * 3
    expert = tl.load(block)
    if expert < 0:
        return
    pair = tl.load(block + 1) + tl.arange(0, ROWS)
    here = pair < tl.load(block + 2)
    column = tl.program_id(0) // num_blocks * COLUMNS + tl.arange(0, COLUMNS)
    there = column < HIDDEN
    active_at = active + pair.to(tl.int64)[:, None] * INNER
    start = expert.to(tl.int64) * HIDDEN + column
    weight_at = weight + start[:, None] * INNER
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(0, INNER, STEP):
        at = first + tl.arange(0, STEP)
        inside = (at < INNER)[None, :]
        left = tl.load(active_at + at[None, :], mask=here[:, None] & inside, other=0.0)
        right = tl.load(weight_at + at[None, :], mask=there[:, None] & inside, other=0.0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + start, mask=there, other=0.0).to(tl.float32)[None, :]
    number = tl.load(order + pair, mask=here, other=0)
    total *= tl.load(shares + number, mask=here, other=0.0)[:, None]
    to = out + number[:, None] * HIDDEN + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=here[:, None] & there[None, :])


def blocks_of(chosen: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of ``chosen [T, n]`` sorted by expert, int64 ``[T n]``, and their blocks.

    Blocks are int32 ``[m, 3]``: expert, or -1, first pair and end of pairs, of at most ``rows``.
    m depends on the shapes alone, and nothing is read back from the device. O(T n experts).
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = (flat[:, None] == torch.arange(experts, device=flat.device)).sum(0)
    needed = (counts + rows - 1) // rows
    ends, upto = counts.cumsum(0), needed.cumsum(0)
    # Each expert fills all of its blocks but the last one, and none has less than one pair.
    most = min(len(flat), (len(flat) + experts * (rows - 1)) // rows)
    number = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(upto, number, right=True)
    mine = expert.clamp(max=experts - 1)
    first = (ends - counts)[mine] + (number - (upto - needed)[mine]) * rows
    end = torch.minimum(first + rows, ends[mine])
    expert = torch.where(expert < experts, expert, -1)
    return order, torch.stack((expert, first, end), dim=1).int()


def mix_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    gate: tuple[float, float] | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """The sum of the chosen experts' results of each row, weighted; a new tensor like ``x``.

    ``x [T, hidden]``; ``chosen`` int64 and ``shares`` float32 ``[T, n]``; ``gate_up [experts,
    2 inner, hidden]``, ``down [experts, hidden, inner]`` and biases ``[experts, width]``, all of
    the type of ``x``, contiguous: ``ValueError``. ``gate``: alpha and limit of a bounded gate; None
    for SiLU. ``deterministic``: one tile for any number of rows, so that a row's bits are those
    that it gets alone.
    """
    experts, width, hidden = gate_up.shape
    inner = width // 2
    if tuple(down.shape) != (experts, hidden, inner) or x.shape[1:] != (hidden,):
        raise ValueError(
            f"x is {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)}; "
            "they must be (T, hidden), (experts, 2 inner, hidden) and (experts, hidden, inner)"
        )
    if x.stride(1) != 1 or not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("rows of x, gate_up and down must be contiguous")
    rows, n = chosen.shape
    pairs = rows * n
    if not pairs:
        return torch.zeros_like(x)
    tile = expert_tile(x.dtype.itemsize, pairs / experts, deterministic=deterministic)
    order, blocks = blocks_of(chosen, experts, tile.rows)
    upcast = INTERPRETED and x.dtype != torch.float32
    made = torch.float32 if upcast else x.dtype
    active = torch.empty((pairs, inner), dtype=made, device=x.device)
    results = torch.empty((pairs, hidden), dtype=made, device=x.device)
    alpha, limit = gate or (0.0, 0.0)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **dependent(x.device)}
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step, "UPCAST": upcast}
    with on(x.device):
        gate_experts[(len(blocks) * triton.cdiv(inner, tile.columns),)](
            x, gate_up, gate_up if gate_up_bias is None else gate_up_bias, active, order, blocks,
            len(blocks), x.stride(0), alpha, limit,
            CHOSEN=n, HIDDEN=hidden, INNER=inner, BIASED=gate_up_bias is not None,
            BOUNDED=gate is not None, **sizes, **options,
        )  # fmt: skip
        weigh_experts[(len(blocks) * triton.cdiv(hidden, tile.columns),)](
            active, down, down if down_bias is None else down_bias, shares.flatten(), results,
            order, blocks, len(blocks),
            HIDDEN=hidden, INNER=inner, BIASED=down_bias is not None, **sizes, **options,
        )  # fmt: skip
    return results.view(rows, n, hidden).sum(1, dtype=torch.float32).to(x.dtype)
