"""Rows to 8-bit floats as one Triton kernel: it reads its input once and writes a byte a number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice.kernels.triton_cache import E4M3_MAX, round_to_e4m3


@triton.jit
def quantize_rows(
    x: tl.tensor,
    levels: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One row: grid ``(T,)``. Its largest number goes to the largest of the type."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < WIDTH
    values = tl.load(x + row * x_stride + d, mask=mask, other=0.0).to(tl.float32)
    # Nothing is clamped: what division leaves above the largest number rounds down to it. The sum
    # is 0 but for a row that is not finite, whose result must be no number: a maximum skips NaN.
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / E4M3_MAX + tl.sum(values * 0.0, 0)
    tl.store(levels + row * WIDTH + d, round_to_e4m3(values / scale, INTERPRETED), mask=mask)
    tl.store(scales + row, scale)


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [T, width]`` as e4m3 ``[T, width]`` and what each row is to be multiplied by, ``[T, 1]``.

    The scales are float32. Rows must be contiguous: ``ValueError``.
    """
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; it must be (T, width), "
            "contiguous within a row"
        )
    levels = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        block = triton.next_power_of_2(x.shape[1])
        quantize_rows[(len(x),)](
            x, levels, scales, x.stride(0), WIDTH=x.shape[1], BLOCK=block,
            INTERPRETED=not isinstance(quantize_rows, triton.JITFunction),
            num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip
    return levels, scales
