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

        An embedding as well reads ``rows`` from then on. Call it when the weight is complete.
        """
        self.packed = cpu_half.pack(self.weight)
        if self.packed is not None:
            del self.weight

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the packed weight, as it is kept ``[T, in_features]``, for int64 ``indices [T]``.

        A row's numbers lie in pairs, each in another line of the cache: some 0.2 microseconds a
        row and 100 features, of a step's milliseconds.
        """
        assert self.packed is not None
        pairs = self.packed.memory.view(torch.int32)[..., 0]
        panel = pairs.shape[-1]
        found = pairs[indices // panel, :, indices % panel]
        return found.view(self.kept)


class Float16Linear(HalfLinear):
    """The same with a weight in float16."""

    kept = torch.float16

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """As before; here the two of a pair lie apart."""
        assert self.packed is not None
        memory = self.packed.memory
        panel = memory.shape[-1]
        return memory[indices // panel, :, :, indices % panel].flatten(1)
