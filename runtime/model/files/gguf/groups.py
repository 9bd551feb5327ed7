"""Weights of 4 bits in GGUF files as they are, in the form of products in groups.

A block has its scales, as float16 or as small integers with a float16 for eight of them, and its
levels, two in a byte.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from coppice.kernels.cpu.layer.matmul.grouped import Grouped, packed_nibbles

# Numbers of a group in all of them.
_GROUP = 32


def _levels(halves: torch.Tensor, rows: int) -> torch.Tensor:
    """Bytes `[groups or pairs of groups, half a group each]`: low halves come first."""
    numbers = torch.stack((halves & 15, halves >> 4), 1)
    return packed_nibbles(numbers.view(rows, -1))


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Pairs of bytes as float16, in float32."""
    return data.contiguous().view(torch.float16).float()


def _q4_0(blocks: torch.Tensor, rows: int) -> Grouped:
    return Grouped(_levels(blocks[:, 2:], rows), _halves(blocks[:, :2]).view(rows, -1), None, 4)


def _q4_1(blocks: torch.Tensor, rows: int) -> Grouped:
    scales = _halves(blocks[:, :4]).view(rows, -1, 2)
    return Grouped(_levels(blocks[:, 4:], rows), scales[..., 0], scales[..., 1], 4)


def _q4_k(blocks: torch.Tensor, rows: int) -> Grouped:
    """Eight groups in a block; scales and minima have 6 bits, of which the last four share two."""
    first, last = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    low, middle, high = blocks[:, 4:16].int().split(4, 1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), 1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), 1)
    levels = _levels(blocks[:, 16:].reshape(-1, _GROUP), rows)
    return Grouped(levels, (first * scales).view(rows, -1), (-last * minima).view(rows, -1), 4)


#: How the blocks of a type are taken apart, and how many bytes one has.
FOUR_BITS: dict[str, tuple[int, Callable[[torch.Tensor, int], Grouped]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q4_K": (144, _q4_k),
}  # fmt: skip


def grouped(data: torch.Tensor, kind: str, rows: int) -> Grouped:
    """A weight of `rows` rows from its bytes; `kind` is one of `FOUR_BITS`."""
    size, take = FOUR_BITS[kind]
    return take(data.view(-1, size), rows)
