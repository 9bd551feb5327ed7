"""Drafts with real layers and kernels: the same tokens and logprobs as without, by any backend."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_drafts import ScriptedDrafts

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.sampling_params import SamplingParams

VOCABULARY = 320


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share a beginning, each with other parameters."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCABULARY) for _ in range(21)]
    params: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.9, "seed": 4, "n": 2, "logprobs": 0},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "temperature": 0,
         "prompt_logprobs": 1},
        {"temperature": 0.7, "seed": 9, "top_p": 0.9, "logit_bias": {5: 3.0, 9: -5.0}},
    ]  # fmt: skip
    made = []
    for number, each in enumerate(params):
        own = [rng.randrange(3, VOCABULARY) for _ in range(number + 2)]
        made.append((stem + own, SamplingParams(max_tokens=14, ignore_eos=True, **each)))
    return made


def serve(path: Path, speculates: bool | dict[tuple[str, int], list[int]], **options: Any) -> Any:
    """Tokens and logprobs of each sequence, and the drafts that were scripted."""
    limits = {"kv_cache_tokens": 1024, "max_num_seqs": 6, "max_num_batched_tokens": 60}
    engine = Engine(EngineConfig(model=str(path), **(limits | options)))
    drafts = None
    if speculates:
        known = speculates

        def following(sequence):
            tokens = known[sequence.request.request_id, sequence.index]
            return tokens[sequence.num_generated :]

        drafts = ScriptedDrafts(random.Random(3), following, vocabulary=VOCABULARY)
        engine.speculate(drafts)
    for number, (prompt, params) in enumerate(requests(1)):
        engine.add_request(str(number), prompt, params)
    tokens: dict[tuple[str, int], list[int]] = {}
    logprobs: dict[tuple[str, int], list[np.ndarray]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            key = output.request_id, output.index
            tokens.setdefault(key, []).extend(output.new_token_ids)
            if output.logprobs is not None:
                logprobs.setdefault(key, []).append(output.logprobs.logprobs)
        engine.check()
    engine.close()
    return tokens, {key: np.concatenate(each) for key, each in logprobs.items()}, drafts


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"page_size": 16}),
        ("llama", {"attention_backend": "reference", "page_size": 4}),
        ("ministral", {"page_size": 1}),  # a window shorter than many drafts
        ("llama", {"model_impl": "transformers"}),
        ("llama", {"async_scheduling": True, "kv_cache_dtype": "bfloat16"}),
        ("llama", {"quantization": "int8"}),
        pytest.param("llama", {"quantization": "int4"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"page_size": 8}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"attention_backend": "reference"}, marks=pytest.mark.slow),
        pytest.param("llama", {"attention_backend": "triton"}, marks=pytest.mark.slow),
        pytest.param("ministral", {"attention_backend": "triton"}, marks=pytest.mark.slow),
        pytest.param(
            "llama", {"attention_backend": "triton", "deterministic": True}, marks=pytest.mark.slow
        ),
        pytest.param("mixtral", {"model_impl": "transformers"}, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(tiny_checkpoint, family, options):
    path = tiny_checkpoint(family)
    plain, plain_logprobs, _ = serve(path, False, device="cpu", **options)
    found, logprobs, drafts = serve(path, plain, device="cpu", **options)
    assert found == plain
    exact = options.get("deterministic", False)  # there drafts are chains
    assert drafts.accepted > 20
    assert drafts.drafted > drafts.accepted
    assert bool(drafts.branched) != exact
    for key, expected in plain_logprobs.items():
        np.testing.assert_allclose(logprobs[key], expected, rtol=0, atol=0 if exact else 2e-3)
