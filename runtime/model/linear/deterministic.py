"""Linear layers whose result for a row does not depend on the batch, for `deterministic`."""

from __future__ import annotations

import torch

from coppice.runtime.model.layers import Linear


class SteadyLinear(Linear):
    """``Linear`` as one Triton kernel with one tile, whatever the number of rows.

    It runs where the ``triton`` attention backend does: see ``kernels/triton/products.py``.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from coppice.kernels.triton.products import steady_linear

        return steady_linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Nothing to do: the product takes the weight as it is."""
