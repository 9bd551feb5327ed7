"""8-bit projections: how far from float they are, and that a token's result is its own.

Those of 8-bit floats run here with torch's product for CPUs, which engines on a GPU alone get.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mixed_requests import greedy, make_engine, make_prompts, prompt_logprobs
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoTokenizer

from coppice.frontend.demo import run as demo
from coppice.frontend.demo.facts import make_document
from coppice.kernels.cpu.layer.matmul.int8_products import panel_kernels
from coppice.runtime.model import weights
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear import eight_bit, select
from coppice.runtime.model.linear.eight_bit import Fp8Linear, Int8Linear
from coppice.runtime.model.linear.select import linear_class
from coppice.runtime.model.weights import load_decoder
from coppice.runtime.report.gather import make_report

pytestmark = pytest.mark.usefixtures("scaled_product")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEMO = Path(demo.__file__).parent / "model"


class PackedInt8Linear(Int8Linear):
    """Laid out for the processor's dot products of bytes when it is first used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            self.pack()
            assert self.packed is not None
        return super().forward(x)


#: Each kind, and how far its product may be from the float one.
KINDS = pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Int8Linear, 0.02),
        pytest.param(
            PackedInt8Linear,
            0.02,
            marks=pytest.mark.skipif(panel_kernels() is None, reason="without VNNI and AVX2"),
        ),
        (Fp8Linear, 0.05),
    ],
)


def make(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    kind: type[Linear] = Int8Linear,
    dtype: torch.dtype = torch.float32,
) -> Linear:
    rows, columns = weight.shape
    linear = kind(columns, rows, bias=bias is not None, dtype=dtype, device=CPU)
    linear.fill_weight(0, weight)
    if bias is not None:
        linear.fill_bias(0, bias)
    return linear


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("with_bias", [False, True])
@KINDS
def test_is_near_the_float_product(
    tokens: int, with_bias: bool, kind: type[Linear], error: float
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(144, 96, generator=generator)
    bias = torch.randn(144, generator=generator) if with_bias else None
    x = torch.randn(tokens, 96, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        ours = make(weight, bias, kind, dtype)(x.to(dtype))
        assert ours.dtype == dtype
        assert ours.shape == (tokens, 144)
        assert relative_error(ours.float(), F.linear(x, weight, bias)) < error


@KINDS
def test_a_token_does_not_depend_on_its_batch(kind: type[Linear], error: float) -> None:
    """Even beside a token a thousand times larger; bit for bit, where sums are of integers."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(80, 64, generator=generator), torch.randn(80, generator=generator)
    linear = make(weight, bias, kind)
    x = torch.randn(33, 64, generator=generator)
    x[5] *= 1000
    together = linear(x)
    for part in (1, 2, 8, 20):
        apart = torch.cat([linear(chunk) for chunk in x.split(part)])
        rounding = 1e-6 if kind is Fp8Linear else 0
        assert ((apart - together).norm(dim=1) <= rounding * together.norm(dim=1)).all()


@KINDS
def test_zeros_and_no_tokens_at_all(kind: type[Linear], error: float) -> None:
    linear = make(torch.randn(16, 32), torch.arange(16.0), kind)
    assert torch.equal(linear(torch.zeros(2, 32)), torch.arange(16.0).expand(2, 16))
    assert linear(torch.empty(0, 32)).shape == (0, 16)
    zeros = make(torch.zeros(16, 32), None, kind)(torch.randn(3, 32))
    assert torch.equal(zeros, torch.zeros(3, 16))


@KINDS
def test_broken_activations_stay_visible(kind: type[Linear], error: float) -> None:
    """A NaN must come out as NaN, not as some number."""
    x = torch.randn(2, 32)
    x[1, 3] = torch.nan
    out = make(torch.randn(16, 32), None, kind)(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@KINDS
def test_parts_are_quantized_alone(kind: type[Linear], error: float) -> None:
    """Queries, keys and values packed below one another keep their own scales."""
    small, large = torch.randn(16, 32), 100 * torch.randn(16, 32)
    packed = make(torch.zeros(32, 32), None, kind)
    packed.fill_weight(0, small)
    packed.fill_weight(16, large)
    x = torch.randn(4, 32)
    expected = torch.cat((make(small, None, kind)(x), make(large, None, kind)(x)), dim=-1)
    assert torch.equal(packed(x), expected)


@KINDS
def test_long_weights_are_quantized_in_blocks(
    monkeypatch: pytest.MonkeyPatch, kind: type[Linear], error: float
) -> None:
    weight = torch.randn(48, 32)
    whole = make(weight, None, kind)
    monkeypatch.setattr(eight_bit, "_BLOCK_ROWS", 20)
    monkeypatch.setattr(eight_bit, "_BLOCK", 20 * 32)
    in_blocks = make(weight, None, kind)
    assert torch.equal(in_blocks.weight.float(), whole.weight.float())
    assert torch.equal(in_blocks.weight_scale, whole.weight_scale)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Linear]], None]:
    """Decoders have projections of this kind from then on, also where others are asked for."""
    return lambda kind: monkeypatch.setattr(weights, "linear_class", lambda *_, **__: kind)


@pytest.mark.parametrize("tied", [False, True])
@KINDS
def test_a_quantized_model_stays_near_its_float_one(
    tiny_checkpoint: Callable[..., Path],
    use: Callable[[type[Linear]], None],
    family: str,
    tied: bool,
    kind: type[Linear],
    error: float,
) -> None:
    folder = tiny_checkpoint(family, tie_word_embeddings=tied)
    config = load_model_config(folder)
    exact = load_decoder(folder, config, dtype=torch.float32, device=CPU)
    use(kind)
    decoder = load_decoder(folder, config, dtype=torch.float32, device=CPU)
    assert torch.equal(decoder.embedding, exact.embedding)
    x = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(decoder.layers, exact.layers, strict=True):
        assert type(ours.qkv) is type(ours.gate_up) is type(ours.output) is type(ours.down) is kind
        assert relative_error(ours.qkv(x), theirs.qkv(x)) < error
        assert relative_error(ours.gate_up(x), theirs.gate_up(x)) < error
        # Four products and what SiLU makes of the first two.
        assert relative_error(ours.feed_forward(x), theirs.feed_forward(x)) < 2 * error
    assert relative_error(decoder.head(x), exact.head(x)) < error
    assert (type(decoder.head) is Linear) == (kind is Fp8Linear)
    assert decoder.head_is_embedding == (tied and kind is Fp8Linear)


@pytest.mark.slow
def test_text_stays_as_likely(use: Callable[[type[Linear]], None]) -> None:
    """The perplexity of a handbook of the demo, and each token's own logprob."""
    text = make_document(7, 25, "eval").text
    tokens = AutoTokenizer.from_pretrained(DEMO)(text)["input_ids"]
    found = {}
    for kind in (Linear, Int8Linear, Fp8Linear):
        use(kind)
        found[kind] = prompt_logprobs(make_engine(DEMO, device="cpu"), tokens)
    exact = found.pop(Linear)
    for kind, limit in ((Int8Linear, 0.06), (Fp8Linear, 0.15)):
        off = np.linalg.norm(found[kind] - exact) / np.linalg.norm(exact)
        assert 0 < off < limit, kind
        assert np.exp(exact.mean() - found[kind].mean()) == pytest.approx(1, abs=0.02), kind


@KINDS
def test_a_warm_request_gets_its_cold_tokens(
    tiny_checkpoint: Callable[..., Path],
    use: Callable[[type[Linear]], None],
    kind: type[Linear],
    error: float,
) -> None:
    use(kind)
    engine = make_engine(tiny_checkpoint("qwen2"), device="cpu")
    prompts = make_prompts(60)
    cold = greedy(engine, prompts, 8)
    assert greedy(engine, prompts, 8) == cold
    assert [greedy(engine, [prompt], 8)[0] for prompt in prompts] == cold
    assert make_report(engine).hit_tokens > 0


@pytest.mark.skipif(panel_kernels() is None, reason="without VNNI and AVX2")
@pytest.mark.parametrize("columns", [4, 40])
@pytest.mark.parametrize("rows", [1, 47, 48, 49, 300])
@pytest.mark.parametrize("tokens", [*range(1, 10), 700])
def test_packed_products_are_exact(tokens: int, rows: int, columns: int) -> None:
    """For full and partly filled panels and groups of rows, on one thread and on several."""
    generator = torch.Generator().manual_seed(0)
    linear = make(torch.randn(rows, columns, generator=generator), torch.randn(rows))
    x = torch.randn(tokens, columns, generator=generator)
    expected = linear(x)
    linear.pack()
    assert linear.packed is not None
    torch.testing.assert_close(linear(x), expected, rtol=1e-6, atol=1e-6)


def test_what_four_does_not_divide_is_not_packed() -> None:
    weight, x = torch.randn(16, 30), torch.randn(3, 30)
    linear = make(weight)
    linear.pack()
    assert linear.packed is None
    assert relative_error(linear(x), F.linear(x, weight)) < 0.02


@pytest.mark.model("int8")
def test_compiled_layers_give_what_the_operations_give(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    engine = make_engine(tiny_checkpoint(family), device="cpu", quantization="int8")
    tokens = make_prompts(60)[0]
    together = prompt_logprobs(engine, tokens)
    engine.reset_cache()
    engine.runner.decoder.compiled = None
    apart = prompt_logprobs(engine, tokens)
    # A difference of the last bit may round an activation to another level.
    assert np.linalg.norm(together - apart) < 0.01 * np.linalg.norm(apart)


def test_takes_a_quarter_of_the_memory(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("llama")
    config = load_model_config(folder)
    decoder = load_decoder(folder, config, dtype=torch.float32, device=CPU, quantization="int8")
    for linear in decoder.modules():
        if isinstance(linear, Int8Linear):
            kept = sum(p.numel() * p.element_size() for p in linear.parameters())
            rows, columns = linear.weight.shape
            assert kept == rows * columns + 4 * rows


def test_names_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear_class(None, CUDA, torch.float16) is Linear
    assert linear_class("int8", CPU, torch.float32) is Int8Linear
    chip = SimpleNamespace(major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    assert linear_class("fp8", CUDA, torch.bfloat16) is Fp8Linear
    with pytest.raises(ValueError, match="'fp8' computes in bfloat16; dtype is float16"):
        linear_class("fp8", CUDA, torch.float16)
    chip.minor = 6
    with pytest.raises(ValueError, match=r"capability 8\.9 or later; this one has 8\.6"):
        linear_class("fp8", CUDA, torch.bfloat16)
    with pytest.raises(ValueError, match="'int8' runs on a CPU only; device is cuda, which takes"):
        linear_class("int8", CUDA, torch.bfloat16)
    with pytest.raises(ValueError, match="'fp8' runs on a GPU only; device is cpu, which takes"):
        linear_class("fp8", CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="multiples of 16; this model has one from 96 to 100"):
        Fp8Linear(96, 100, bias=False, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize("tokens", [1, 5, 256])
def test_the_product_on_a_gpu_takes_these_layouts(tokens: int) -> None:
    """As far as torch itself checks them where tensors have no values."""
    with FakeTensorMode():
        linear = Fp8Linear(64, 48, bias=True, dtype=torch.bfloat16, device=CUDA)
        linear._quantize = eight_bit.quantize_e4m3
        out = linear(torch.empty(tokens, 64, dtype=torch.bfloat16, device=CUDA))
    assert (out.device.type, out.dtype, out.shape) == ("cuda", torch.bfloat16, (tokens, 48))


def _saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: exact(a, b).clamp_(-(2**15), 2**15 - 1))


def test_refuses_a_machine_whose_product_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    _saturate(monkeypatch)
    monkeypatch.setattr(select, "panel_kernels", lambda: None)
    with pytest.raises(ValueError, match="this CPU's saturates"):
        linear_class("int8", CPU, torch.float32)


@pytest.mark.skipif(panel_kernels() is None, reason="without VNNI and AVX2")
def test_a_product_that_saturates_matters_only_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _saturate(monkeypatch)
    kind = linear_class("int8", CPU, torch.float32)
    for inputs in (8, 6):
        linear = kind(inputs, 4, bias=False, dtype=torch.float32, device=CPU)
        linear.fill_weight(0, torch.ones(4, inputs))
        if inputs % 4 == 0:
            linear.pack()
            assert linear.packed is not None
        else:
            with pytest.raises(ValueError, match="this CPU's saturates"):
                linear.pack()


def test_refuses_a_torch_without_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not implemented for 'Char'")

    monkeypatch.setattr(torch, "_int_mm", missing)
    monkeypatch.setattr(select, "panel_kernels", lambda: None)
    with pytest.raises(ValueError, match="not implemented for 'Char'"):
        linear_class("int8", CPU, torch.float32)
