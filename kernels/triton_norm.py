"""RMSNorm as one Triton kernel: it reads its input once and writes its output once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def norm_rows(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One head of one row: grid ``(T * HEADS,)``. ``weight`` is ``[WEIGHT_ROWS, WIDTH]``."""
    program = tl.program_id(0)
    row, head = (program // HEADS).to(tl.int64), program % HEADS
    d = tl.arange(0, BLOCK)
    mask = d < WIDTH
    values = tl.load(x + row * x_stride + head * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    by = tl.load(weight + (head % WEIGHT_ROWS) * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    result = (values * inverse * by).to(out.dtype.element_ty)
    tl.store(out + program.to(tl.int64) * WIDTH + d, result, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32, as a new tensor.

    ``x`` is ``[T, width]`` or ``[T, heads, width]``, contiguous but for its rows; ``weight`` is
    ``[width]`` or ``[heads, width]``. Zhang and Sennrich 2019.
    """
    heads = x.shape[1] if x.dim() == 3 else 1
    width = x.shape[-1]
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != width):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; it must be (T, width) or "
            "(T, heads, width), contiguous within a row"
        )
    if tuple(weight.shape) not in ((width,), (heads, width)) or not weight.is_contiguous():
        raise ValueError(
            f"weight is {tuple(weight.shape)}; it must be ({width},) or ({heads}, {width}), "
            "contiguous"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        block = triton.next_power_of_2(width)
        norm_rows[(len(x) * heads,)](
            x, weight, out, x.stride(0), eps,
            HEADS=heads, WEIGHT_ROWS=weight.numel() // width, WIDTH=width, BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip
    return out
