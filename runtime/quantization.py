"""Linear projections in int8, for CPUs: a quarter of the bytes a decode step has to read.

Weights have one scale an output row, activations one scale a token, chosen as the token comes
(dynamic). Both are symmetric, and the product is exact in int32, so that a token's result depends
on nothing but itself: the same for a prompt computed whole, in chunks or on top of a cached prefix,
whatever else is in the batch. torch's own dynamic linear takes one scale for all tokens of a call,
which breaks that, and one token with large activations would cost all others their precision.

Against float32 the error of a product is about 1.1% of its norm, and that of the logits of 30
random layers 4.3%. Of this the language-model head adds a tenth of a percent, while its weights can
be 40% of those that a decode step reads, so it is quantized as well. On one AVX-512 VNNI core, with
weights that no cache holds, a product of 1 to 32 tokens takes 0.2 to 0.3 of the time of float32.

The product is ``torch._int_mm``, oneDNN's. Of the alternatives in torch, the prepacked
``qlinear_pointwise`` costs 50 microseconds a call more, though it is up to 1.7 times faster for 2
to 16 tokens and matrices of many megabytes, and those that need quantized tensors are announced for
removal.
"""

from __future__ import annotations

import torch
from torch import nn

from coppice.kernels.cpu_rows import row_kernels
from coppice.runtime.layers import Linear, frozen

_LEVELS = 127
# Rows quantized at a time: a vocabulary's worth of float copies would be the peak of loading.
_BLOCK_ROWS = 4096


class Int8Linear(Linear):
    """``Linear`` whose weight is int8 ``[out_features, in_features]`` with a scale for each row.

    ``weight_scale`` is float32 ``[out_features]`` and already divided by the 127 levels of the
    activations. Parts are quantized as they are filled in; no float copy is kept.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        nn.Module.__init__(self)
        self.weight = frozen(torch.empty(out_features, in_features, dtype=torch.int8))
        self.weight_scale = frozen(torch.empty(out_features))
        self.bias = frozen(torch.empty(out_features)) if bias else None
        self._transposed = self.weight.t()
        self._dtype = dtype
        self._rows = row_kernels()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels, peaks = self._rows.quantize(x.float())
        product = torch._int_mm(levels, self._transposed)
        return self._rows.rescale(product, peaks, self.weight_scale, self.bias).to(self._dtype)

    def pack(self) -> None:
        """Nothing to do: the int8 product takes the weight as it is."""

    def fill_weight(self, first_row: int, part: torch.Tensor) -> None:
        """Quantize ``part [rows, in_features]`` into the rows from ``first_row`` on."""
        for block in part.split(_BLOCK_ROWS):
            values = block.float()
            rows = slice(first_row, first_row + len(block))
            scale = values.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30).div_(_LEVELS)
            self.weight[rows].copy_((values / scale).round_())
            self.weight_scale[rows].copy_(scale[:, 0] / _LEVELS)
            first_row = rows.stop


def linear_class(quantization: str | None, device: torch.device) -> type[Linear]:
    """The class of projections for ``quantization``: None for float weights, or ``"int8"``.

    Raises ``ValueError`` for other names, for a device other than a CPU, and where torch's int8
    product is missing or inexact (on CPUs without VNNI sums of products can saturate).
    """
    if quantization is None:
        return Linear
    if quantization != "int8":
        raise ValueError(f"quantization is {quantization!r}; it must be None or 'int8'")
    if device.type != "cpu":
        raise ValueError(f"quantization 'int8' runs on a CPU only; device is {device}")
    _check_int8_product()
    return Int8Linear


def _check_int8_product() -> None:
    """Refuse to run where the largest values that can occur do not multiply exactly."""
    left = torch.full((3, 256), _LEVELS, dtype=torch.int8)
    left[1].neg_()
    right = torch.full((32, 256), _LEVELS, dtype=torch.int8)
    right[::2].neg_()
    expected = left.long() @ right.long().t()
    for rows in (1, 3):
        try:
            product = torch._int_mm(left[:rows], right.t())
        except (RuntimeError, AttributeError) as error:
            raise ValueError(
                f"quantization 'int8' needs torch's int8 matrix product, which fails here: {error}"
            ) from error
        if not torch.equal(product.long(), expected[:rows]):
            raise ValueError(
                "quantization 'int8' needs an exact int8 matrix product, and this CPU's saturates"
            )
