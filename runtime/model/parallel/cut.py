"""Which part of a checkpoint's tensor a rank needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from coppice.kernels.cpu.layer.matmul.grouped import Grouped


@dataclass(frozen=True, slots=True)
class Cut:
    """Along dimension ``dim``, these ranges, one after the other."""

    dim: int
    ranges: tuple[range, ...]

    @property
    def length(self) -> int:
        """How long the part is along ``dim``."""
        return sum(map(len, self.ranges))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor: a view where it is one range."""
        parts = [tensor.narrow(self.dim, each.start, len(each)) for each in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def of_grouped(self, weight: Grouped) -> Grouped:
        """The part of a weight in groups, in groups that lie in it as a whole, without loss."""
        offsets = weight.offsets
        if self.dim == 0:
            return replace(
                weight,
                levels=self.of(weight.levels),
                factors=self.of(weight.factors),
                offsets=None if offsets is None else self.of(offsets),
            )
        borders = [each for found in self.ranges for each in (found.start, found.stop)]
        group = math.gcd(weight.group, *borders)
        times = weight.group // group
        scales = self._divided(group)
        return replace(
            weight,
            levels=self._divided(8 // weight.bits).of(weight.levels),
            factors=scales.of(weight.factors.repeat_interleave(times, 1)),
            offsets=None if offsets is None else scales.of(offsets.repeat_interleave(times, 1)),
        )

    def _divided(self, by: int) -> Cut:
        """The same of a tensor in which ``by`` neighbours are one."""
        return Cut(self.dim, tuple(range(r.start // by, r.stop // by) for r in self.ranges))


def rows(parts: Sequence[range], counts: Sequence[int]) -> Cut:
    """Of rows that are several projections of ``counts`` below each other, those ``parts``."""
    found, begin = [], 0
    for part, count in zip(parts, counts, strict=True):
        found.append(range(begin + part.start, begin + part.stop))
        begin += count
    return Cut(0, tuple(found))
