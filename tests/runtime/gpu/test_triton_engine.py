"""The whole engine with the Triton backend, interpreted on the CPU, against the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mixed_requests import (
    answers,
    greedy,
    lines_and_bits,
    make_engine,
    make_prompts,
    prompt_logprobs,
)

from coppice.kernels.triton.base import INTERPRETED
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear.deterministic import SteadyLinear
from coppice.runtime.runner.cache import scales

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="with a GPU test_cuda_engine.py does this, with compiled kernels"
)

STEM, TOKENS = 26, 4


@pytest.mark.slow
@pytest.mark.parametrize(("family", "page_size"), [("llama", 16), ("qwen3", 1)])
def test_every_kind_of_request_gets_the_cpu_backends_tokens(tiny_checkpoint, family, page_size):
    """Prefills in chunks, hits, forks and beams, with pages that are shared and copied."""
    found = {
        backend: answers(
            make_engine(
                tiny_checkpoint(family), device="cpu", attention_backend=backend,
                page_size=page_size,
            ),
            stem=STEM, tokens=TOKENS,
        )
        for backend in ("cpu", "triton")
    }  # fmt: skip
    scores = found["cpu"].pop("scores")
    assert found["triton"].pop("scores") == pytest.approx(scores, abs=1e-4)
    assert found["triton"] == found["cpu"]
    assert found["triton"]["warm"] == found["triton"]["cold"]


def test_deterministic_is_handed_to_the_backend_and_the_projections(tiny_checkpoint):
    path, options = tiny_checkpoint("llama"), {"device": "cpu", "attention_backend": "triton"}
    engine = make_engine(path, deterministic=True, **options)
    assert engine.runner.attention.deterministic
    products = [m for m in engine.runner.decoder.modules() if isinstance(m, Linear)]
    assert {type(each) for each in products} == {SteadyLinear}  # the head, too
    assert not make_engine(path, **options).runner.attention.deterministic
    prompts = make_prompts(20)[:2]
    assert greedy(engine, prompts, 3) == greedy(make_engine(path, device="cpu"), prompts, 3)
    with pytest.raises(ValueError, match="deterministic is True; attention_backend 'cpu'"):
        make_engine(path, device="cpu", deterministic=True)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.slow
def test_deterministic_answers_have_the_bits_of_a_cold_lone_request(tiny_checkpoint, family):
    """Logprobs of a prompt and of its answer: alone and cold, on a hit, in company, as samples."""
    path = tiny_checkpoint(family)
    options = {"device": "cpu", "attention_backend": "triton", "deterministic": True}
    stem, *_, again = company = make_prompts(STEM)
    engine = make_engine(path, **options)
    (cold,) = lines_and_bits(engine, [stem], 2)
    (hit,) = lines_and_bits(engine, [again], 2)  # the same tokens
    assert len(cold[0]) == 2 and hit == cold
    assert lines_and_bits(engine, company[:3], 2)[0] == cold  # below stretches that others hold too
    # In one chunk, other pages, other company, nothing cached.
    other = make_engine(path, page_size=1, max_num_batched_tokens=200, **options)
    assert lines_and_bits(other, [company[2], stem, company[1]], 2)[1] == cold
    # Lines of one request, sampled alike by their seed.
    seeded = {"temperature": 0.8, "seed": 3, "n": 2}
    assert lines_and_bits(other, [stem], 2, **seeded) == lines_and_bits(engine, [stem], 2, **seeded)


@pytest.mark.slow
def test_an_8_bit_cache_is_near_the_whole_one(tiny_checkpoint, monkeypatch):
    """What rounding keys and values to 3 bits after the point costs, and no more."""
    path = tiny_checkpoint("llama")
    monkeypatch.setattr(scales, "CALIBRATION_TOKENS", 64)
    prompt = make_prompts(STEM)[1]
    exact = prompt_logprobs(make_engine(path, device="cpu"), prompt)
    options = {"device": "cpu", "attention_backend": "triton", "max_num_batched_tokens": 64}
    engine = make_engine(path, kv_cache_dtype="fp8", **options)
    for cache in engine.runner.kv_cache:
        assert cache.k.dtype == cache.v.dtype == torch.float8_e4m3fn
        assert all(scale.shape == (2,) and (scale > 0).all() for scale in cache.scales)
    assert " x 16 x 1 bytes = " in engine.memory
    rounded = prompt_logprobs(engine, prompt)
    assert np.corrcoef(exact, rounded)[0, 1] > 0.95
    # Nothing reached the greatest number, so nothing was cut off.
    for cache in engine.runner.kv_cache:
        assert cache.k.float().abs().max() < 448 and cache.v.float().abs().max() < 448
        assert cache.k.float().abs().max() > 28 and cache.v.float().abs().max() > 28


def test_an_8_bit_cache_is_refused_by_name(tiny_checkpoint):
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'fp8'; with the cpu.*'auto'"):
        make_engine(tiny_checkpoint("llama"), device="cpu", kv_cache_dtype="fp8")
