"""Weights in panels on a CPU, those of 16 bits as they are: results are float32's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coppice import Engine, EngineConfig, SamplingParams
from coppice.kernels.cpu.layer.matmul import float_products
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear.eight_bit import Int8Linear
from coppice.runtime.model.linear.sixteen_bit import Float16Linear, HalfLinear
from coppice.runtime.model.weights import load_decoder

pytestmark = pytest.mark.skipif(
    float_products.float_kernels() is None, reason="no compiled products of panels"
)
CPU = torch.device("cpu")
KINDS = {torch.bfloat16: HalfLinear, torch.float16: Float16Linear, torch.float32: Linear}
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    rows, columns = weight.shape
    linear = KINDS[weight.dtype](
        columns, rows, bias=bias is not None, dtype=torch.float32, device=CPU
    )
    linear.fill_weight(0, weight)
    if bias is not None:
        linear.fill_bias(0, bias)
    return linear


@pytest.fixture
def halved(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint whose tensors have become ``kind``, but for those named."""

    def make(
        family: str, keep: tuple[str, ...] = (), kind: torch.dtype = torch.bfloat16, **changes: Any
    ) -> Path:
        source = tiny_checkpoint(family, **changes)
        folder = tmp_path / "halved"
        shutil.copytree(source, folder)
        tensors = load_file(source / "model.safetensors")
        save_file(
            {name: t if name in keep else t.to(kind) for name, t in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        return folder

    return make


@kinds
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("outputs", [48, 150])
def test_a_product_is_that_of_float32_weights(
    biased: bool, outputs: int, kind: torch.dtype
) -> None:
    """For every number of rows that is compiled apart, over whole panels and a part of one."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, 72, generator=generator).to(kind)
    bias = torch.randn(outputs, generator=generator) if biased else None
    linear = make(weight, bias)
    linear.pack()
    assert not hasattr(linear, "weight"), "the memory of the weight is given up"
    for rows in (0, 1, 2, 3, 4, 7, 8, 15, 16, 41, 3000):
        x = torch.randn(rows, 72, generator=generator)
        exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        torch.testing.assert_close(linear(x), exact.float(), rtol=1e-4, atol=1e-4)


@kinds
def test_a_row_does_not_depend_on_those_beside_it(kind: torch.dtype) -> None:
    """Nor on how many threads work, or in which part of many rows it is."""
    linear = make(torch.randn(200, 640).to(kind), torch.randn(200))
    linear.pack()
    x = torch.randn(900, 640)
    together = linear(x)
    for row in (0, 7, 450, 899):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(linear(x), together)
    finally:
        torch.set_num_threads(threads)


def test_every_float16_becomes_itself() -> None:
    """The smallest, which have fewer bits, those that are none, and both zeros among them."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    linear = make(numbers.view(-1, 2))
    linear.pack()
    x = torch.eye(2)
    x[x == 0] = -0.0
    weights = numbers.view(-1, 2).float()
    finite = weights.isfinite().all(1)
    assert torch.equal(linear(x)[:, finite], weights[finite].t())
    assert linear(x)[:, ~finite].isfinite().logical_not().any(0).all()


def test_what_cannot_be_laid_out_is_multiplied_all_the_same() -> None:
    linear = make(torch.ones(4, 7).bfloat16(), torch.arange(4.0))
    linear.pack()
    assert linear.packed is None
    assert torch.equal(linear(torch.ones(2, 7)), 7 + torch.arange(4.0).expand(2, 4))


def test_numbers_that_are_none_stay_visible() -> None:
    linear = make(torch.ones(48, 16).bfloat16())
    linear.pack()
    x = torch.ones(3, 16)
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    assert torch.equal(linear(x)[0], torch.full((48,), 16.0))
    assert linear(x)[1].isnan().all()
    assert linear(x)[2].isinf().all()


@kinds
@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)]
)
def test_answers_are_those_of_transformers(
    halved: Callable[..., Path], family: str, tied: bool, kind: torch.dtype
) -> None:
    folder = halved(family, kind=kind, tie_word_embeddings=tied)
    engine = Engine(EngineConfig(model=str(folder), kv_cache_tokens=1024))
    decoder = engine.runner.decoder
    assert type(decoder.head) is KINDS[kind]
    assert decoder.compiled is not None, "the layers are compiled"
    matrices = {
        name: p.dtype
        for name, p in decoder.named_parameters()
        if p.dim() > 1 and "norm" not in name
    }
    kept = {} if tied else {"embedding": kind}
    assert matrices == kept, "the other weights are laid out, and not kept twice"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shared = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [[*shared, 5 + i, 9] for i in range(5)]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for index, each in enumerate(prompts):
        engine.add_request(str(index), each, greedy)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
    for index, each in enumerate(prompts):
        with torch.inference_mode():
            expected = reference.generate(
                torch.tensor([each]), max_new_tokens=8, min_new_tokens=8, do_sample=False
            )
        assert answers[str(index)] == expected[0, len(each) :].tolist()


@pytest.mark.parametrize("shape", [(100, 8), (96, 2), (1, 34), (577, 576)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_found_in_the_packed_weight(kind: torch.dtype, shape: tuple[int, int]) -> None:
    rows, width = shape
    linear = KINDS[kind](width, rows, bias=False, dtype=torch.float32, device=CPU)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind)
    linear.fill_weight(0, weight)
    linear.pack()
    indices = torch.cat((torch.arange(rows), torch.tensor([0, rows - 1, rows - 1])))
    found = float_products.rows_of(linear.packed, indices)
    assert found.dtype == kind
    assert torch.equal(found, weight[indices])
    assert float_products.rows_of(linear.packed, indices[:0]).shape == (0, width)


def test_a_checkpoint_with_one_wider_matrix_is_float32(halved: Callable[..., Path]) -> None:
    """Its numbers would not survive in 16 bits."""
    wide = "model.layers.0.mlp.down_proj.weight"
    folder = halved("llama", keep=(wide,))
    decoder = load_decoder(folder, load_model_config(folder), dtype=torch.float32, device=CPU)
    down = decoder.layers[0].down
    assert type(down) is Linear
    assert torch.equal(down.weight, load_file(folder / "model.safetensors")[wide])
    assert decoder.embedding.dtype == torch.float32


def test_a_checkpoint_of_both_types_is_float32(halved: Callable[..., Path]) -> None:
    folder = halved("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].half()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    decoder = load_decoder(folder, load_model_config(folder), dtype=torch.float32, device=CPU)
    assert type(decoder.layers[0].down) is type(decoder.head) is Linear


def test_other_kinds_of_weights_are_as_before(halved: Callable[..., Path]) -> None:
    folder = halved("llama")
    config = load_model_config(folder)
    place: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    int8 = load_decoder(folder, config, quantization="int8", **place)
    assert type(int8.head) is Int8Linear
    assert int8.embedding.dtype == torch.bfloat16
    assert type(load_decoder(folder, config, load_format="dummy", **place).head) is Linear
    bfloat16 = load_decoder(folder, config, dtype=torch.bfloat16, device=CPU)
    assert type(bfloat16.head) is Linear
