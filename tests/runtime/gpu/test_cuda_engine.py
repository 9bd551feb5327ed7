"""The engine on a GPU against the engine on the CPU; without a GPU these tests are skipped."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from mixed_requests import (
    answers,
    joined,
    lines_and_bits,
    make_engine,
    make_prompts,
    prompt_logprobs,
    run,
)
from scripted_drafts import ScriptedDrafts

from coppice.runtime.model.linear import select
from coppice.runtime.model.linear.eight_bit import Fp8Linear
from coppice.runtime.report.gather import make_stats
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEM, TOKENS = 150, 16
ROOM = {"kv_cache_tokens": 8192, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_float32_gives_the_cpus_tokens(tiny_checkpoint, family, page_size):
    """Prefills in chunks, hits, forks and beams, with pages that are shared and copied."""
    found = {
        device: answers(
            make_engine(
                tiny_checkpoint(family), device=device, dtype="float32", page_size=page_size, **ROOM
            ),
            stem=STEM, tokens=TOKENS,
        )
        for device in ("cpu", "cuda")
    }  # fmt: skip
    scores = found["cpu"].pop("scores")
    assert found["cuda"].pop("scores") == pytest.approx(scores, abs=1e-3)
    assert found["cuda"] == found["cpu"]


def on_the_gpu(path, backend, **options):
    """An engine with that attention backend; the test is skipped where FlashInfer lacks kernels."""
    try:
        return make_engine(path, device="cuda", attention_backend=backend, **options)
    except ValueError as error:
        if backend != "flashinfer":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_bfloat16_is_as_near_to_float32_as_on_the_cpu(tiny_checkpoint, family, cache, backend):
    if cache == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit floats")
    prompt = make_prompts(STEM)[1]
    path = tiny_checkpoint(family, head_dim=128 if backend == "flashinfer" else 16)
    options = {"dtype": "bfloat16", "kv_cache_dtype": cache, **ROOM}
    exact = prompt_logprobs(make_engine(path, device="cpu", dtype="float32", **ROOM), prompt)
    engines = {
        "cpu": make_engine(path, device="cpu", attention_backend="reference", **options),
        "cuda": on_the_gpu(path, backend, **options),
    }
    off = {
        device: np.linalg.norm(prompt_logprobs(engine, prompt) - exact)
        for device, engine in engines.items()
    }
    assert off["cuda"] < 1.5 * off["cpu"]


@pytest.mark.usefixtures("scaled_product")
def test_fp8_weights_are_as_near_to_float32_as_on_the_cpu(tiny_checkpoint, family, monkeypatch):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit floats")
    path, prompt = tiny_checkpoint(family), make_prompts(STEM)[1]
    exact = prompt_logprobs(make_engine(path, device="cpu", dtype="float32", **ROOM), prompt)
    options = {"dtype": "bfloat16", "quantization": "fp8", **ROOM}
    engine = make_engine(path, device="cuda", **options)
    assert type(engine.runner.decoder.layers[0].qkv) is Fp8Linear
    off = np.linalg.norm(prompt_logprobs(engine, prompt) - exact)
    monkeypatch.setattr(select, "_check_fp8_device", lambda device: None)
    emulated = make_engine(path, device="cpu", attention_backend="reference", **options)
    assert off < 1.5 * np.linalg.norm(prompt_logprobs(emulated, prompt) - exact)


def test_auto_is_the_gpu_the_checkpoints_type_and_triton(tiny_checkpoint):
    engine = make_engine(
        tiny_checkpoint("llama"), device="auto", kv_cache_tokens=None,
        kv_cache_memory_fraction=0.01, max_num_batched_tokens=64,
    )  # fmt: skip
    runner = engine.runner
    assert (runner.device.type, runner.attention.name) == ("cuda", "triton")
    assert runner.kv_cache[0].k.dtype == runner.model_config.torch_dtype
    assert runner.kv_cache[0].k.device.type == "cuda"
    assert "on the GPU, less" in engine.memory
    with pytest.raises(ValueError, match=r"kv_cache_tokens=10000000000 does not fit.*remain"):
        make_engine(tiny_checkpoint("llama"), device="cuda", kv_cache_tokens=10**10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_answers_do_not_depend_on_hits(tiny_checkpoint, dtype):
    """Bit for bit: together and cold, together on hits, each by itself, on other pages."""
    prompts = make_prompts(STEM)
    options = {"device": "cuda", "dtype": dtype, "deterministic": True, **ROOM}
    engine = make_engine(tiny_checkpoint("llama"), **options)
    cold = lines_and_bits(engine, prompts, TOKENS)
    assert lines_and_bits(engine, prompts, TOKENS) == cold
    assert [lines_and_bits(engine, [prompt], TOKENS)[0] for prompt in prompts] == cold
    other = make_engine(tiny_checkpoint("llama"), page_size=1, **options)
    assert [lines_and_bits(other, [prompt], TOKENS)[0] for prompt in prompts] == cold


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_step_waits_for_nothing_but_the_tokens_of_the_one_before(tiny_checkpoint, eager, backend):
    """Torch itself reports every other wait of scheduling, forward pass and choice of tokens."""
    path = tiny_checkpoint("llama", head_dim=128)
    engine = on_the_gpu(path, backend, dtype="bfloat16", enforce_eager=eager, **ROOM)
    common = {"max_tokens": 60, "ignore_eos": True}
    kinds = [
        SamplingParams(n=2, temperature=0.9, top_k=7, seed=1, **common),
        SamplingParams(temperature=0, repetition_penalty=1.2, **common),
        SamplingParams(temperature=0, logprobs=3, bad_words_token_ids=[[5], [6, 7]], **common),
        SamplingParams(temperature=0.9, seed=2, min_tokens=50, logit_bias={7: 1.0}, **common),
    ]
    for number, (prompt, params) in enumerate(zip(make_prompts(STEM), kinds, strict=True)):
        engine.add_request(str(number), prompt, params)
    for _ in range(20):  # until all decode, and every kernel is compiled
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = 0
        while engine.has_unfinished():
            assert all(output.error is None for output in engine.step())
            steps += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps > 20
    if backend == "triton":
        assert (engine.runner.graphs is None) == eager
        assert eager or make_stats(engine).decode_steps["graph"] > 20


@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs_and_overlap_give_the_tokens_without(tiny_checkpoint, page_size):
    """Forks, beams and trees of shared pages, padded to the sizes that were captured."""
    found = []
    for overlap, sizes in ((False, None), (True, None), (False, (1, 4, 6)), (True, (1, 4, 6))):
        engine = make_engine(
            tiny_checkpoint("llama"), device="cuda", dtype="float32", attention_backend="triton",
            page_size=page_size, async_scheduling=overlap, enforce_eager=sizes is None,
            cuda_graph_sizes=sizes, **ROOM,
        )  # fmt: skip
        found.append(answers(engine, stem=STEM, tokens=TOKENS))
        if sizes is not None:
            stats = make_stats(engine)
            assert (stats.cuda_graphs, stats.decode_steps["graph"] > TOKENS) == (3, True)
            assert "3 CUDA graphs for steps of 1, 4, 6 rows took" in engine.memory
    scores = [each.pop("scores") for each in found]
    assert all(each == pytest.approx(scores[0], abs=1e-3) for each in scores)
    assert all(each == found[0] for each in found)


def assert_the_same(expected, found):
    """Tokens are equal up to where sums in another order decide between two of them."""
    assert expected.keys() == found.keys()
    for key in expected:
        left, right = joined(expected[key]), joined(found[key])
        assert len(left) == len(right)
        for at, (ours, theirs) in enumerate(zip(left, right, strict=True)):
            if ours != theirs:
                logprobs = [each.logprobs for each in expected[key] if each.logprobs is not None]
                best = Logprobs.joined(logprobs).top_logprobs[at]
                assert abs(float(best[0]) - float(best[1])) < 0.05
                break


def test_flashinfers_graphs_of_mixed_steps_give_the_tokens_without(tiny_checkpoint):
    """There prompts beside sequences that decode run by kernels of ours, in 16 bits, too."""
    path = tiny_checkpoint("llama", head_dim=128)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    found = []
    for sizes in (None, (4, 8, 32, 64)):
        engine = on_the_gpu(
            path, "flashinfer", dtype="float16", enforce_eager=sizes is None,
            cuda_graph_sizes=sizes, **ROOM,
        )  # fmt: skip
        outputs = {}
        for number in range(6):
            prompt = [3 + number, *range(4, 7 + 7 * number)]
            engine.add_request(str(number), prompt, params)
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        for (name, _), rest in run(engine).items():
            outputs.setdefault(name, []).extend(rest)
        found.append(outputs)
    assert make_stats(engine).mixed_steps["graph"] > 0
    assert_the_same(*found)


def test_flashinfers_drafts_give_the_tokens_without(tiny_checkpoint):
    """Steps with branches run by our kernels, the others by FlashInfer's."""
    path = tiny_checkpoint("llama", head_dim=128)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
    found, drafts = [], None
    for speculates in (False, True):
        engine = on_the_gpu(path, "flashinfer", dtype="float16", **ROOM)
        if speculates:
            known = {key: joined(outputs) for key, outputs in found[0].items()}

            def following(sequence, known=known):
                tokens = known[sequence.request.request_id, sequence.index]
                return tokens[sequence.num_generated :]

            drafts = ScriptedDrafts(random.Random(3), following, vocabulary=320)
            engine.speculate(drafts)
        for number in range(4):
            engine.add_request(str(number), [3 + number, *range(4, 12 + 5 * number)], params)
        found.append(run(engine))
    assert_the_same(*found)
    assert drafts.accepted > 20
    assert drafts.branched > 5


def test_pages_are_freed_and_reused_before_the_gpu_has_finished(tiny_checkpoint):
    """Short requests in a pool of few pages; reading another's KV would give other tokens."""
    found = []
    for overlap in (False, True):
        engine = make_engine(
            tiny_checkpoint("llama"), device="cuda", dtype="float32", page_size=4,
            kv_cache_tokens=96, max_num_seqs=5, async_scheduling=overlap,
        )  # fmt: skip
        rng, outputs = random.Random(1), {}
        for number in range(200):
            params = SamplingParams(
                temperature=0, max_tokens=rng.randint(1, 5), n=rng.choice([1, 2]),
                stop_token_ids=list(range(40)), ignore_eos=True,
            )  # fmt: skip
            prompt = [3] * rng.randint(1, 9) + [rng.randrange(3, 250)]
            engine.add_request(str(number), prompt, params)
            while engine.num_unfinished > 7:
                for output in engine.step():
                    key = output.request_id, output.index
                    outputs.setdefault(key, []).extend(output.new_token_ids)
                engine.check()
        for key, rest in run(engine).items():
            outputs.setdefault(key, []).extend(joined(rest))
        found.append(outputs)
        assert (make_stats(engine).late_rows > 10) == overlap
    assert found[1] == found[0]
