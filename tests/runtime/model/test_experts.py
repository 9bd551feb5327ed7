"""Experts in the compiled layers: what a row chooses, and that other rows change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from needed_products import quantized
from transformers import AutoModelForCausalLM

from coppice.kernels.cpu.layer.matmul.float_products import float_kernels
from coppice.runtime.model import experts
from coppice.runtime.model.config import Experts
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.linear.eight_bit import Fp8Linear
from coppice.runtime.model.weights import load_decoder
from tests.runtime.model.test_decoder import Run, assert_near, expected_logits, prompt

META = torch.device("meta")
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")

pytestmark = pytest.mark.skipif(float_kernels() is None, reason="no compiled products of panels")


@pytest.fixture
def load(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Decoder]:
    def load(family: str, quantization: str | None = None, **changes: Any) -> Decoder:
        folder = tiny_checkpoint(family, **changes)
        return load_decoder(
            folder,
            load_model_config(folder),
            dtype=torch.float32,
            device=torch.device("cpu"),
            quantization=quantization,
        )

    return load


def first_logits(decoder: Decoder, tokens: torch.Tensor, backend: str) -> torch.Tensor:
    """Of sequences of one token each, in one step: attention returns the token's own value."""
    run = Run(decoder, backend, len(tokens), 4)
    return run.step([(number, token) for number, token in enumerate(tokens.split(1))])


@pytest.mark.parametrize("quantization", [None, quantized("int8")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_alone_and_among_others(
    load: Callable[..., Decoder], family: str, quantization: str | None
) -> None:
    decoder, tokens = load(family, quantization), prompt(37)
    together = first_logits(decoder, tokens, "compiled")
    for first, last in ((0, 1), (5, 6), (7, 9), (20, 33)):
        alone = first_logits(decoder, tokens[first:last], "compiled")
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("quantization", [None, quantized("int8")])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_experts_are_those_of_single_operations(
    load: Callable[..., Decoder], family: str, quantization: str | None
) -> None:
    """With 1,040 rows, which pass in two parts, on one thread and on two."""
    decoder, tokens = load(family, quantization), prompt(1040)
    compiled = first_logits(decoder, tokens, "compiled")
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert torch.equal(first_logits(decoder, tokens, "compiled"), compiled)
    finally:
        torch.set_num_threads(threads)
    single = first_logits(decoder, tokens, "cpu")
    if quantization is None:
        torch.testing.assert_close(compiled, single, atol=1e-4, rtol=1e-4)
    else:  # a rounding that falls the other way is a level of 127
        assert (compiled - single).norm() < 0.02 * single.norm()


def test_an_expert_that_no_row_chooses_is_not_read(load: Callable[..., Decoder]) -> None:
    decoder, tokens = load("mixtral"), prompt(8)
    expected = first_logits(decoder, tokens, "compiled")
    used: list[set[int]] = [set() for _ in decoder.layers]
    for layer, mine in zip(decoder.layers, used, strict=True):
        choose = layer.experts.choose

        def noted(normed: torch.Tensor, choose: Any = choose, mine: set[int] = mine) -> Any:
            found = choose(normed)
            mine.update(found[1].flatten().tolist())
            return found

        layer.experts.choose = noted
    first_logits(decoder, tokens[:1], "cpu")
    for layer, mine in zip(decoder.layers, used, strict=True):
        assert len(mine) == 2
        for number, expert in enumerate(layer.experts.experts):
            if number not in mine:
                expert.gate_up.packed.memory.fill_(torch.nan)
    assert torch.equal(first_logits(decoder, tokens[:1], "compiled"), expected[:1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only without a GPU")
@pytest.mark.model("triton")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_a_gpu_are_those_of_transformers(
    load: Callable[..., Decoder],
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """Interpreted; a layer's weights of a kind lie in one tensor, and nowhere else."""
    from coppice.kernels.triton import experts as grouped

    monkeypatch.setattr(experts, "grouped_products", lambda device: grouped)
    calls = []
    mix = grouped.mix_experts
    monkeypatch.setattr(
        grouped,
        "mix_experts",
        lambda *args, **more: calls.append(len(args[0])) or mix(*args, **more),
    )
    decoder, tokens = load(family), prompt(41)
    reference = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(family), attn_implementation="eager", dtype=torch.float32
    ).eval()
    ours = Run(decoder, "reference", 1, 16).step([(0, tokens)])
    assert_near(ours, expected_logits(reference, tokens))
    assert calls == [41] * len(decoder.layers)
    for layer in decoder.layers:
        weights = [expert.gate_up.weight for expert in layer.experts.experts]
        assert len({each.untyped_storage().data_ptr() for each in weights}) == 1
        assert weights[0].untyped_storage().nbytes() == sum(each.nbytes for each in weights)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are replaced")
def test_experts_in_8_bits_are_refused_on_a_gpu(
    load: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "grouped_products", lambda device: object())
    with pytest.raises(ValueError, match="quantization must be None"):
        load("mixtral", "int8")
    spec = Experts(4, 2, 32, normalised=True)
    with pytest.raises(ValueError, match=r"float weights only so far, and Fp8Linear is asked for"):
        experts.ExpertMixture(64, spec, linear=Fp8Linear, dtype=torch.bfloat16, device=META)
