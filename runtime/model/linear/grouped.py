"""Linear projections in 4 bits for CPUs: weights in groups, rows of activations in 8 bits.

Half of the bytes of int8, which is what a step of few tokens waits for. Weights of 4-bit
checkpoints keep the levels, factors and offsets that they come with (``fill_weight`` takes a
``Grouped``); float weights are rounded to the nearest of 16 levels between the least and the
largest number of a group, or a part of this range if its squared error is smaller. Beside weights
of 4 bits others of the same checkpoint get 8, in groups, too.

What a row of activations has for a group is rounded to 127 levels of its largest number, so that a
large channel costs its neighbours alone their precision; a token's result does not depend on other
tokens. The head is int8: its error would go straight to the logits (4 bits there cost a small model
7 % of perplexity).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from coppice.kernels.cpu.layer.matmul import group_products
from coppice.kernels.cpu.layer.matmul.grouped import BLOCK, Grouped, joined, rounded
from coppice.runtime.model.layers import Linear, frozen
from coppice.runtime.model.linear.eight_bit import Int8Linear

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.group_panels import PackedGroups


class Int4Linear(Linear):
    """``Linear`` with a weight of 4 bits in groups; ``bits`` are those of float weights.

    ``weight_scale`` is float32 ``[out_features]``, a power of 2 for each output, which keeps its
    factors in the range of float16. Raises ``ValueError`` where 32 does not divide
    ``in_features``.
    """

    packed: PackedGroups | None = None
    shares_embedding = False
    head_kind = Int8Linear
    stored = 5, "int4"
    takes_groups = True
    bits: ClassVar[int] = 4

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
        if in_features % BLOCK:
            raise ValueError(
                f"quantization 'int4' needs projections whose inputs are multiples of {BLOCK}; "
                f"this model has one from {in_features} to {out_features}: take 'int8'"
            )
        self.in_features = in_features
        self.weight_scale = frozen(torch.empty(out_features))
        self.bias = frozen(torch.empty(out_features)) if bias else None
        self._parts: dict[int, Grouped] = {}
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, packed = x.float(), self.packed
        if packed is None:
            product = group_products.multiply_plain(x, self.weight, self.weight_scale, self.bias)
        else:
            product = group_products.multiply(x, packed, self.weight_scale, self.bias)
        return product.to(self._dtype)

    @property
    def weight(self) -> Grouped:  # type: ignore[override]
        """All parts that were filled in, as one."""
        return joined([part for _, part in sorted(self._parts.items())])

    def pack(self) -> None:
        """Lays out the weight as our own product wants it, where there is one.

        The weight itself is given up then. Call it when the weight is complete.
        """
        self._parts = {0: self.weight}
        self.packed = group_products.pack(self._parts[0])
        if self.packed is not None:
            self._parts = {}

    def fill_weight(self, first_row: int, part: torch.Tensor | Grouped) -> None:
        """Take ``part [rows, in_features]`` as the rows from ``first_row`` on; floats are rounded.

        Raises ``ValueError`` for groups that are no multiples of 32.
        """
        if isinstance(part, torch.Tensor):
            part = rounded(part, self.bits)
        elif part.group % BLOCK:
            raise ValueError(
                f"a weight has groups of {part.group}; it must be a multiple of {BLOCK}"
            )
        scale, kept = _in_range(part)
        self.weight_scale[first_row : first_row + len(scale)].copy_(scale)
        self._parts[first_row] = kept


class WiderInt4Linear(Int4Linear):
    """``Int4Linear`` of a checkpoint with weights of 4 bits: those with more get 8."""

    bits = 8


def _in_range(part: Grouped) -> tuple[torch.Tensor, Grouped]:
    """A power of 2 for each row, and the weight divided by them, its scales in float16."""
    factors = part.factors.float()
    most = factors.abs().amax(1)
    offsets = None if part.offsets is None else part.offsets.float()
    if offsets is not None:
        most = torch.maximum(most, offsets.abs().amax(1) / (1 << part.bits))
    _, exponents = torch.frexp(most.clamp_(min=1e-30))
    scale = torch.ldexp(torch.ones_like(most), exponents)
    halves = (factors / scale[:, None]).half()
    if offsets is not None:
        offsets = (offsets / scale[:, None]).half()
    return scale, Grouped(part.levels, halves, offsets, part.bits)
