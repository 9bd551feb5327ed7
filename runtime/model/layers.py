"""The parts of a decoder layer: packed linear projections, RMSNorm and SiLU.

A projection can hold several projections of a checkpoint, one below the other (queries, keys and
values; gate and up), so that one matrix product computes all of them. Each part is copied straight
from the checkpoint, so that no second copy of the weights ever exists.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from coppice.kernels.cpu.layer.matmul import float_products
from coppice.kernels.cpu.layer.rows import RowKernels, row_kernels
from coppice.runtime.model.config import DTYPE_NAMES

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.float_panels import PackedFloat
    from coppice.kernels.cpu.layer.matmul.group_panels import PackedGroups
    from coppice.kernels.cpu.layer.matmul.grouped import Grouped
    from coppice.kernels.cpu.layer.matmul.int8_panels import PackedInt8

#: The types of weights that are supported, by their names in configs and options.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


class RowLevels(NamedTuple):
    """Rows in 8-bit floats ``[T, W]``, and what each is to be multiplied by, ``[T, 1]``."""

    levels: torch.Tensor
    scales: torch.Tensor


class Linear(nn.Module):
    """``x [T, in_features] -> [T, out_features]``, in the type of its weights."""

    bias: nn.Parameter | None
    #: The weight in the layout of ``pack``; None before, and where it has none.
    packed: PackedFloat | PackedInt8 | PackedGroups | None = None
    #: The class of a language-model head beside these projections; None: their own.
    head_kind: ClassVar[type[Linear] | None] = None
    #: Bits that a number of the weight takes in memory, and their name; None: those of its type.
    stored: ClassVar[tuple[float, str] | None] = None
    #: Whether parts of a weight may come as ``Grouped``.
    takes_groups: ClassVar[bool] = False
    #: Whether ``x`` may be ``RowLevels``.
    takes_levels: ClassVar[bool] = False
    #: Whether its weight can be the embedding's own tensor.
    shares_embedding: ClassVar[bool] = True
    #: The type of the weight; None for ``dtype``, the type of results and bias.
    kept: ClassVar[torch.dtype | None] = None
    #: Whether rows are rounded to bfloat16, too (``float_products.pack``).
    pairs: ClassVar[bool] = False

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
        shape = (out_features, in_features)
        self.weight = frozen(torch.empty(shape, dtype=self.kept or dtype, device=device))
        self.bias = frozen(torch.empty(out_features, dtype=dtype, device=device)) if bias else None

    @classmethod
    def for_head(cls) -> type[Linear]:
        """The class of a language-model head beside these projections."""
        return cls.head_kind or cls

    @classmethod
    def stored_as(cls, dtype: torch.dtype) -> tuple[float, str]:
        """Bits that a number of the weight takes in memory, and what such numbers are called."""
        kept = cls.kept or dtype
        return cls.stored or (8 * kept.itemsize, str(kept).removeprefix("torch."))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return float_products.multiply(x, cast("PackedFloat", self.packed), self.bias)

    def pack(self) -> None:
        """Packs a weight for our own product: on a CPU, where results are float32.

        The weight itself is deleted then, and an embedding that shares it is read from ``packed``.
        Call it when the weight is complete.
        """
        if self.weight.device.type == "cpu" and (self.kept or self.weight.dtype == torch.float32):
            self.packed = float_products.pack(self.weight, pairs=self.pairs)
        if self.packed is not None:
            del self.weight

    def fill_weight(self, first_row: int, part: torch.Tensor | Grouped) -> None:
        """Copy ``part [rows, in_features]`` over the rows from ``first_row`` on."""
        assert isinstance(part, torch.Tensor)
        self.weight[first_row : first_row + part.shape[0]].copy_(part)

    def fill_bias(self, first_row: int, part: torch.Tensor) -> None:
        """Copy ``part [rows]`` over the entries from ``first_row`` on."""
        assert self.bias is not None
        self.bias[first_row : first_row + part.shape[0]].copy_(part)


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter that is never trained."""
    return nn.Parameter(tensor, requires_grad=False)


class RowPart(nn.Module):
    """What a layer does between two products with each row by itself."""

    _gpu: ModuleType | None = None

    def levels(self, *rows: torch.Tensor | None) -> RowLevels | None:
        """Its result in 8-bit floats, if one kernel computes that; None if none does."""
        return None

    def rows_for(
        self, reader: Linear | None, *rows: torch.Tensor | None
    ) -> torch.Tensor | RowLevels:
        """Its result, as the one that reads it takes it; None: as rows like the given ones."""
        made = self.levels(*rows) if reader is not None and reader.takes_levels else None
        return cast("torch.Tensor", self(*rows)) if made is None else made


class RMSNorm(RowPart):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, reduced in float32.

    ``weight`` is ``[width]``, or ``[heads, width]`` with a row for each head of ``x [T, heads,
    width]``. Zhang and Sennrich 2019.
    """

    def __init__(self, *shape: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(*shape, dtype=dtype, device=device))
        self.eps = eps
        self._rows = row_kernels_for(dtype, device)
        self._gpu = gpu_rows(device)

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of ``x``, a new tensor; of ``x += added``, in place, where that is given."""
        if self._rows is not None:
            return self._rows.add_norm(x, added, self.weight, self.eps)
        if self._gpu is not None:
            return self._gpu.rms_norm(x, self.weight, self.eps, added)
        if added is not None:
            x.add_(added)
        return F.rms_norm(x, (x.shape[-1],), eps=self.eps) * self.weight

    def levels(self, *rows: torch.Tensor | None) -> RowLevels | None:
        if self._gpu is None:
            return None
        x, *added = rows
        return RowLevels(*self._gpu.rms_norm_e4m3(x, self.weight, self.eps, *added))


class Sum(RowPart):
    """What stands for a norm in a layer that does not normalise there: only the addition."""

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` itself; ``x += added``, in place, where that is given."""
        return x if added is None else x.add_(added)


class SiluMul(RowPart):
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

    def levels(self, *rows: torch.Tensor | None) -> RowLevels | None:
        return None if self._gpu is None else RowLevels(*self._gpu.silu_mul_e4m3(*rows))


class GeluMul(RowPart):
    """``gelu(gate) * up`` as ``SiluMul``, by GELU's approximation with tanh.

    Hendrycks and Gimpel 2016, section 2.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._rows = row_kernels_for(dtype, device)

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._rows is not None:
            return self._rows.gelu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)


def row_kernels_for(dtype: torch.dtype, device: torch.device) -> RowKernels | None:
    """The kernels for single rows in float32 on a CPU; None elsewhere."""
    return row_kernels() if device.type == "cpu" and dtype == torch.float32 else None


def gpu_rows(device: torch.device) -> ModuleType | None:
    """The kernels for single rows on a GPU; None elsewhere, and where Triton is missing."""
    if device.type != "cuda":
        return None
    try:
        from coppice.kernels.triton import rows as triton_rows
    except ImportError:
        return None
    return triton_rows
