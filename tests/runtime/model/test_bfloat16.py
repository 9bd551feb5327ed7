"""Products of bfloat16 on a CPU: weights and rows are rounded, sums and all else are float32's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from coppice import Engine, EngineConfig, SamplingParams
from coppice.kernels.cpu.code import processor
from coppice.kernels.cpu.layer.matmul import float_products
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear.eight_bit import Int8Linear
from coppice.runtime.model.linear.select import linear_class
from coppice.runtime.model.linear.sixteen_bit import BFloat16Linear, HalfLinear
from coppice.runtime.requests.beam_search_params import BeamSearchParams

CPU = torch.device("cpu")
TOKENS = 6
SAMPLED = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3)


@pytest.fixture(params=["compiled", "torch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Those of this processor, where it has them, and those of torch."""
    kernels = float_products.float_kernels()
    if request.param == "torch":
        if kernels is not None:
            monkeypatch.setattr(kernels, "HAS_PAIRS", False)
    elif kernels is None or not kernels.HAS_PAIRS:
        pytest.skip("this processor has no AVX512-BF16")
    return str(request.param)


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make(outputs: int, inputs: int, *, bias: bool) -> tuple[BFloat16Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    linear = BFloat16Linear(inputs, outputs, bias=bias, dtype=torch.float32, device=CPU)
    weight = torch.randn(outputs, inputs, generator=generator)
    linear.fill_weight(0, weight)
    if bias:
        linear.fill_bias(0, torch.randn(outputs, generator=generator))
    linear.pack()
    return linear, weight


@pytest.mark.parametrize("shape", [(48, 72), (150, 72), (96, 34), (200, 640), (1, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_rounded_numbers(
    products: str, shape: tuple[int, int], bias: bool
) -> None:
    """For every number of rows that is compiled apart, over whole panels and a part of one."""
    linear, weight = make(*shape, bias=bias)
    assert (linear.packed is None) == (products == "torch")
    exact_weight = weight.bfloat16().double()
    # torch rounds results to bfloat16, too.
    close = {"rtol": 1e-5, "atol": 1e-4}
    if products == "torch":
        close = {"rtol": 2**-8, "atol": 0.02}  # of the sum before the bias is added
    for rows in (0, 1, 2, 3, 4, 7, 8, 15, 16, 33, 1500):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
        exact = x.bfloat16().double() @ exact_weight.t()
        if linear.bias is not None:
            exact += linear.bias.double()
        torch.testing.assert_close(linear(x), exact.float(), **close)


def test_a_row_does_not_depend_on_those_beside_it(products: str, one_thread_after: None) -> None:
    linear, _ = make(200, 640, bias=True)
    x = torch.randn(900, 640, generator=torch.Generator().manual_seed(1))
    together = linear(x)
    for row in (0, 7, 450, 899):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    torch.set_num_threads(1)
    assert torch.equal(linear(x), together)


def test_numbers_that_are_none_stay_visible(products: str) -> None:
    linear, _ = make(48, 16, bias=False)
    x = torch.ones(3, 16)
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    assert linear(x)[0].isfinite().all()
    assert linear(x)[1].isnan().all()
    assert not linear(x)[2].isfinite().any()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 300, (35,), generator=generator).tolist()
    return [[*shared, 5 + i, 9, *shared[: 3 * i]] for i in range(4)]


def start(folder: Path, **options: object) -> Engine:
    limits = {"kv_cache_tokens": 1024, "max_num_seqs": 8, "dtype": "bfloat16"}
    # Drafts are verified with attention's sums in another order, which torch's products round.
    limits["speculation"] = "off"
    return Engine(EngineConfig(model=str(folder), **(limits | options)))


def run(engine: Engine, *, alone: bool = False) -> list[list[tuple[int, float]]]:
    """Tokens and their logprobs, of all prompts at once or one after the other."""
    made: list[list[tuple[int, float]]] = [[] for _ in prompts()]
    for number, prompt in enumerate(prompts()):
        engine.add_request(str(number), prompt, SAMPLED)
        while engine.has_unfinished() and (alone or number == len(made) - 1):
            for step in engine.step():
                assert step.logprobs is not None
                found = zip(step.new_token_ids, step.logprobs.logprobs.tolist(), strict=True)
                made[int(step.request_id)] += found
            engine.check()
    return made


def rounded_reference(folder: Path) -> list[list[tuple[int, float]]]:
    """transformers' greedy tokens where operands of products and embeddings are rounded.

    Beside each token stands how far its logit is above the next one.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            part.weight.data = part.weight.data.bfloat16().float()
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(lambda _, x: (x[0].bfloat16().float(),))
    rows = []
    for prompt in prompts():
        made = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = [logits[0].topk(2).values.tolist() for logits in made.logits]
        tokens = made.sequences[0, len(prompt) :].tolist()
        rows.append([(token, high - low) for token, (high, low) in zip(tokens, best, strict=True)])
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_answers_are_those_of_rounded_products(
    tiny_checkpoint: Callable[..., Path], family: str, products: str
) -> None:
    folder = tiny_checkpoint(family)
    engine = start(folder, kv_cache_dtype="float32")
    decoder = engine.runner.decoder
    assert type(decoder.head) is BFloat16Linear
    assert (decoder.compiled is None) == (products == "torch")
    assert engine.runner.kv_cache[0].k.dtype == torch.float32
    tokens = [[token for token, _ in row] for row in run(engine)]
    # A sum in another order can be rounded to the next number: that turns near-ties. torch's
    # products also round their results.
    near = 0.02 if products == "compiled" else 0.2
    for row, expected in zip(tokens, rounded_reference(folder), strict=True):
        for token, (other, gap) in zip(row, expected, strict=True):
            if token != other:
                assert gap < near
                break


INT8 = {"dtype": "float32", "quantization": "int8"}
INT4 = {"dtype": "float32", "quantization": "int4"}
HALF_CACHE = {"dtype": "float32", "kv_cache_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("llama", INT8),
        ("llama", INT4),
        ("llama", HALF_CACHE),
    ],
    ids=["llama", "mixtral", "gpt_oss", "int8", "int4", "cache"],
)
def test_a_request_has_the_same_bits_alone_and_in_a_batch_cold_and_warm(
    tiny_checkpoint: Callable[..., Path],
    family: str,
    options: dict[str, str],
    one_thread_after: None,
) -> None:
    """Over a float32 cache attention adds in another order where a row's keys are divided."""
    torch.set_num_threads(2)
    folder = tiny_checkpoint(family)
    expected = run(start(folder, page_size=16, **options), alone=True)
    tokens = [[token for token, _ in row] for row in expected]

    def check(found: list[list[tuple[int, float]]], where: str) -> None:
        if not options:
            assert found == expected, where
        assert [[token for token, _ in row] for row in found] == tokens, where
        for row, other in zip(found, expected, strict=True):
            close = pytest.approx([each for _, each in other], abs=1e-3)
            assert [each for _, each in row] == close, where

    engine = start(folder, page_size=16, **options)
    check(run(engine), "in a batch")
    check(run(engine), "from the cache")
    check(run(engine, alone=True), "alone")
    torch.set_num_threads(1)
    check(run(start(folder, page_size=16, **options)), "on one thread")
    for page_size in (1, 7):
        found = run(start(folder, page_size=page_size, **options))
        assert [[token for token, _ in row] for row in found] == tokens


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_multiply_rounded_numbers(
    tiny_checkpoint: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens' logprobs are those of layers that run one by one, in float32."""
    kernels = float_products.float_kernels()
    if kernels is None or not kernels.HAS_PAIRS:
        pytest.skip("this processor has no AVX512-BF16")
    engine = start(tiny_checkpoint(family))
    assert engine.runner.decoder.compiled is not None
    mine = run(engine)

    def rounded(self: BFloat16Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.bfloat16().float(), self.weight.float(), self.bias)

    monkeypatch.setattr(kernels, "HAS_PAIRS", False)
    monkeypatch.setattr(BFloat16Linear, "forward", rounded)
    for one, other in zip(mine, run(start(tiny_checkpoint(family))), strict=True):
        assert one[0] == (other[0][0], pytest.approx(other[0][1], abs=0.005))


def test_beams_and_parallel_sampling_are_served(tiny_checkpoint: Callable[..., Path]) -> None:
    engine = start(tiny_checkpoint("llama"))
    sampled = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
    engine.add_request("n", prompts()[0], sampled)
    engine.add_beam_search("beams", prompts()[0], BeamSearchParams(beam_width=3, max_tokens=4))
    ended = set()
    while engine.has_unfinished():
        ended |= {(step.request_id, step.index) for step in engine.step() if step.finish_reason}
        engine.check()
    assert ended == {(name, index) for name in ("n", "beams") for index in range(3)}


def test_auto_takes_it_for_a_checkpoint_of_bfloat16(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, products: str
) -> None:
    """Where the compiled products are; ``float32`` keeps the weights, and multiplies in float32."""
    folder = tmp_path / "half"
    source = tiny_checkpoint("llama")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    expected = BFloat16Linear if products == "compiled" else HalfLinear
    assert type(start(folder, dtype="auto").runner.decoder.head) is expected
    assert type(start(folder, dtype="float32").runner.decoder.head) is HalfLinear
    assert type(start(source, dtype="auto").runner.decoder.head) is Linear
    for options in ({"quantization": "int8"}, {"attention_backend": "reference"}):
        other = start(folder, dtype="auto", **options).runner.decoder
        assert type(other.layers[0].down) in (Int8Linear, HalfLinear)


def test_a_processor_without_instructions_for_it_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for features, warnings in (({"avx2", "fma"}, 1), ({"bf16"}, 0), ({"amx-bf16"}, 0)):
        monkeypatch.setattr(processor, "features", lambda found=features: frozenset(found))
        caplog.clear()
        assert linear_class(None, CPU, torch.float32, bfloat16=True) is BFloat16Linear
        assert len(caplog.records) == warnings
        assert all("no instructions for it" in each.message for each in caplog.records)


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"attention_backend": "cpu", "quantization": "int4"}]
)
def test_int8_is_not_also_bfloat16(
    tiny_checkpoint: Callable[..., Path], options: dict[str, str]
) -> None:
    kind = options["quantization"]
    told = f"dtype is 'bfloat16'; with quantization '{kind}' .* must be 'auto' or 'float32'"
    with pytest.raises(ValueError, match=told):
        start(tiny_checkpoint("llama"), **options)
