"""Linear projections with weights of 16 bits on a CPU: kept as they are, computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from coppice.runtime.model.layers import Linear


class HalfLinear(Linear):
    """``Linear`` in float32 whose weight is kept in bfloat16 ``[out_features, in_features]``.

    A result is that of float32 weights but for the order in which it adds up; the memory is half,
    and so is the reading, which is what a step of few tokens takes its time for.
    """

    kept = torch.bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight.float(), self.bias)
        return super().forward(x)


class Float16Linear(HalfLinear):
    """The same with a weight in float16."""

    kept = torch.float16
