"""The operations of a decoder layer beside products and attention, each as one Triton kernel.

They are the residual addition followed by RMSNorm, SiLU times up, and the conversion of rows to
8-bit floats, alone or as the end of one of the others. torch takes two to five kernels for each,
and every one reads and writes all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from coppice.kernels.triton.cache import E4M3_MAX, round_to_e4m3
from coppice.kernels.triton.dependent import begin, dependent

# Numbers of a row that a program of SiLU takes.
_SILU_BLOCK = 1024


@triton.jit
def _levels(values: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """A row of float32 as e4m3, and its scale: its largest number becomes the type's largest."""
    # Nothing is clamped: what division leaves above the largest number rounds down to it. The sum
    # is 0 but for a row that is not finite, whose result must be no number: a maximum skips NaN.
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / E4M3_MAX + tl.sum(values * 0.0, 0)
    return round_to_e4m3(values / scale, INTERPRETED), scale


@triton.jit
def norm_rows(
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    LEVELS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One head of one row: grid ``(T * HEADS,)``. ``weight`` is ``[WEIGHT_ROWS, WIDTH]``.

    ADDS: ``x += added`` first, rounded as it is stored. LEVELS: ``out`` is e4m3, with ``scales``,
    of what would be rounded to the type of ``x`` otherwise.
    """
    begin(DEPENDENT)
    program = tl.program_id(0)
    row, head = (program // HEADS).to(tl.int64), program % HEADS
    d = tl.arange(0, BLOCK)
    mask = d < WIDTH
    at = x + row * x_stride + head * WIDTH + d
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(added + program.to(tl.int64) * WIDTH + d, mask=mask, other=0.0)
        stored = (values + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(at, stored, mask=mask)
        values = stored.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    by = tl.load(weight + (head % WEIGHT_ROWS) * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    result = (values * inverse * by).to(x.dtype.element_ty)
    if LEVELS:
        result, scale = _levels(result.to(tl.float32), INTERPRETED)
        tl.store(scales + program, scale)
    tl.store(out + program.to(tl.int64) * WIDTH + d, result, mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32, as a new tensor.

    ``x`` is ``[T, width]`` or ``[T, heads, width]``, contiguous but for its rows; ``weight`` is
    ``[width]`` or ``[heads, width]``. With ``added``, contiguous and shaped like ``x``, it is the
    norm of ``x += added``, in place. Zhang and Sennrich 2019.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, weight, eps, added, out, None)
    return out


def rms_norm_e4m3(
    x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_e4m3(rms_norm(x, weight, eps, added))`` of ``x [T, width]``, in one kernel."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (T, width)")
    out, scales = _empty_levels(x.shape, x.device)
    _norm(x, weight, eps, added, out, scales)
    return out, scales


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    added: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
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
    if added is not None and (added.shape != x.shape or not added.is_contiguous()):
        raise ValueError(f"added is {tuple(added.shape)}; it must be {tuple(x.shape)}, contiguous")
    if len(x):
        block = triton.next_power_of_2(width)
        norm_rows[(len(x) * heads,)](
            x, x if added is None else added, weight, out, weight if scales is None else scales,
            x.stride(0), eps,
            HEADS=heads, WEIGHT_ROWS=weight.numel() // width, WIDTH=width, BLOCK=block,
            ADDS=added is not None, LEVELS=scales is not None, INTERPRETED=_interpreted(),
            num_warps=min(16, max(1, block // 256)), **dependent(x.device),
        )  # fmt: skip


def _empty_levels(shape: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Places for rows as e4m3, and for their scales."""
    levels = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=device)
    return levels, torch.empty((shape[0], 1), dtype=torch.float32, device=device)


def _interpreted() -> bool:
    return not isinstance(norm_rows, triton.JITFunction)


@triton.jit
def silu_mul_rows(
    gate_up: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """A part of one row: grid ``(T, WIDTH / BLOCK)``."""
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + d, result.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate | up [T, 2 W]``, contiguous, in float32; new, ``[T, W]``."""
    width = _check_gate_up(gate_up)
    out = torch.empty((len(gate_up), width), dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        block = min(_SILU_BLOCK, triton.next_power_of_2(width))
        silu_mul_rows[(len(gate_up), triton.cdiv(width, block))](
            gate_up, out, WIDTH=width, BLOCK=block, num_warps=max(1, block // 256),
            **dependent(gate_up.device),
        )  # fmt: skip
    return out


def _check_gate_up(gate_up: torch.Tensor) -> int:
    """W of ``gate | up [T, 2 W]``."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)} and strides {gate_up.stride()}; it must be "
            "(T, 2 W), contiguous"
        )
    return gate_up.shape[1] // 2


@triton.jit
def silu_mul_levels(
    gate_up: tl.tensor,
    levels: tl.tensor,
    scales: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One row, as ``silu_mul_rows`` and ``quantize_rows`` after it make it: grid ``(T,)``."""
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty)
    rounded, scale = _levels(result.to(tl.float32), INTERPRETED)
    tl.store(levels + row * WIDTH + d, rounded, mask=mask)
    tl.store(scales + row, scale)


def silu_mul_e4m3(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_e4m3(silu_mul(gate_up))``, in one kernel."""
    width = _check_gate_up(gate_up)
    levels, scales = _empty_levels((len(gate_up), width), gate_up.device)
    if len(gate_up):
        block = triton.next_power_of_2(width)
        silu_mul_levels[(len(gate_up),)](
            gate_up, levels, scales, WIDTH=width, BLOCK=block, INTERPRETED=_interpreted(),
            num_warps=min(16, max(1, block // 256)), **dependent(gate_up.device),
        )  # fmt: skip
    return levels, scales


@triton.jit
def quantize_rows(
    x: tl.tensor,
    levels: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One row: grid ``(T,)``."""
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < WIDTH
    values = tl.load(x + row * x_stride + d, mask=mask, other=0.0).to(tl.float32)
    rounded, scale = _levels(values, INTERPRETED)
    tl.store(levels + row * WIDTH + d, rounded, mask=mask)
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
    levels, scales = _empty_levels(x.shape, x.device)
    if len(x):
        block = triton.next_power_of_2(x.shape[1])
        quantize_rows[(len(x),)](
            x, levels, scales, x.stride(0), WIDTH=x.shape[1], BLOCK=block,
            INTERPRETED=_interpreted(),
            num_warps=min(16, max(1, block // 256)), **dependent(x.device),
        )  # fmt: skip
    return levels, scales
