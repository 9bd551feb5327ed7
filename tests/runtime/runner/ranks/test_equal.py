"""Tokens of a model that is divided among ranks equal those of the model in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.request import DeviceLost
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.conftest import FAMILIES, OTHER_FAMILIES
from tests.runtime.engine.test_families import prompts, run
from tests.runtime.runner.ranks.conftest import StartRanks

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "gemma3_text", "phi3", "gpt_oss",
     *(pytest.param(each, marks=pytest.mark.slow)
       for each in (*FAMILIES, *OTHER_FAMILIES)
       if each not in ("llama", "qwen2", "gemma3_text", "phi3", "gpt_oss"))],
)  # fmt: skip
def test_two_ranks_are_one_cold_and_warm(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, family: str
) -> None:
    path = tiny_checkpoint(family)
    expected = run(start_threads(path, 1))
    engine = start_threads(path, 2)
    assert engine.runner.decoder.compiled is not None
    engine.warm_up()  # all ranks run the same steps, timed ones too
    assert engine.runner.draft_seconds
    assert run(engine) == expected
    assert run(engine) == expected, "warm"


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_moe", *(pytest.param(each, marks=pytest.mark.slow)
                             for each in ("olmo2", "glm4", "gpt_oss"))],
)  # fmt: skip
def test_ranks_may_share_heads_and_have_parts_of_different_sizes(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, family: str, ranks: int
) -> None:
    path = tiny_checkpoint(family)  # 4 heads, of which 2 have keys and values
    engine = start_threads(path, ranks, page_size=7)
    assert run(engine) == run(start_threads(path, 1))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("options", [
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"dtype": "bfloat16"},
    pytest.param({"kv_cache_dtype": "bfloat16"}, marks=pytest.mark.slow),
    {"attention_backend": "reference"},
    {"attention_backend": "reference", "dtype": "bfloat16"},
])  # fmt: skip
def test_each_kind_of_numbers(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, options: dict[str, object], ranks: int
) -> None:
    """Their logits lie as near to each other as numbers of this kind allow."""
    path = tiny_checkpoint("llama", head_dim=32, intermediate_size=192, dtype="bfloat16")
    found = [
        scores(start_threads(path, each, kv_cache_tokens=512, **options)) for each in (1, ranks)
    ]
    fine = options.keys() <= {"attention_backend", "kv_cache_dtype"}
    np.testing.assert_allclose(found[1], found[0], atol=2e-3 if fine else 1.5)
    assert np.abs(found[0]).max() > 5


def scores(engine: Engine) -> np.ndarray:
    """The log-probabilities of a prompt's tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = prompts()[0]
    engine.add_request("a", prompt, params)
    while engine.has_unfinished():
        for output in engine.step():
            if output.prompt_logprobs is not None:
                logprobs = output.prompt_logprobs
    found: np.ndarray = logprobs.logprobs
    return found


def test_samples_of_one_prompt_and_beams(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks
) -> None:
    path = tiny_checkpoint("llama")
    several = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=8, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    one, two = start_threads(path, 1), start_threads(path, 2)
    for params in (several, beams):
        assert run(two, params) == run(one, params)


def test_preempted_sequences_continue(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks
) -> None:
    path = tiny_checkpoint("llama")
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine = start_threads(path, 2, kv_cache_tokens=192)
    assert run(engine, long) == run(start_threads(path, 1), long)
    assert engine.counters.preemptions > 0


def test_prompts_are_scored_in_slices(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.runtime.sampling.prompt_scores.SLICE_ROWS", 5)
    path = tiny_checkpoint("gemma2")
    found = [scores(start_threads(path, ranks)) for ranks in (1, 3)]
    np.testing.assert_allclose(found[1], found[0], atol=1e-3)


def test_a_step_that_waits_for_the_tokens_of_the_one_before(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks
) -> None:
    path = tiny_checkpoint("qwen3")
    engine = start_threads(path, 2, async_scheduling=True)
    assert run(engine) == run(start_threads(path, 1))


def test_a_step_that_fails_on_one_rank_ends_all(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_threads(tiny_checkpoint("llama"), 2)
    run(engine)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.runner, "_run", fail)
    engine.add_request("a", prompts()[0], SamplingParams(max_tokens=2))
    with pytest.raises(DeviceLost, match="rank 0 of the model: MemoryError: no room"):
        engine.step()
    assert not engine.has_unfinished()


@pytest.mark.parametrize("level", [1, 2])
def test_all_ranks_sleep_and_wake_up(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, level: int
) -> None:
    engine = start_threads(tiny_checkpoint("llama"), 2)
    before = run(engine)
    engine.sleep(level)
    engine.wake_up()
    assert run(engine) == before


def test_random_weights_are_those_of_one_rank(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks
) -> None:
    path = tiny_checkpoint("mixtral")
    found = [scores(start_threads(path, ranks, load_format="dummy")) for ranks in (1, 2)]
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)


def test_a_rank_has_its_part_of_weights_and_pages(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks
) -> None:
    path = tiny_checkpoint("llama")
    whole, part = (start_threads(path, ranks).runner for ranks in (1, 2))
    numbers = [sum(each.k.numel() for each in runner.kv_cache) for runner in (whole, part)]
    assert numbers[0] == 2 * numbers[1]
    assert part.decoder.config.vocab_size == whole.decoder.config.vocab_size // 2
    assert isinstance(part.decoder.layers[0], torch.nn.Module)


@pytest.mark.parametrize(
    ("ranks", "family", "options", "message"),
    [
        (5, "llama", {},
         "tensor_parallel_size is 5; the model has 4 heads, so it must be at most 4"),
        (2, "llama", {"model_impl": "transformers"},
         r"tensor_parallel_size is 2; with transformers' model \(model_impl\) it must be 1"),
        (2, "llama", {"enable_lora": True},
         "tensor_parallel_size is 2; with enable_lora it must be 1"),
        (0, "llama", {}, "tensor_parallel_size must be an integer of at least 1, got 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(
    tiny_checkpoint: Checkpoint,
    start_threads: StartRanks,
    ranks: int,
    family: str,
    options: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        start_threads(tiny_checkpoint(family), ranks, **options)
