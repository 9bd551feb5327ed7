"""The two pieces that a decoder layer repeats: a packed linear projection and RMSNorm.

A projection can hold several projections of a checkpoint, one below the other (queries, keys and
values; gate and up), so that one matrix product serves them all. It is filled part by part, each
part straight from the checkpoint, so that no second copy of the weights ever exists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """``x [T, in_features] -> [T, out_features]``, in the type of its weights."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.bias = frozen(torch.empty(out_features, dtype=dtype, device=device)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def fill_weight(self, first_row: int, part: torch.Tensor) -> None:
        """Copy ``part [rows, in_features]`` over the rows from ``first_row`` on."""
        self.weight[first_row : first_row + part.shape[0]].copy_(part)

    def fill_bias(self, first_row: int, part: torch.Tensor) -> None:
        """Copy ``part [rows]`` over the entries from ``first_row`` on."""
        assert self.bias is not None
        self.bias[first_row : first_row + part.shape[0]].copy_(part)


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter that is never trained."""
    return nn.Parameter(tensor, requires_grad=False)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, reduced in float32.

    ``weight`` is ``[width]``, or ``[heads, width]`` with a row for each head of ``x [T, heads,
    width]``. Zhang and Sennrich 2019.
    """

    def __init__(self, *shape: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(*shape, dtype=dtype, device=device))
        self._eps = eps
        # A tensor, since a Python number costs the conversion at every call.
        self._eps_tensor = torch.tensor(eps, dtype=torch.float32, device=device)
        self._fused = _fused_norm() if device.type == "cuda" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(x, self.weight, self._eps)
        if x.dtype != torch.float32:
            return F.rms_norm(x, (x.shape[-1],), eps=self._eps) * self.weight
        # torch has a fused kernel for GPUs only: on a CPU its rms_norm is six passes over x, this
        # is three (20 against 23 microseconds for one row of 576, 110 against 178 for 512 rows).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps_tensor, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return (x * inverse).mul_(self.weight)


def _fused_norm() -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None:
    """One kernel for the norm and its weights, where torch has two; None without Triton."""
    try:
        from coppice.kernels.triton_norm import rms_norm
    except ImportError:
        return None
    return rms_norm
