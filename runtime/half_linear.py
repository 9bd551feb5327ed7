"""Linear projections with weights of 16 bits on a CPU: kept as they are, computed in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from coppice.kernels import cpu_half
from coppice.runtime.layers import Linear

if TYPE_CHECKING:
    from coppice.kernels.half_panels import PackedHalf


class HalfLinear(Linear):
    """``Linear`` in float32 whose weight is kept in bfloat16 ``[out_features, in_features]``.

    A result is that of float32 weights but for the order in which it adds up; the memory is half,
    and so is the reading, which is what a step of few tokens takes its time for.
    """

    packed: PackedHalf | None = None
    kept = torch.bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight.float(), self.bias)
        assert not hasattr(self, "weight")
        return cpu_half.multiply(x, self.packed, self.bias)

    def pack(self) -> None:
        """Lays out the weight as our own product wants it, and gives the weight itself up.

        Unless it is an embedding as well. Call it when the weight is complete.
        """
        self.packed = cpu_half.pack(self.weight)
        if self.packed is not None:
            del self.weight


class Float16Linear(HalfLinear):
    """The same with a weight in float16."""

    kept = torch.float16
