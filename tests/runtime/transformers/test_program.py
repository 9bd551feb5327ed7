"""Passes of transformers' models as one compiled call: what is recorded, and what is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coppice.kernels.attention.interface import AttentionPlan, LayerCache
from coppice.kernels.cpu.backend import CpuBackend
from coppice.runtime.model.layers import Linear, RMSNorm, SiluMul
from coppice.runtime.transformers.adopt import Rows
from coppice.runtime.transformers.attention import LayerFacts, running
from coppice.runtime.transformers.fuse import AnyNorm
from coppice.runtime.transformers.program.compiled import CompiledNetwork
from coppice.runtime.transformers.program.record import Unrecorded
from tests.runtime.engine.test_families import start

if TYPE_CHECKING:
    from coppice.runtime.model.config import ModelConfig
    from coppice.runtime.transformers.network import Network

Make = Callable[..., Path]
Between = Callable[["Tiny", torch.Tensor], torch.Tensor]
_HEADS, _DIM = 2, 16
_WIDTH = _HEADS * _DIM


class Tiny(nn.Module):
    """One layer: attention of a projection, and ``between`` another one and the last."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        torch.manual_seed(0)
        place: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
        object.__setattr__(self, "base", self)  # not a child: the passes are its own
        self.between = between
        self.rows = Rows(torch.randn(50, _WIDTH), None, torch.float32)
        self.places = nn.Embedding(64, _WIDTH)
        self.first, self.second = (
            Linear(_WIDTH, 2 * _WIDTH, bias=True, **place),
            Linear(2 * _WIDTH, _WIDTH, bias=False, **place),
        )
        self.norm = AnyNorm(RMSNorm(_WIDTH, eps=1e-5, **place), 1e-5)
        self.gate = SiluMul(**place)
        self.plain = nn.LayerNorm(2 * _WIDTH)
        self.bounds = nn.Buffer(torch.linspace(-1, 1, 2 * _WIDTH))
        with torch.no_grad():
            for each in self.parameters():
                each.normal_(std=0.5)
        for linear in (self.first, self.second):
            linear.pack()
        self.requires_grad_(False)

    def states(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.rows(token_ids[None]) + self.places(positions)[None]
        heads = self.norm(x).view(1, -1, _HEADS, _DIM).transpose(1, 2)
        assert running.step is not None
        x = x + running.step.attend(heads, heads, 2 * heads, None).reshape(x.shape)
        inner = self.between(self, self.first(x.view(-1, _WIDTH))[None])
        return self.second(inner.view(-1, 2 * _WIDTH))


def compiled(between: Between) -> CompiledNetwork:
    """Raises ``Unrecorded``, also where results differ from the module's own."""
    from coppice.kernels.cpu.program import run

    config = SimpleNamespace(
        vocab_size=50, num_heads=_HEADS, num_kv_heads=_HEADS, head_dim=_DIM, hidden_size=_WIDTH,
        attention_scale=0.25, attention_softcap=None, max_position=64,
    )  # fmt: skip
    facts = LayerFacts("Tiny", _HEADS, _HEADS, _DIM, _DIM, 0.25, None, None, False)
    network = cast("Network", Tiny(between))
    return CompiledNetwork(cast("ModelConfig", config), [facts], network, CpuBackend(), run)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(1, -1, 4, 16).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(1, -1, 64)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Halves of heads exchanged, as rotations do it."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def alternating(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def in_part(x: torch.Tensor) -> torch.Tensor:
    """The first numbers of each head replaced in place."""
    x = x.clone()
    x[..., :6] = x[..., 6:12] * 2
    x += 1
    return x


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(each, id=name)
        for name, each in {
            "add": lambda _, x: x + 1.5 - x * 0.25,
            "sub": lambda _, x: 2 - x,
            "div": lambda _, x: x / 3 / (x * x + 1),
            "silu": lambda _, x: F.silu(x),
            "gelu": lambda _, x: F.gelu(x) + F.gelu(x, approximate="tanh"),
            "relu": lambda _, x: F.relu(x).square() + torch.pow(x, 3),
            "sigmoid": lambda _, x: torch.sigmoid(x) * torch.tanh(x),
            "exp": lambda _, x: torch.exp(-x.abs()).sqrt() + torch.rsqrt(x * x + 1),
            "clamp": lambda _, x: x.clamp(-0.5, 0.75) + x.clamp(min=0.1),
            "constant": lambda m, x: x * m.bounds + m.bounds[:1],
            "layer norm": lambda m, x: m.plain(x),
            "norm by hand": lambda _, x: (
                (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1)
            ),
            "norm of heads": lambda m, x: m.norm(x.view(1, -1, 2, 32)).view(1, -1, 64),
            "turned": lambda _, x: joined(turned(heads(x)) + heads(x)),
            "alternating": lambda _, x: joined(alternating(heads(x))),
            "in part": lambda _, x: joined(in_part(heads(x))),
            "gate": lambda m, x: torch.cat((m.gate(x[0]), m.gate(x[0])), dim=-1)[None],
        }.items()
    ],
)
def test_operations_compute_what_torch_does(between: Between) -> None:
    compiled(between)  # compares one row and several


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda _, x: x if x.sum() > 0 else -x, "makes a choice that depends on numbers"),
        (lambda _, x: torch.cumsum(x, -1), "cumsum is not among a program's operations"),
        (lambda _, x: x + x.mean(1, keepdim=True), "mean is not over the last dimension"),
        (lambda _, x: x * torch.arange(x.shape[1])[:, None].float(), "a number for each row"),
        (lambda _, x: x.double().float(), "returns torch.float64"),
    ],
)
def test_a_pass_that_cannot_be_a_program_says_why(between: Between, reason: str) -> None:
    with pytest.raises(Unrecorded, match=reason):
        compiled(between)


def test_a_slot_beyond_the_cache_is_refused() -> None:
    network = compiled(lambda _, x: x)
    kv = [LayerCache(torch.zeros(2, 4, _HEADS, _DIM), torch.zeros(2, 4, _HEADS, _DIM))]
    one = torch.zeros(1, dtype=torch.int64)
    upto = torch.tensor([0, 1], dtype=torch.int32).numpy()
    plan = AttentionPlan(4, upto, upto[1:], upto, upto[:1])
    with pytest.raises(IndexError, match="from 0 to 7"):
        network.hidden_states(one, one, one + 8, kv, CpuBackend().prepare(plan))


@pytest.mark.parametrize("family", ["stablelm", "gpt2", "cohere2", "minicpm3", "granite_swa"])
def test_families_run_as_one_call(foreign_checkpoint: Make, family: str) -> None:
    assert start(foreign_checkpoint(family)).runner.decoder.compiled is not None


def test_experts_run_operation_by_operation(
    foreign_checkpoint: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert start(foreign_checkpoint("olmoe")).runner.decoder.compiled is None
    assert "OlmoeForCausalLM runs operation by operation: " in caplog.text
