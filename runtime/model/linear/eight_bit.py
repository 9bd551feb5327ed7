"""Linear projections in 8 bits: int8 for CPUs, e4m3 floats for GPUs (W8A8, both dynamic).

Weights have one scale an output row, activations one scale a token, computed from that token. Both
are symmetric, so a token's result does not depend on other tokens: it is the same for a prompt
computed whole, in chunks or after a cached prefix, and in any batch (with fp8, up to the order of
the sums, as without scales). torch's own dynamic linear takes one scale for all tokens of a call,
which breaks that, and a token with large activations would cost all others their precision.

**int8**: a quarter of the bytes that a decode step has to read. The product is exact in int32. Rows
and weights are transformed before they are rounded (``kernels/cpu/code/hadamard.py``): the few
channels of a trained model that are much larger than the others are spread over them. The
language-model head is quantized as well, since its weights can be 40% of those that a decode step
reads. On one AVX-512 VNNI core, with weights larger than its caches, a product of 1 to 32 tokens
takes 0.2 to 0.3 of the time of float32.

Where the processor has VNNI or AVX2, the product is our own (``kernels/cpu/layer/matmul``,
``int8_panels``), which the compiled layers use, too; elsewhere it is ``torch._int_mm``. With AVX2
alone that takes 9 to 38 times as long as ours (an EPYC of the Zen 3 kind). Of the alternatives
in torch, the prepacked ``qlinear_pointwise`` costs 50 microseconds a call more than that, though it
is up to 1.7 times faster for 2 to 16 tokens and matrices of many megabytes, and those that need
quantized tensors are announced for removal.

**fp8**: half the bytes of bfloat16, and twice its matrix rate where a GPU has such units. The
product is ``torch._scaled_mm`` with a scale for each row of both sides, which adds up in float32
(without ``use_fast_accum``) and gives bfloat16. With three bits of mantissa
the error of a product is 3.7% of its norm. The head stays in the model's type, as is usual: its
error would go straight to the logits, and a tied one is the embedding, which is not kept twice.

Weights alone in 8 or 4 bits are not served on a GPU (on a CPU: ``grouped``). torchao 0.18 has no
kernel for int8: in each product it makes a bfloat16 copy of the weight first, five bytes moved for
each number instead of the two of bfloat16, unless torch.compile generates a kernel. Its int4 wants
the package mslk, or else takes torch's own ``_weight_int4pack_mm``, which unpacks all weights again
for every 16 tokens of a call: prefills, and decodes of a large batch, would be slower than in
bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from coppice.kernels.cpu.code.hadamard import block_of, transformed
from coppice.kernels.cpu.layer.matmul import int8_products
from coppice.runtime.model.layers import Linear, RowLevels, frozen, gpu_rows

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.grouped import Grouped
    from coppice.kernels.cpu.layer.matmul.int8_panels import PackedInt8

#: Largest magnitude of an int8 weight or activation; -128 is not used.
LEVELS = 127
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
# Rows quantized at a time on a GPU: float copies of a vocabulary would be the peak of loading.
_BLOCK_ROWS = 4096
# On a CPU numbers: what the second-level cache holds takes a fifth less time.
_BLOCK = 1 << 17


class Int8Linear(Linear):
    """``Linear`` whose weight is int8 ``[out_features, in_features]`` with a scale for each row.

    ``weight_scale`` is float32 ``[out_features]`` and already divided by the 127 levels of the
    activations. Parts are quantized as they are filled in; no float copy is kept.
    """

    packed: PackedInt8 | None = None
    shares_embedding = False
    stored = 8, "int8"

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
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, packed = x.float(), self.packed
        if packed is None:
            product = int8_products.multiply_plain(x, self.weight, self.weight_scale, self.bias)
        else:
            product = int8_products.multiply(x, packed, self.weight_scale, self.bias)
        return product.to(self._dtype)

    def pack(self) -> None:
        """Lays out the weight as our own product wants it, where there is one.

        The weight itself is given up then. Call it when the weight is complete. Raises ValueError
        where torch's product is needed, and not exact.
        """
        self.packed = int8_products.pack(self.weight)
        if self.packed is not None:
            del self.weight
        else:
            check_plain_product()

    def fill_weight(self, first_row: int, part: torch.Tensor | Grouped) -> None:
        """Quantize ``part [rows, in_features]`` into the rows from ``first_row`` on."""
        assert isinstance(part, torch.Tensor)
        for block in part.split(max(1, _BLOCK // part.shape[1])):
            # Transformed as the rows that it will be multiplied with, which are not divided.
            values = transformed(block.float()) / block_of(block.shape[1])
            rows = slice(first_row, first_row + len(block))
            scale = values.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30).div_(LEVELS)
            self.weight[rows].copy_((values / scale).round_())
            self.weight_scale[rows].copy_(scale[:, 0] / LEVELS)
            first_row = rows.stop


def check_plain_product() -> None:
    """Raises ValueError where torch's product of the largest values that can occur is not exact."""
    left = torch.full((3, 256), LEVELS, dtype=torch.int8)
    left[1].neg_()
    right = torch.full((32, 256), LEVELS, dtype=torch.int8)
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


class Fp8Linear(Linear):
    """``Linear`` whose weight is e4m3 ``[out_features, in_features]`` with a scale for each row.

    ``weight_scale`` is float32 ``[1, out_features]``. Parts are quantized as they are filled in.
    Both widths must be multiples of 16: ``ValueError``.
    """

    head_kind = Linear
    takes_levels = True
    stored = 8, "float8_e4m3fn"

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
        if in_features % 16 or out_features % 16:
            raise ValueError(
                f"quantization 'fp8' needs projections whose widths are multiples of 16; this "
                f"model has one from {in_features} to {out_features}"
            )
        shape = (out_features, in_features)
        self.weight = frozen(torch.empty(shape, dtype=torch.float8_e4m3fn, device=device))
        self.weight_scale = frozen(torch.empty(1, out_features, device=device))
        self.bias = frozen(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self._transposed = self.weight.t()  # the layout that the product asks for
        self._dtype = dtype
        gpu = gpu_rows(device)
        self._quantize = quantize_e4m3 if gpu is None else gpu.quantize_e4m3

    def forward(self, x: torch.Tensor | RowLevels) -> torch.Tensor:
        levels, scale = x if isinstance(x, RowLevels) else self._quantize(x)
        product: torch.Tensor = torch._scaled_mm(
            levels,
            self._transposed,
            scale_a=scale,
            scale_b=self.weight_scale,
            bias=self.bias,
            out_dtype=self._dtype,
        )
        return product

    def pack(self) -> None:
        """Nothing to do: the product takes the weight as it is."""

    def fill_weight(self, first_row: int, part: torch.Tensor | Grouped) -> None:
        """Quantize ``part [rows, in_features]`` into the rows from ``first_row`` on."""
        assert isinstance(part, torch.Tensor)
        for block in part.split(_BLOCK_ROWS):
            levels, scale = quantize_e4m3(block.to(self.weight.device))
            rows = slice(first_row, first_row + len(block))
            self.weight[rows].copy_(levels)
            self.weight_scale[0, rows].copy_(scale[:, 0])
            first_row = rows.stop


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [T, width]`` as e4m3, and what each row is to be multiplied by, float32 ``[T, 1]``."""
    values = x.float()
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12).div_(_E4M3_MAX)
    return (values / scale).to(torch.float8_e4m3fn), scale
