"""Decodes weights of few bits: integers packed into words of 32 bits, with scales and zero points.

Lin et al. 2023 (AWQ) and Frantar et al. 2022 (GPTQ), in the forms of AutoAWQ and AutoGPTQ; the
forms of the package compressed-tensors; floats of 8 bits with scales of blocks (DeepSeek 2024).
All functions return float32 `[out, in]`.
"""

from __future__ import annotations

import torch

# The places of a word's eight numbers in AutoAWQ's order.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from 0 on of words `[n, m]`, the lowest bits first: `[n, m * 32 / bits]`, int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.reshape(len(words), -1)


def awq(words: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor) -> torch.Tensor:
    """`words [in, out / 8]`, `zeros [groups, out / 8]`, `scales [groups, out]`."""

    def ordered(packed: torch.Tensor) -> torch.Tensor:
        numbers = unpacked(packed, 4).view(len(packed), -1, 8)
        return numbers[..., list(_AWQ)].reshape(len(packed), -1)

    numbers, groups = ordered(words), len(scales)
    middle: torch.Tensor | int = 8 if zeros is None else ordered(zeros)[:, None]
    grouped = numbers.view(groups, -1, numbers.shape[1])
    return ((grouped - middle).float() * scales.float()[:, None]).view(numbers.shape).t()


def gptq(
    words: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    order: torch.Tensor | None,
    *,
    bits: int,
    zeros_less_one: bool,
) -> torch.Tensor:
    """`words [in * bits / 32, out]`, `zeros [groups, out * bits / 32]`, `scales [groups, out]`.

    `order [in]` is the group of each input; None: they follow each other.
    """
    numbers = unpacked(words.t().contiguous(), bits)  # [out, in]
    inputs, groups = numbers.shape[1], len(scales)
    if order is None:
        order = torch.arange(inputs) // (-(-inputs // groups))
    order = order.long()
    if zeros is None:
        middle = torch.full((groups, len(numbers)), 1 << (bits - 1))
    else:
        middle = unpacked(zeros, bits) + int(zeros_less_one)
    return (numbers - middle.t()[:, order]).float() * scales.float().t()[:, order]


def packed_rows(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    *,
    shape: tuple[int, int],
    bits: int,
) -> torch.Tensor:
    """compressed-tensors' `words [out, in * bits / 32]` and `scales [out, groups]`, of `shape`.

    `zeros [out * bits / 32, groups]` are packed along the rows.
    """
    rows, columns = shape
    offset = 1 << (bits - 1)
    numbers = unpacked(words, bits)[:, :columns] - offset
    middle = None
    if zeros is not None:
        middle = unpacked(zeros.t().contiguous(), bits)[:, :rows].t() - offset
    return _by_columns(numbers, scales, middle, order)


def scaled(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    block: tuple[int, int],
) -> torch.Tensor:
    """8-bit `numbers [out, in]` with a scale for all, each row, groups of columns, or blocks."""
    rows, columns = numbers.shape
    if scales.numel() == 1:
        middle = 0.0 if zeros is None else zeros.float().reshape(())
        return (numbers.float() - middle) * scales.float().reshape(())
    if scales.dim() == 1:
        scales = scales[:, None]
    if len(scales) == rows:
        return _by_columns(numbers, scales, zeros, None)
    height, width = block
    spread = scales.float().repeat_interleave(height, 0)[:rows]
    return numbers.float().mul_(spread.repeat_interleave(width, 1)[:, :columns])


def _by_columns(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
) -> torch.Tensor:
    """Numbers with scales `[rows, groups]` of groups of columns."""
    columns, groups = numbers.shape[1], scales.shape[1]
    if order is None:
        order = torch.arange(columns) // (-(-columns // groups))
    order = order.long()
    values = numbers.float()
    if zeros is not None:
        values -= zeros.float().reshape(len(values), -1)[:, order]
    return values.mul_(scales.float()[:, order])
