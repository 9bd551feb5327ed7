"""Decodes weights of few bits: integers packed into words of 32 bits, with scales and zero points.

Lin et al. 2023 (AWQ) and Frantar et al. 2022 (GPTQ), in the forms of AutoAWQ and AutoGPTQ; the
forms of the package compressed-tensors; floats of 8 bits with scales of blocks (DeepSeek 2024).
Decoded weights are float32 `[out, in]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from coppice.kernels.cpu.layer.matmul.grouped import BLOCK, Grouped, packed_nibbles

# The places of a word's eight numbers in AutoAWQ's order.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from 0 on of words `[n, m]`, the lowest bits first: `[n, m * 32 / bits]`, int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.reshape(len(words), -1)


class Levels(NamedTuple):
    """A weight as integers from 0 on.

    Attributes:
        numbers: int32 `[out, in]`, below `2 ** bits`.
        middles: what stands for zero, int32 `[out, groups]`; None: half of all levels.
        scales: float `[out, groups]`.
        order: the group of each input, int64 `[in]`; None: groups follow each other.
        bits: of a number.
        declared: inputs of a group, as the checkpoint's config says; None: it does not.
    """

    numbers: torch.Tensor
    middles: torch.Tensor | None
    scales: torch.Tensor
    order: torch.Tensor | None
    bits: int
    declared: int | None = None

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError where the parts are not those of a weight of that shape."""
        if self.numbers.shape != shape:
            raise ValueError(f"they make a weight of {tuple(self.numbers.shape)}")
        zeros = self.scales if self.middles is None else self.middles
        if len(self.scales) != shape[0] or zeros.shape != self.scales.shape:
            raise ValueError(
                f"there are scales of {tuple(self.scales.shape)} and zero points of "
                f"{tuple(zeros.shape)} for {shape[0]} outputs"
            )
        if self.order is None:
            group_of(shape[1], self.scales.shape[1], self.declared)

    @property
    def group(self) -> int:
        """Inputs of a group where groups follow each other; the last one may have fewer.

        Raises ValueError where neither the config nor the number of scales tells it.
        """
        return group_of(self.numbers.shape[1], self.scales.shape[1], self.declared)

    def decoded(self) -> torch.Tensor:
        """The weight itself."""
        order = self._in_turn() if self.order is None else self.order
        middle: torch.Tensor | int = 1 << (self.bits - 1)
        if self.middles is not None:
            middle = self.middles[:, order]
        return (self.numbers - middle).float().mul_(self.scales.float()[:, order])

    def grouped(self) -> Grouped | None:
        """The same in the form of products in groups; None where it does not fit that."""
        inputs, groups = self.numbers.shape[1], self.scales.shape[1]
        if self.bits not in (4, 8) or inputs % groups or inputs // groups % BLOCK:
            return None
        order = torch.arange(inputs) // (inputs // groups)
        if not torch.equal(self._in_turn() if self.order is None else self.order, order):
            return None
        levels, factors, offsets = self.numbers.to(torch.uint8), self.scales.float(), None
        if self.middles is not None and (self.middles != 1 << (self.bits - 1)).any():
            offsets = -self.middles * factors
        return Grouped(
            packed_nibbles(levels) if self.bits == 4 else levels, factors, offsets, self.bits
        )

    def _in_turn(self) -> torch.Tensor:
        """The group of each input where groups follow each other."""
        return torch.arange(self.numbers.shape[1]) // self.group


def group_of(inputs: int, groups: int, declared: int | None) -> int:
    """Inputs of each of so many groups, of which the last may have fewer.

    Raises ValueError where they are neither of the `declared` size nor of one that divides.
    """
    if declared is not None and -(-inputs // declared) == groups:
        return declared
    if not groups or inputs % groups:
        said = "no group_size" if declared is None else f"group_size {declared}"
        raise ValueError(
            f"{groups} groups do not divide {inputs} inputs, and the config has {said}"
        )
    return inputs // groups


def awq(
    words: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    *,
    group: int | None = None,
) -> Levels:
    """`words [in, out / 8]`, `zeros [groups, out / 8]`, `scales [groups, out]`."""

    def ordered(packed: torch.Tensor) -> torch.Tensor:
        numbers = unpacked(packed, 4).view(len(packed), -1, 8)
        return numbers[..., list(_AWQ)].reshape(len(packed), -1).t()

    middles = None if zeros is None else ordered(zeros)
    return Levels(ordered(words), middles, scales.t(), None, 4, group)


def gptq(
    words: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    order: torch.Tensor | None,
    *,
    bits: int,
    zeros_less_one: bool,
    group: int | None = None,
) -> Levels:
    """`words [in * bits / 32, out]`, `zeros [groups, out * bits / 32]`, `scales [groups, out]`.

    `order [in]` is the group of each input; None: they follow each other.
    """
    middles = None if zeros is None else unpacked(zeros, bits).t() + int(zeros_less_one)
    order = None if order is None else order.long()
    return Levels(unpacked(words.t().contiguous(), bits), middles, scales.t(), order, bits, group)


def packed_rows(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    *,
    shape: tuple[int, int],
    bits: int,
    group: int | None = None,
) -> Levels:
    """compressed-tensors' `words [out, in * bits / 32]` and `scales [out, groups]`, of `shape`.

    `zeros [out * bits / 32, groups]` are packed along the rows.
    """
    rows, columns = shape
    middles = None if zeros is None else unpacked(zeros.t().contiguous(), bits)[:, :rows].t()
    order = None if order is None else order.long()
    return Levels(unpacked(words, bits)[:, :columns], middles, scales, order, bits, group)


def scaled(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    block: tuple[int, int],
    group: int | None = None,
) -> torch.Tensor:
    """8-bit `numbers [out, in]` with a scale for all, each row, groups of columns, or blocks."""
    rows, columns = numbers.shape
    if scales.numel() == 1:
        middle = 0.0 if zeros is None else zeros.float().reshape(())
        return (numbers.float() - middle) * scales.float().reshape(())
    if scales.dim() == 1:
        scales = scales[:, None]
    if len(scales) == rows:
        return _by_columns(numbers, scales, zeros, group)
    height, width = block
    spread = scales.float().repeat_interleave(height, 0)[:rows]
    return numbers.float().mul_(spread.repeat_interleave(width, 1)[:, :columns])


def _by_columns(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int | None
) -> torch.Tensor:
    """Numbers with scales `[rows, groups]` of groups of columns."""
    columns = numbers.shape[1]
    order = torch.arange(columns) // group_of(columns, scales.shape[1], group)
    values = numbers.float()
    if zeros is not None:
        values -= zeros.float().reshape(len(values), -1)[:, order]
    return values.mul_(scales.float()[:, order])
