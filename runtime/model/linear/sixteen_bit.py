"""Linear layers for 16-bit weights on a CPU, which are kept as they are; sums are float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from coppice.runtime.model.layers import Linear


class HalfLinear(Linear):
    """``Linear`` in float32 whose weight is kept in bfloat16 ``[out_features, in_features]``.

    A result equals that of float32 weights except for the order of its sums. It takes half the
    memory and half the reading, which is what limits the speed of a step with few tokens.
    """

    kept = torch.bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight.float(), self.bias)
        return super().forward(x)


class Float16Linear(HalfLinear):
    """The same with a weight in float16."""

    kept = torch.float16
