"""Weights of 4 and 8 bits in groups, on a CPU: made of floats, and kept as files store them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from needed_products import needs_products

from coppice.kernels.cpu.layer.matmul import group_products
from coppice.kernels.cpu.layer.matmul.grouped import (
    Grouped,
    joined,
    packed_nibbles,
    rounded,
    unpacked_nibbles,
)
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.families.registry import FAMILIES
from coppice.runtime.model.linear.eight_bit import Int8Linear
from coppice.runtime.model.linear.grouped import Int4Linear, WiderInt4Linear
from coppice.runtime.model.linear.select import linear_class
from coppice.runtime.model.weights import load_decoder
from coppice.runtime.planning import numbers as parameters
from coppice.runtime.planning import weights as plan
from coppice.runtime.requests.sampling_params import SamplingParams

CPU = torch.device("cpu")
SHARED = [5, 9, 33, 7, 12, 81, 44, 3, 3, 17, 60, 21, 90, 8, 14, 6, 30, 2, 55]
#: Families that differ most: a plain one, windows and soft-caps, sinks, experts.
SHOWN = ("llama", "gemma2", "gpt_oss", "qwen3_moe")
PROMPTS = [[*SHARED, 4], [*SHARED, 71, 23, 9], SHARED[:13], [40] * 37, [*SHARED, 4, 18]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(params=["compiled", "torch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Those of this processor, where it has them, and those of torch."""
    if request.param == "torch":
        monkeypatch.setattr(group_products, "group_kernels", lambda: None)
    elif group_products.group_kernels() is None:
        pytest.skip("this processor has neither VNNI nor AVX2")
    return str(request.param)


@pytest.fixture
def threads_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make(kind: type[Int4Linear], outputs: int, inputs: int, *, bias: bool = True) -> Any:
    """A linear layer of two parts, its numbers as they are kept, and those it was made of."""
    generator = torch.Generator().manual_seed(outputs)
    linear = kind(inputs, outputs, bias=bias, dtype=torch.float32, device=CPU)
    weight = torch.randn(outputs, inputs, generator=generator)
    linear.fill_weight(0, weight[: outputs // 2])
    linear.fill_weight(outputs // 2, weight[outputs // 2 :])
    if bias:
        linear.fill_bias(0, torch.randn(outputs, generator=generator))
    kept = linear.weight.numbers() * linear.weight_scale[:, None]
    linear.pack()
    return linear, kept, weight


def rows_rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    chunks = x.unflatten(1, (-1, group))
    factors = chunks.abs().amax(2, keepdim=True).clamp(min=1e-30) / 127
    return ((chunks / factors).round() * factors).flatten(1)


@pytest.mark.parametrize("kind", [Int4Linear, WiderInt4Linear])
@pytest.mark.parametrize("shape", [(48, 64), (150, 96), (7, 640), (200, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_kept_weight_with_rounded_rows(
    products: str, kind: type[Int4Linear], shape: tuple[int, int], bias: bool
) -> None:
    linear, kept, weight = make(kind, *shape, bias=bias)
    assert (linear.packed is None) == (products == "torch")
    x = torch.randn(15, shape[1], generator=torch.Generator().manual_seed(1))
    expected = F.linear(
        rows_rounded(x, 32).double(), kept.double(),
        None if linear.bias is None else linear.bias.double(),
    )  # fmt: skip
    # Where a level is a half, one of the two rounds it up and the other down.
    torch.testing.assert_close(linear(x).double(), expected, atol=2e-2, rtol=1e-4)
    close = (linear(x).double() - expected).abs() < 1e-4 * expected.abs().max()
    assert close.double().mean() > 0.98
    error = (kept - weight).norm() / weight.norm()
    assert error < (0.1 if kind is Int4Linear else 0.007)


def test_a_row_is_the_same_alone_in_a_batch_and_on_any_number_of_threads(
    products: str, threads_after: None
) -> None:
    linear, _, _ = make(Int4Linear, 1200, 448)
    x = torch.randn(37, 448)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        together = linear(x)
        for count in (1, 2, 5, 13):
            parts = torch.cat([linear(part) for part in x.split(count)])
            assert torch.equal(parts, together)
    assert linear(x[:0]).shape == (0, 1200)


def test_nibbles_are_packed_and_unpacked() -> None:
    levels = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    packed = packed_nibbles(levels)
    assert packed.shape == (5, 32)
    assert torch.equal(unpacked_nibbles(packed), levels)
    # The first four inputs are the low halves of the first four bytes.
    assert torch.equal(packed[:, :4] & 15, levels[:, :4])
    assert torch.equal(packed[:, :4] >> 4, levels[:, 4:8])


def test_levels_reach_no_farther_than_helps() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    low, high = weight.unflatten(1, (-1, 64)).aminmax(dim=2, keepdim=True)
    step = (high - low) / 15
    plain = ((weight.unflatten(1, (-1, 64)) - low) / step).round() * step + low
    ours = rounded(weight, 4, 64).numbers()
    assert (ours - weight).square().sum() < 0.97 * (plain.flatten(1) - weight).square().sum()
    constant = torch.full((3, 64), 0.3)
    assert torch.allclose(rounded(constant, 4, 64).numbers(), constant)
    for bits in (4, 8):
        assert not rounded(torch.zeros(2, 64), bits).numbers().any()


def test_parts_of_several_forms_stand_in_one_without_loss() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(3, 4, 128, generator=generator)
    four, eight = rounded(weight[0], 4, 64), rounded(weight[1], 8, 32)
    levels = torch.randint(0, 16, (4, 128), dtype=torch.uint8, generator=generator)
    middle = Grouped(packed_nibbles(levels), torch.rand(4, 1, generator=generator), None, 4)
    parts = [four, eight, middle]
    both = joined(parts)
    assert (both.bits, both.group, both.shape) == (8, 32, (12, 128))
    expected = torch.cat([part.numbers() for part in parts])
    torch.testing.assert_close(both.numbers(), expected, atol=1e-6, rtol=1e-6)
    assert joined([middle, middle]).offsets is None


@pytest.mark.parametrize("magnitude", [1e-9, 1.0, 1e6])
def test_scales_of_any_magnitude_keep_their_precision(products: str, magnitude: float) -> None:
    linear = Int4Linear(64, 8, bias=False, dtype=torch.float32, device=CPU)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(5)) * magnitude
    weight[3] = 0
    linear.fill_weight(0, weight)
    linear.pack()
    x = torch.randn(3, 64)
    expected = F.linear(x, weight)
    assert (linear(x) - expected).norm() < 0.15 * expected.norm()
    assert not linear(x)[:, 3].any()


def test_groups_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"inputs are multiples of 32.*from 48 to 96: take 'int8'"):
        Int4Linear(48, 96, bias=False, dtype=torch.float32, device=CPU)
    linear = Int4Linear(96, 8, bias=False, dtype=torch.float32, device=CPU)
    levels = torch.zeros(8, 48, dtype=torch.uint8)
    with pytest.raises(ValueError, match="groups of 48; it must be a multiple of 32"):
        linear.fill_weight(0, Grouped(levels, torch.ones(8, 2), None, 4))
    with pytest.raises(ValueError, match="'int4' runs on a CPU only; device is cuda"):
        linear_class("int4", torch.device("cuda"), torch.bfloat16)


def sizes(family: str) -> dict[str, int]:
    """Changes of a tiny model whose projections have inputs that are no multiples of 32."""
    return {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}


def start(path: Path, **options: Any) -> Engine:
    given = {"device": "cpu", "kv_cache_tokens": 2048, "page_size": 7, "quantization": "int4"}
    return Engine(EngineConfig(model=str(path), **given | options))


def run(engine: Engine, prompts: list[list[int]]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


@pytest.mark.model("int4")
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.slow] * (each not in SHOWN)) for each in FAMILIES],
)
def test_tokens_from_the_cache_equal_cold_ones(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    path = tiny_checkpoint(family, **sizes(family))
    engine = start(path)
    cold = run(engine, PROMPTS)
    assert run(engine, PROMPTS) == cold
    bare = start(path, page_size=16, enable_prefix_caching=False)
    for index, prompt in enumerate(PROMPTS):
        assert run(bare, [prompt])["0"] == cold[str(index)]


@needs_products("int4")
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_the_compiled_layers_take_them_and_the_head_is_int8(
    tiny_checkpoint: Callable[..., Path], threads_after: None, family: str
) -> None:
    path = tiny_checkpoint(family, **sizes(family))
    engine = start(path)
    decoder: Any = engine.runner.decoder
    assert decoder.compiled is not None
    assert type(decoder.head) is Int8Linear
    expected = run(engine, PROMPTS)
    decoder.compiled = None
    engine.reset_cache()
    assert run(engine, PROMPTS) == expected
    torch.set_num_threads(1)
    assert run(start(path, page_size=1), PROMPTS) == expected


def test_it_takes_the_memory_that_is_planned(tiny_checkpoint: Callable[..., Path]) -> None:
    from coppice.runtime.model.weight_size import weight_bytes

    folder = tiny_checkpoint("llama")
    config = load_model_config(folder)
    decoder: Any = load_decoder(
        folder, config, dtype=torch.float32, device=CPU, quantization="int4"
    )
    matrices = [decoder.embedding.nbytes, decoder.head.weight.nbytes]
    for layer in decoder.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            kept = linear.weight
            matrices.append(kept.levels.nbytes + kept.factors.nbytes + kept.offsets.nbytes)
    planned = weight_bytes(config, Int4Linear, torch.float32, CPU, decoder.embedding.dtype)
    assert 0.95 * planned < sum(matrices) < 1.1 * planned
    size = decoder.embedding.element_size()
    told = plan.weight_bytes(parameters.count(config), size, "int4").total
    assert 0.9 * told < sum(matrices) < 1.1 * told
