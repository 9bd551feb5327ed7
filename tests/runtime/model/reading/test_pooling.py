"""Vectors and scores equal transformers', cold and warm, in batches and in chunks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_stats
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.request import PromptTooLong, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.model.reading.conftest import changed, sentence_modules

Make = Callable[..., Path]
RAW = PoolingParams(use_activation=False)
SCORE = PoolingParams("score")


def make_engine(path: Path, **more: Any) -> Engine:
    options = {"kv_cache_tokens": 512, "page_size": 4, "max_num_seqs": 8} | more
    return Engine(EngineConfig(model=str(path), **options))


def pooled(
    engine: Engine, prompts: Sequence[list[int]], params: PoolingParams = RAW, **more: Any
) -> list[StepOutput]:
    """The outputs of requests that run together, in the order of the prompts."""
    for index, prompt in enumerate(prompts):
        engine.add_pooling(str(index), prompt, params, **more)
    found: dict[str, StepOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert (output.finish_reason, output.new_token_ids) == ("stop", ())
            found[output.request_id] = output
        engine.check()
    return [found[str(index)] for index in range(len(prompts))]


def vectors(outputs: Sequence[StepOutput]) -> np.ndarray:
    return np.stack([output.pooled for output in outputs if output.pooled is not None])


def make_prompts(count: int = 6) -> list[list[int]]:
    """Prompts that share an instruction, as embedders are given."""
    numbers = random.Random(2)
    shared = [numbers.randrange(3, 90) for _ in range(21)]
    ends = [[numbers.randrange(3, 90) for _ in range(1 + 5 * n)] for n in range(count)]
    return [shared + end for end in ends]


@torch.no_grad()
def states(path: Path, prompt: list[int]) -> np.ndarray:
    """transformers' last hidden states, [tokens, hidden]."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    return np.asarray(model(torch.tensor([prompt])).last_hidden_state[0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_vectors_equal_transformers(embedder: Make, family: str, mode: str) -> None:
    path = embedder(family, mode)
    engine, prompts = make_engine(path, max_num_batched_tokens=16), make_prompts()
    wanted = []
    for prompt in prompts:
        rows = states(path, prompt)
        wanted.append(rows[-1] if mode == "lasttoken" else rows.mean(0))
    for warm in (False, True):
        outputs = pooled(engine, prompts)
        np.testing.assert_allclose(vectors(outputs), wanted, rtol=1e-5, atol=1e-5)
        for output, prompt in zip(outputs, prompts, strict=True):
            if mode == "mean_tokens":
                assert output.cached_tokens == 0, "a mean needs the states of all tokens"
            elif warm:
                assert output.cached_tokens == len(prompt) - 1
    assert engine.counters.generated_tokens == 0
    normal = vectors(pooled(engine, prompts, PoolingParams()))
    np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(
        normal, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5
    )


def test_the_instruction_is_computed_once(embedder: Make) -> None:
    engine, prompts = make_engine(embedder("qwen3")), make_prompts()
    outputs = pooled(engine, prompts)
    assert sorted(output.cached_tokens for output in outputs)[1:] == [21] * 5
    apart = pooled(engine, prompts, cache_salt="s")
    assert min(output.cached_tokens for output in apart) == 0
    pooled(engine, prompts[:1], cache_salt="t", held_elsewhere=20)
    assert make_stats(engine).counts.other_replica == 20


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_vectors_beside_text_and_under_preemption(embedder: Make, mode: str, late: bool) -> None:
    """Text and vectors share steps; a mean that loses its pages continues from what it has read."""
    path, prompts = embedder("llama", mode), make_prompts(5)
    alone = vectors(pooled(make_engine(path), prompts))
    options = {"kv_cache_tokens": 96, "max_num_batched_tokens": 16, "async_scheduling": late}
    engine = make_engine(path, **options)
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add_request("text", prompts[0][:9], sampling)
    for index, prompt in enumerate(prompts):
        engine.add_pooling(str(index), prompt, RAW)
    engine.step()
    found: dict[str, Any] = {}
    turn = 0
    while engine.has_unfinished():
        running = [each for each in engine.scheduler.running if each.request.request_id != "text"]
        if turn % 3 == 1 and running and running[-1].remaining and not late:
            engine.scheduler.preempt(running[-1])
        for output in engine.step():
            found[output.request_id] = output
        engine.check()
        turn += 1
    assert late or engine.counters.preemptions > 0
    np.testing.assert_allclose(
        [found[str(index)].pooled for index in range(5)], alone, rtol=1e-4, atol=1e-5
    )
    assert found["text"].finish_reason == "length"


def test_a_model_without_a_head(embedder: Make) -> None:
    """Saved bare, as sentence-transformers does: its names have no prefix; it makes no text."""
    path = embedder("qwen3", "", bare=True)
    engine, prompts = make_engine(path), make_prompts(3)
    wanted = [states(path, prompt)[-1] for prompt in prompts]
    np.testing.assert_allclose(vectors(pooled(engine, prompts)), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no head for text"):
        engine.add_request("x", [1], SamplingParams())
    # Qwen3-Embedding's config names the class with a head, though the file has none.
    changed(path, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    sentence_modules(path, "lasttoken")
    engine = make_engine(path)
    np.testing.assert_allclose(vectors(pooled(engine, prompts)), wanted, rtol=1e-5, atol=1e-5)
    engine.add_request("x", [1], SamplingParams())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_equals_transformers(classifier: Make, family: str, labels: int) -> None:
    path = classifier(family, labels, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    engine, prompts = make_engine(path, max_num_batched_tokens=16), make_prompts()
    with torch.no_grad():
        wanted = np.stack([np.asarray(model(torch.tensor([p])).logits[0]) for p in prompts])
    for _ in ("cold", "warm"):
        found = vectors(pooled(engine, prompts, PoolingParams("score", use_activation=False)))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    found = vectors(pooled(engine, prompts, SCORE))
    if labels == 1:
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-wanted)), atol=1e-5)
    else:
        shares = np.exp(wanted) / np.exp(wanted).sum(1, keepdims=True)
        np.testing.assert_allclose(found, shares, atol=1e-5)
    with pytest.raises(ValueError, match="embed is not what this model is made for"):
        engine.add_pooling("x", [1], PoolingParams())


def test_the_logits_of_two_tokens(tiny_checkpoint: Make, embedder: Make) -> None:
    path = embedder("qwen3", "")
    modules = [
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"path": "s", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "s").mkdir()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = make_prompts(3)
    with torch.no_grad():
        logits = np.stack([np.asarray(model(torch.tensor([p])).logits[0, -1]) for p in prompts])
    for config, wanted in (
        ('{"true_token_id": 7, "false_token_id": 5}', logits[:, 7] - logits[:, 5]),
        ('{"true_token_id": 7, "false_token_id": null}', logits[:, 7]),
    ):
        (path / "s" / "config.json").write_text(config)
        engine = make_engine(path)
        for _ in ("cold", "warm"):
            found = vectors(pooled(engine, prompts, SCORE))[:, 0]
            np.testing.assert_allclose(found, 1 / (1 + np.exp(-wanted)), atol=1e-5)


def test_what_a_checkpoint_is_not_made_for(tiny_checkpoint: Make, embedder: Make) -> None:
    engine = make_engine(tiny_checkpoint("llama"))
    with pytest.raises(ValueError, match=r"embed is not what .* no modules.json"):
        engine.add_pooling("x", [1], RAW)
    with pytest.raises(ValueError, match=r"score is not what .* neither a classifier's head"):
        engine.add_pooling("x", [1], SCORE)
    engine = make_engine(embedder("llama", "max_tokens"))
    with pytest.raises(ValueError, match="pools by pooling_mode_max_tokens"):
        engine.add_pooling("x", [1], RAW)


def test_shorter_vectors(embedder: Make) -> None:
    path, prompts = embedder("llama"), make_prompts(2)
    whole = vectors(pooled(make_engine(path), prompts))
    size = whole.shape[1]
    with pytest.raises(ValueError, match=r"dimensions is 8; .* no other size than its own"):
        make_engine(path).add_pooling("x", [1], PoolingParams(dimensions=8))
    changed(path, matryoshka_dimensions=[8, size])
    engine = make_engine(path)
    short = vectors(pooled(engine, prompts, PoolingParams(dimensions=8)))
    wanted = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short, wanted, atol=1e-5)
    for wrong, message in ((9, f"trained for 8, {size}"), (size + 1, f"at most {size}")):
        with pytest.raises(ValueError, match=message):
            engine.add_pooling("x", [1], PoolingParams(dimensions=wrong))


def test_a_prompt_may_fill_the_length(embedder: Make) -> None:
    engine = make_engine(embedder("llama"), max_model_len=32)
    (output,) = pooled(engine, [[5] * 32])
    assert output.num_prompt_tokens == 32
    with pytest.raises(PromptTooLong, match="at most 32 tokens"):
        engine.add_pooling("x", [5] * 33, RAW)
