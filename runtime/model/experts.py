"""The feed-forward part of a layer with experts: each token passes through a few of many.

Shazeer et al. 2017; Fedus et al. 2022.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from coppice.runtime.model.config import Experts
from coppice.runtime.model.layers import Linear, SiluMul, frozen
from coppice.runtime.model.linear.deterministic import SteadyLinear


class BoundedGate(nn.Module):
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of ``gate | up [T, 2 W]``, a tensor ``[T, W]``.

    ``gate`` is at most ``limit``, ``up`` from ``-limit`` to it (gpt-oss).
    """

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self._alpha, self._limit = alpha, limit

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self._limit)
        up = up.clamp(-self._limit, self._limit).add_(1)
        return up.mul_(gate * torch.sigmoid(gate * self._alpha))


class Expert(nn.Module):
    """``down(act(gate) * up)``, ``gate | up = gate_up(x)``, of ``[rows, hidden]``."""

    def __init__(
        self,
        hidden: int,
        spec: Experts,
        activation: nn.Module,
        linear: type[Linear],
        **place: Any,
    ) -> None:
        super().__init__()
        self.gate_up = linear(hidden, 2 * spec.inner, bias=spec.biased, **place)
        self.activation = activation
        self.down = linear(spec.inner, hidden, bias=spec.biased, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return made


class ExpertMixture(nn.Module):
    """The sum of the results of each token's best experts, weighted by how well they suit it.

    Only experts that a token of the step has chosen are read. A token's result does not depend on
    the other tokens: its experts are added in the order of their numbers.
    """

    def __init__(self, hidden: int, spec: Experts, *, linear: type[Linear], **place: Any) -> None:
        super().__init__()
        self.spec = spec
        # In the type of the model even if projections have fewer bits: it decides who is read.
        self.router = Linear(hidden, spec.count, bias=spec.biased, **place)
        activation = SiluMul(**place) if spec.gate is None else BoundedGate(*spec.gate)
        self._grouped = grouped_products(place["device"])
        self._steady = linear is SteadyLinear
        if self._grouped is not None and linear not in (Linear, SteadyLinear):
            raise ValueError(
                f"experts on a GPU have float weights only so far, and {linear.__name__} is asked "
                "for; quantization must be None"
            )
        # Of each kind of weights, those of all experts: one tensor, for the kernels of a GPU.
        self._stacks: dict[str, torch.Tensor] = {}
        self.experts = nn.ModuleList()
        for number in range(spec.count):
            expert = Expert(hidden, spec, activation, linear, **place)
            if self._grouped is not None:
                self._stack(number, expert)
            self.experts.append(expert)

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` of ``normed [T, hidden]``."""
        shares, chosen = self.choose(normed)
        if self._grouped is not None:
            mixed: torch.Tensor = self._grouped.mix_experts(
                normed, chosen, shares, **self._stacks, gate=self.spec.gate,
                deterministic=self._steady,
            )  # fmt: skip
            return mixed
        out = torch.zeros_like(normed)
        for number in chosen.unique().tolist():  # ascending
            rows, places = (chosen == number).nonzero(as_tuple=True)
            made = self.experts[number](normed[rows])
            out.index_add_(0, rows, made.mul_(shares[rows, places, None].to(made.dtype)))
        return out

    def _stack(self, number: int, expert: Expert) -> None:
        """Moves an expert's parameters, which are still empty, to its place in the stacks."""
        for name, linear in (("gate_up", expert.gate_up), ("down", expert.down)):
            for part in ("weight", "bias"):
                own = getattr(linear, part)
                if own is None:
                    continue
                key = name if part == "weight" else f"{name}_bias"
                if number == 0:
                    self._stacks[key] = own.new_empty((self.spec.count, *own.shape))
                setattr(linear, part, frozen(self._stacks[key][number]))

    def choose(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts ``[T, chosen]`` and their weights, float32, the best first."""
        probabilities = self.router(normed).float().softmax(dim=-1)
        shares, chosen = probabilities.topk(self.spec.chosen, dim=-1)
        if self.spec.normalised:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares, chosen


def grouped_products(device: torch.device) -> ModuleType | None:
    """The kernels for the experts of many rows at once: on a GPU; None elsewhere.

    Raises ``ValueError`` on a GPU without Triton.
    """
    if device.type != "cuda":
        return None
    try:
        from coppice.kernels.triton import experts
    except ImportError as error:
        raise ValueError(f"experts on a GPU need triton, which is missing: {error}") from error
    return experts
