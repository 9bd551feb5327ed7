"""Linear layers for 16-bit weights on a CPU, which are kept as they are; sums are float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from coppice.runtime.model.layers import Linear

# Rows in each of torch's products: with their number oneDNN chooses the order of sums.
_TOGETHER = 32


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


class BFloat16Linear(HalfLinear):
    """``HalfLinear`` whose rows are rounded to bfloat16, too, for the processor's own products.

    Sums are float32's. Where the compiled products cannot run, torch's do: oneDNN takes the
    instructions that there are (AMX, AVX512-BF16, those of ARM), and rounds results to bfloat16.
    The bias is added to these in float32: within the product it would be rounded with them, and
    some models have biases of hundreds beside results of ones.
    A row's result depends on no other row in both: torch's products all have ``_TOGETHER`` rows.
    """

    pairs = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return super().forward(x)
        count = len(x)
        rows = x.new_zeros(-(-count // _TOGETHER) * _TOGETHER, x.shape[1], dtype=torch.bfloat16)
        rows[:count] = x
        parts = [F.linear(part, self.weight) for part in rows.split(_TOGETHER)]
        result = torch.cat(parts)[:count].float() if parts else x.new_zeros(0, len(self.weight))
        return result if self.bias is None else result.add_(self.bias)


class Float16Linear(HalfLinear):
    """The same with a weight in float16."""

    kept = torch.float16
