"""A KV cache in bfloat16 on a CPU: the same tokens warm and cold, alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams

SHARED = [5, 9, 33, 7, 12, 81, 44, 3, 3, 17, 60, 21, 90, 8, 14, 6, 30, 2, 55]
PROMPTS = [[*SHARED, 4], [*SHARED, 71, 23, 9], SHARED[:13], [40] * 37, [*SHARED, 4, 18]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=9, ignore_eos=True)


def start(path: Path, **options: Any) -> Engine:
    given = {"device": "cpu", "kv_cache_tokens": 2048, "page_size": 7}
    given |= {"kv_cache_dtype": "bfloat16"}
    return Engine(EngineConfig(model=str(path), **given | options))


def run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> dict[tuple[str, int], list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    return finish(engine)


def finish(engine: Engine) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.check()
    return tokens


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_warm_equals_cold_and_alone_equals_a_batch(
    tiny_checkpoint: Callable[..., Path], family: str, page_size: int
) -> None:
    path = tiny_checkpoint(family)
    engine = start(path, page_size=page_size)
    assert {each.k.dtype for each in engine.runner.kv_cache} == {torch.bfloat16}
    cold = run(engine, PROMPTS)
    before = make_report(engine).hit_tokens
    assert run(engine, PROMPTS) == cold
    assert make_report(engine).hit_tokens > before
    bare = start(path, page_size=page_size, enable_prefix_caching=False)
    for index, prompt in enumerate(PROMPTS):
        assert run(bare, [prompt])["0", 0] == cold[str(index), 0]
    reference = start(path, page_size=page_size, attention_backend="reference")
    assert run(reference, PROMPTS) == cold


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_it_goes_with_products_of_fewer_bits(
    tiny_checkpoint: Callable[..., Path], options: dict[str, str]
) -> None:
    path = tiny_checkpoint("qwen3")
    engine = start(path, **options)
    assert {each.k.dtype for each in engine.runner.kv_cache} == {torch.bfloat16}
    cold = run(engine, PROMPTS)
    assert run(engine, PROMPTS) == cold
    bare = start(path, page_size=1, enable_prefix_caching=False, **options)
    for index, prompt in enumerate(PROMPTS):
        assert run(bare, [prompt])["0", 0] == cold[str(index), 0]


@pytest.mark.parametrize("implementation", ["coppice", "transformers"])
def test_copied_pages_and_preemption_change_nothing(
    tiny_checkpoint: Callable[..., Path], implementation: str
) -> None:
    path = tiny_checkpoint("llama")
    roomy = start(path, model_impl=implementation)
    expected = run(roomy, PROMPTS[:3], SAMPLED)
    assert len(expected) == 12
    alone = start(path, model_impl=implementation, enable_prefix_caching=False)
    assert run(alone, PROMPTS[:3], SAMPLED) == expected
    tight = start(path, model_impl=implementation, kv_cache_tokens=70)
    assert run(tight, PROMPTS[:3], SAMPLED) == expected
    assert make_report(tight).preemptions > 0
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    results = []
    for engine in (roomy, alone):
        engine.add_beam_search("beams", PROMPTS[0], beams)
        results.append(finish(engine))
    assert results[0] == results[1]


def test_a_page_takes_half_of_the_memory(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("llama")
    sizes = []
    for kind in ("auto", "bfloat16"):
        runner = start(path, kv_cache_dtype=kind).runner
        sizes.append(sum(each.k.nbytes + each.v.nbytes for each in runner.kv_cache))
        assert f"x {4 if kind == 'auto' else 2} bytes" in runner.memory
    assert sizes[0] == 2 * sizes[1]


def test_by_default_the_cache_has_the_type_of_the_products(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    path = tiny_checkpoint("llama")
    for options, expected in (
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"quantization": "int8"}, torch.float32),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, torch.float32),
    ):
        runner = start(path, **{"kv_cache_dtype": "auto"} | options).runner
        assert {each.k.dtype for each in runner.kv_cache} == {expected}, options


def test_types_that_a_cpu_does_not_have_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("llama")
    with pytest.raises(
        ValueError, match=r"'fp8'; with the cpu.*must be 'auto' or 'float32' or 'bfloat16'$"
    ):
        start(path, kv_cache_dtype="fp8")
    with pytest.raises(
        ValueError, match=r"kv_cache_dtype must be one of auto, float32, bfloat16, fp8"
    ):
        start(path, kv_cache_dtype="bf16")
    with pytest.raises(
        ValueError, match=r"'bfloat16'; with the reference.*float16.*'auto' or 'fp8'"
    ):
        start(path, dtype="float16", attention_backend="reference")
