"""Replaces small parts of transformers' models by ours where both compute the same.

A step of few tokens spends its time on the number of operations more than on their size. A norm of
transformers' is six operations and ours is one; a gated feed-forward part is five, ours three.
Whether a part is what it looks like is tried out on random numbers, whatever its class is called.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from coppice.runtime.model.layers import Linear, RMSNorm, SiluMul
from coppice.runtime.transformers.network import Network

_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class AnyNorm(nn.Module):
    """Our norm for inputs of any shape ``[..., width]``."""

    def __init__(self, inner: RMSNorm, eps: float) -> None:
        super().__init__()
        self.inner, self.eps = inner, eps

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.reshape(-1, x.shape[-1])).view(x.shape)


class GatedPart(nn.Module):
    """``down(silu(gate) * up)`` for inputs of any shape, with gate and up in one product."""

    def __init__(
        self, part: nn.Module, linear: type[Linear], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        gate, up, down = (
            cast("nn.Linear", getattr(part, name)) for name in ("gate_proj", "up_proj", "down_proj")
        )
        inner, width = gate.weight.shape
        bias = gate.bias is not None
        self.gate_up = linear(width, 2 * inner, bias=bias, dtype=dtype, device=device)
        for row, each in ((0, gate), (inner, up)):
            self.gate_up.fill_weight(row, each.weight.data)
            if bias:
                self.gate_up.fill_bias(row, each.bias.data)
        self.activation = SiluMul(dtype=dtype, device=device)
        self.down = linear(
            inner, down.out_features, bias=down.bias is not None, dtype=dtype, device=device
        )
        self.down.fill_weight(0, down.weight.data)
        if down.bias is not None:
            self.down.fill_bias(0, down.bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x.reshape(-1, x.shape[-1]))
        rows = self.activation.rows_for(self.down, gate_up)
        return self.down(rows).view(*x.shape[:-1], -1)


def fuse(
    network: Network, *, linear: type[Linear], dtype: torch.dtype, device: torch.device
) -> None:
    """Replaces norms and gated feed-forward parts, before ``adopt`` replaces linear layers."""
    for name, module in list(network.named_modules()):
        if not name:
            continue
        found: nn.Module | None = None
        if type(module).__name__.endswith("RMSNorm"):
            found = _norm(module, dtype, device)
        elif {child for child, _ in module.named_children()} == _PARTS and _is_gated(module):
            found = GatedPart(module, linear, dtype, device)
        if found is not None:
            parent, _, last = name.rpartition(".")
            setattr(network.get_submodule(parent), last, found)


@torch.no_grad()
def _norm(module: nn.Module, dtype: torch.dtype, device: torch.device) -> AnyNorm | None:
    """Ours, if it computes the same; None if not."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    exact = copy.deepcopy(module).float()
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0))
    plain = F.rms_norm(x, (len(weight),), eps=eps)
    for offset in (0.0, 1.0):
        whole = weight.float() + offset
        if torch.allclose(exact(x).float(), plain * whole, rtol=1e-4, atol=1e-5):
            ours = RMSNorm(len(weight), eps=eps, dtype=dtype, device=device)
            ours.weight.copy_(whole)
            return AnyNorm(ours, eps)
    return None


@torch.no_grad()
def _is_gated(part: nn.Module) -> bool:
    """Whether it is a feed-forward part with SiLU and linear layers alone."""
    gate, up, down = (getattr(part, name) for name in ("gate_proj", "up_proj", "down_proj"))
    if any(type(each) is not nn.Linear for each in (gate, up, down)):
        return False
    if (gate.bias is None) != (up.bias is None) or gate.weight.shape != up.weight.shape:
        return False
    x = torch.randn(1, 3, gate.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(gate.weight.dtype)
    return torch.equal(part(x), down(F.silu(gate(x)) * up(x)))
