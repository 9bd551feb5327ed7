"""Int8 projections: how far from float they are, and that a token's result is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coppice.runtime import quantization
from coppice.runtime.layers import Linear
from coppice.runtime.model_config import load_model_config
from coppice.runtime.quantization import Int8Linear, linear_class
from coppice.runtime.weights import load_decoder

CPU = torch.device("cpu")


def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
    rows, columns = weight.shape
    linear = Int8Linear(columns, rows, bias=bias is not None, dtype=torch.float32, device=CPU)
    linear.fill_weight(0, weight)
    if bias is not None:
        linear.fill_bias(0, bias)
    return linear


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_is_near_the_float_product(tokens: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(144, 96, generator=generator)
    bias = torch.randn(144, generator=generator) if with_bias else None
    x = torch.randn(tokens, 96, generator=generator)
    ours = make(weight, bias)(x)
    assert ours.dtype == torch.float32
    assert ours.shape == (tokens, 144)
    assert relative_error(ours, F.linear(x, weight, bias)) < 0.02


def test_a_token_does_not_depend_on_its_batch() -> None:
    """Bit for bit, even beside a token a thousand times larger."""
    generator = torch.Generator().manual_seed(0)
    linear = make(torch.randn(80, 64, generator=generator), torch.randn(80, generator=generator))
    x = torch.randn(33, 64, generator=generator)
    x[5] *= 1000
    together = linear(x)
    for part in (1, 2, 8, 20):
        assert torch.equal(torch.cat([linear(chunk) for chunk in x.split(part)]), together)


def test_zeros_and_no_tokens_at_all() -> None:
    linear = make(torch.randn(16, 32), torch.arange(16.0))
    assert torch.equal(linear(torch.zeros(2, 32)), torch.arange(16.0).expand(2, 16))
    assert linear(torch.empty(0, 32)).shape == (0, 16)
    assert torch.equal(make(torch.zeros(16, 32))(torch.randn(3, 32)), torch.zeros(3, 16))


def test_broken_activations_stay_visible() -> None:
    """A NaN must come out as NaN, not as some number."""
    x = torch.randn(2, 32)
    x[1, 3] = torch.nan
    out = make(torch.randn(16, 32))(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_parts_are_quantized_alone() -> None:
    """Queries, keys and values packed below one another keep their own scales."""
    small, large = torch.randn(16, 32), 100 * torch.randn(16, 32)
    packed = make(torch.zeros(32, 32))
    packed.fill_weight(0, small)
    packed.fill_weight(16, large)
    x = torch.randn(4, 32)
    expected = torch.cat((make(small)(x), make(large)(x)), dim=-1)
    assert torch.equal(packed(x), expected)


def test_long_weights_are_quantized_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 32)
    whole = make(weight)
    monkeypatch.setattr(quantization, "_BLOCK_ROWS", 16)
    in_blocks = make(weight)
    assert torch.equal(in_blocks.weight, whole.weight)
    assert torch.equal(in_blocks.weight_scale, whole.weight_scale)


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_model_stays_near_its_float_one(
    tiny_checkpoint: Callable[..., Path], family: str, tied: bool
) -> None:
    folder = tiny_checkpoint(family, tie_word_embeddings=tied)
    config = load_model_config(folder)
    exact = load_decoder(folder, config, dtype=torch.float32, device=CPU)
    decoder = load_decoder(folder, config, dtype=torch.float32, device=CPU, quantization="int8")
    assert torch.equal(decoder.embedding, exact.embedding)
    x = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(decoder.layers, exact.layers, strict=True):
        assert relative_error(ours.qkv(x), theirs.qkv(x)) < 0.02
        assert relative_error(ours.gate_up(x), theirs.gate_up(x)) < 0.02
        # Four products of 1% each and what SiLU makes of the first two.
        assert relative_error(ours.feed_forward(x), theirs.feed_forward(x)) < 0.04
    assert relative_error(decoder.head(x), exact.head(x)) < 0.02


def test_takes_a_quarter_of_the_memory(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama")
    config = load_model_config(folder)
    decoder = load_decoder(folder, config, dtype=torch.float32, device=CPU, quantization="int8")
    for linear in decoder.modules():
        if isinstance(linear, Int8Linear):
            kept = sum(p.numel() * p.element_size() for p in linear.parameters())
            rows, columns = linear.weight.shape
            assert kept == rows * columns + 4 * rows


def test_names_and_devices() -> None:
    assert linear_class(None, torch.device("cuda")) is Linear
    assert linear_class("int8", CPU) is Int8Linear
    with pytest.raises(ValueError, match="quantization is 'int3'; it must be None or 'int8'"):
        linear_class("int3", CPU)
    with pytest.raises(ValueError, match="'int8' runs on a CPU only; device is cuda"):
        linear_class("int8", torch.device("cuda"))


def test_refuses_a_machine_whose_product_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: exact(a, b).clamp_(-(2**15), 2**15 - 1))
    with pytest.raises(ValueError, match="this CPU's saturates"):
        linear_class("int8", CPU)


def test_refuses_a_torch_without_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not implemented for 'Char'")

    monkeypatch.setattr(quantization.torch, "_int_mm", missing)
    with pytest.raises(ValueError, match="not implemented for 'Char'"):
        linear_class("int8", CPU)
