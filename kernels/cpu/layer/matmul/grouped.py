"""Weights in groups of inputs: levels of 4 or 8 bits, and for each group a factor and an offset.

What people publish for CPUs has this form: a weight is ``factor * level + offset``, and the 32 to
128 neighbours of a group share both (AWQ: Lin et al. 2023, section 4; GPTQ: Frantar et al. 2022;
GGUF's Q4 types). It is kept here as it comes from a file, and is made from float weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

#: Groups are multiples of so many inputs.
BLOCK = 32
# Numbers at a time while a weight is rounded: what the second-level cache holds.
_TOGETHER = 1 << 15
# Shares of the largest number that are tried as the end of the levels, besides the whole.
_TRIED = (0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """A weight ``[N, K]``, of which ``group`` neighbours in a row share a factor and an offset.

    Attributes:
        levels: uint8 ``[N, K]``; of 4 bits uint8 ``[N, K / 2]``, see `packed_nibbles`.
        factors: float ``[N, K / group]``.
        offsets: float of the same shape; None: the middle level, 8 or 128, is zero.
        bits: of a level, 4 or 8.
    """

    levels: torch.Tensor
    factors: torch.Tensor
    offsets: torch.Tensor | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, stored = self.levels.shape
        return rows, stored * 8 // self.bits

    @property
    def group(self) -> int:
        """Neighbours that share a factor."""
        return self.shape[1] // self.factors.shape[1]

    @property
    def middle(self) -> int:
        """The level of zero where there are no offsets."""
        return 1 << (self.bits - 1)

    def __getitem__(self, rows: slice | torch.Tensor) -> Grouped:
        """Some of its rows."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, levels=self.levels[rows], factors=self.factors[rows], offsets=offsets)

    def numbers(self) -> torch.Tensor:
        """The weight itself, float32 ``[N, K]``."""
        levels = self.levels if self.bits == 8 else unpacked_nibbles(self.levels)
        factors = self.factors.float().repeat_interleave(self.group, 1)
        if self.offsets is None:
            return (levels.float() - self.middle).mul_(factors)
        offsets = self.offsets.float().repeat_interleave(self.group, 1)
        return levels.float().mul_(factors).add_(offsets)


def packed_nibbles(levels: torch.Tensor) -> torch.Tensor:
    """Levels below 16, uint8 ``[N, K]``, two in a byte: ``[N, K / 2]``; 8 divides K.

    The low halves of four bytes have four inputs, their high halves the next four: the order in
    which products of four bytes take them.
    """
    fours = levels.unflatten(1, (-1, 2, 4))
    return (fours[:, :, 0] | (fours[:, :, 1] << 4)).flatten(1)


def unpacked_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """What ``packed_nibbles`` packed."""
    fours = packed.unflatten(1, (-1, 1, 4))
    return torch.cat((fours & 15, fours >> 4), 2).flatten(1)


def rounded(weight: torch.Tensor, bits: int, group: int = BLOCK) -> Grouped:
    """A float weight ``[N, K]`` in levels; ``group`` divides K. O(N K).

    Of 8 bits, the middle level is zero and the outermost one the largest number of a group. Of 4
    bits the levels reach from the least number of a group to the largest, or to a share of them if
    that makes the sum of squared errors smaller: a few outer numbers cost the others less then.
    """
    together = max(1, _TOGETHER // weight.shape[1])
    return joined([_rounded(part, bits, group) for part in weight.split(together)])


def _rounded(weight: torch.Tensor, bits: int, group: int) -> Grouped:
    x = weight.float().unflatten(1, (-1, group))
    if bits == 8:
        factors = x.abs().amax(2, keepdim=True).clamp_(min=1e-30).div_(127)
        levels = (x / factors).round_().add_(128).to(torch.uint8)
        return Grouped(levels.flatten(1), factors[..., 0], None, 8)
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    best = torch.full_like(low, torch.inf)
    kept = torch.zeros_like(x), torch.zeros_like(low), torch.zeros_like(low)
    for share in (1.0, *_TRIED):
        middle, half = (high + low) / 2, (high - low) * (share / 2)
        offset, factor = middle - half, (half * (2 / 15)).clamp_(min=1e-30)
        levels = ((x - offset) / factor).round_().clamp_(0, 15)
        error = (levels * factor + offset - x).square_().sum(2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        kept = tuple(
            torch.where(better, new, old)
            for new, old in zip((levels, factor, offset), kept, strict=True)
        )  # type: ignore[assignment]
    levels, factor, offset = kept
    packed = packed_nibbles(levels.to(torch.uint8).flatten(1))
    return Grouped(packed, factor[..., 0], offset[..., 0], 4)


def joined(parts: list[Grouped]) -> Grouped:
    """Weights below each other, in one form that holds all of them without loss."""
    bits = max(part.bits for part in parts)
    group = min(part.group for part in parts)
    plain = all(part.offsets is None and part.bits == bits for part in parts)
    levels, factors, offsets = [], [], []
    for part in parts:
        times = part.group // group
        if part.group % group:
            raise ValueError(f"groups of {part.group} and {group} cannot stand in one projection")
        wide = part.bits == bits
        levels.append(part.levels if wide else unpacked_nibbles(part.levels))
        factors.append(part.factors.repeat_interleave(times, 1) if times > 1 else part.factors)
        if not plain:
            own = -part.middle * part.factors if part.offsets is None else part.offsets
            offsets.append(own.repeat_interleave(times, 1))
    return Grouped(
        torch.cat(levels), torch.cat(factors), None if plain else torch.cat(offsets), bits
    )
