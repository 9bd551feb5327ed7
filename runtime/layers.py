"""The pieces that a decoder layer repeats: a packed linear projection, RMSNorm and SiLU.

A projection can hold several projections of a checkpoint, one below the other (queries, keys and
values; gate and up), so that one matrix product serves them all. It is filled part by part, each
part straight from the checkpoint, so that no second copy of the weights ever exists.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from coppice.kernels.cpu_rows import RowKernels, row_kernels

# The tokens of a call for which MKL packs a weight. It takes the layout for any number, but chooses
# it by this one: packed for 16 or fewer it is up to 1.5 times slower above 16, and packed for 1,024
# or more 1.4 times slower below.
_PACKED_FOR = 256


class Linear(nn.Module):
    """``x [T, in_features] -> [T, out_features]``, in the type of its weights."""

    bias: nn.Parameter | None
    #: Whether a decoder with these projections has such a language-model head, too.
    serves_head: ClassVar[bool] = True

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

        self._packed: torch.Tensor | None = None
        self._shape: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkl._mkl_linear(
            x, self._packed, self._shape, self.bias, len(x)
        )
        return product

    def pack(self) -> None:
        """Lays out a float32 weight on a CPU as MKL's product wants it, where torch has MKL.

        MKL otherwise copies it so in every product of more than two tokens, which from 4 to 64
        tokens takes longer than the product: for all layers of a Llama of 135 million weights, 2.5
        times less with 8 tokens, 3.4 with 16, 2.8 with 32, 1.6 with 64, 1.3 with 256 and 1,024; as
        much with one. The weight itself is given up then, unless it is an embedding as well. Call
        it when the weight is complete.
        """
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.numel():
            return
        try:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), _PACKED_FOR)
            shape = weight.new_empty(1).expand(weight.shape)  # only asked for its shape
            x = torch.linspace(-1, 1, 3 * weight.shape[1]).view(3, -1)
            product = torch.ops.mkl._mkl_linear(x, packed, shape, None, 3)
        except (AttributeError, RuntimeError):  # a torch without MKL, or another one's operator
            return
        if torch.allclose(product, F.linear(x, weight), rtol=1e-3, atol=1e-3):
            self._packed, self._shape = packed, shape
            del self.weight

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
        self._rows = row_kernels_for(dtype, device)
        self._gpu = gpu_rows(device)

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of ``x``, a new tensor; of ``x += added``, in place, where that is given."""
        if self._rows is not None:
            return self._rows.add_norm(x, added, self.weight, self._eps)
        if self._gpu is not None:
            return self._gpu.rms_norm(x, self.weight, self._eps, added)
        if added is not None:
            x.add_(added)
        return F.rms_norm(x, (x.shape[-1],), eps=self._eps) * self.weight


class SiluMul(nn.Module):
    """``silu(gate) * up`` of ``gate | up [T, 2 W]``, a new tensor ``[T, W]``. Shazeer 2020."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._rows = row_kernels_for(dtype, device)
        self._gpu = gpu_rows(device)

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._rows is not None:
            return self._rows.silu_mul(gate_up)
        if self._gpu is not None:
            return self._gpu.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def row_kernels_for(dtype: torch.dtype, device: torch.device) -> RowKernels | None:
    """What works rows in float32 on a CPU; None elsewhere."""
    return row_kernels() if device.type == "cpu" and dtype == torch.float32 else None


def gpu_rows(device: torch.device) -> ModuleType | None:
    """The kernels that work rows on a GPU; None elsewhere, and where Triton is missing."""
    if device.type != "cuda":
        return None
    try:
        from coppice.kernels import triton_rows
    except ImportError:
        return None
    return triton_rows
