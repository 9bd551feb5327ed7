"""Tokens of a model that is divided among ranks equal those of the model in one process."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from near_ties import GreedyText, greedy_texts, same_but_for_near_ties
from scripted_drafts import ScriptedDrafts

from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.request import DeviceLost, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.loaded import LoadedModel
from tests.runtime.conftest import FAMILIES, OTHER_FAMILIES
from tests.runtime.engine.test_families import GREEDY, prompts, run
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
    run_cold_and_warm(engine, expected)


def run_cold_and_warm(
    engine: Engine,
    expected: list[list[int]],
    params: SamplingParams | BeamSearchParams = GREEDY,
) -> None:
    """Has an engine with an empty cache answer twice, where the second time hits the first's."""
    assert run(engine, params) == expected
    before = make_report(engine).hit_tokens
    assert run(engine, params) == expected, "warm"
    hits = make_report(engine).hit_tokens - before
    assert hits >= sum(len(prompt) - 1 for prompt in prompts())


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
    run_cold_and_warm(start_threads(path, ranks, page_size=7), run(start_threads(path, 1)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("options", "near"), [
    # An activation is rounded by the largest of those that its rank has, so that ranks round
    # otherwise than one does: 0.57 apart, 0.08 in the middle.
    ({"quantization": "int8"}, 0.8),
    # The same of 32 neighbours, which one rank has: 0.06, where a last bit makes one round up.
    ({"quantization": "int4"}, 0.2),
    ({"dtype": "bfloat16"}, 0.05),  # 0.01, as above
    ({"kv_cache_dtype": "bfloat16"}, 0.02),  # 0.007, as above
    ({"attention_backend": "reference"}, 1e-3),  # 1e-5: float32 in another order
    # 0.14: logits from 8 on are multiples of 1/16.
    ({"attention_backend": "reference", "dtype": "bfloat16"}, 0.3),
])  # fmt: skip
def test_each_kind_of_numbers(
    tiny_checkpoint: Checkpoint,
    start_threads: StartRanks,
    options: dict[str, object],
    near: float,
    ranks: int,
) -> None:
    """Ranks answer as one does, as far as their numbers can tell the best two tokens apart.

    ``near`` is how far log-probabilities may lie apart. What was found on this machine stands
    beside it, of all sizes; other processors may round otherwise.
    """
    path = tiny_checkpoint("llama", head_dim=32, intermediate_size=384, dtype="bfloat16")
    rng = random.Random(11)
    asked = [[rng.randrange(3, 320) for _ in range(8 + each % 8)] for each in range(24)]
    alone, engine = (
        start_threads(path, each, kv_cache_tokens=1024, **options) for each in (1, ranks)
    )
    one = greedy_texts(alone, asked, 4)
    several = greedy_texts(engine, asked, 4)
    before = make_report(engine).hit_tokens
    warm = greedy_texts(engine, asked, 4)
    assert make_report(engine).hit_tokens > before
    for answers in (several, warm):
        equal = same_but_for_near_ties(one, [each.tokens for each in answers], near)
        assert equal > len(asked) / 2
    expected = np.concatenate([each.of_prompt for each in one])
    apart = np.abs(np.concatenate([each.of_prompt for each in several]) - expected)
    assert apart.max() <= near
    assert np.median(apart) <= near / 6, "most are much nearer"
    assert expected.std() > 20 * np.median(apart), "tokens differ by more than the rounding"


def test_only_near_ties_are_taken_for_near_ties() -> None:
    logprobs = np.log([[0.5, 0.48, 0.02], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]])
    texts = [GreedyText([0, 0, 2], logprobs, logprobs[:0, 0])] * 2
    assert same_but_for_near_ties(texts, [[0, 0, 2], [1, 2, 0]], 0.1) == 1
    for wrong in ([2, 0, 2], [0, 1, 2], [0, 0, 1]):
        with pytest.raises(AssertionError, match="which is no near-tie"):
            same_but_for_near_ties(texts, [[0, 0, 2], wrong], 0.1)
    with pytest.raises(AssertionError, match="answer 1 has another length"):
        same_but_for_near_ties(texts, [[0, 0, 2], [0, 0]], 0.1)


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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("params", [
    pytest.param(
        SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=8, ignore_eos=True), id="n"
    ),
    pytest.param(BeamSearchParams(beam_width=3, max_tokens=6), id="beams"),
])  # fmt: skip
def test_samples_of_one_prompt_and_beams_cold_and_warm(
    tiny_checkpoint: Checkpoint,
    start_threads: StartRanks,
    params: SamplingParams | BeamSearchParams,
    ranks: int,
) -> None:
    path = tiny_checkpoint("llama")
    run_cold_and_warm(start_threads(path, ranks), run(start_threads(path, 1), params), params)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_preempted_sequences_continue(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, ranks: int
) -> None:
    path = tiny_checkpoint("llama")
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine = start_threads(path, ranks, kv_cache_tokens=192)
    assert run(engine, long) == run(start_threads(path, 1), long)
    assert engine.counters.preemptions > 0


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("params", [
    GREEDY, SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=20, ignore_eos=True),
], ids=["greedy", "n"])  # fmt: skip
def test_drafts_change_no_token(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, ranks: int, params: SamplingParams
) -> None:
    path = tiny_checkpoint("llama")
    expected = run(start_threads(path, 1), params)
    known = iter(expected)
    texts = {(str(number), index): next(known) for number in range(3) for index in range(params.n)}

    def following(sequence: Sequence) -> list[int]:
        return texts[sequence.request.request_id, sequence.index][sequence.num_generated :]

    engine = start_threads(path, ranks)
    drafts = ScriptedDrafts(random.Random(ranks), following, vocabulary=320)
    engine.speculate(drafts)
    run_cold_and_warm(engine, expected, params)
    assert drafts.accepted > 20
    assert drafts.branched
    assert drafts.drafted > drafts.accepted


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


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=["the first", "another", "both"])
def test_all_ranks_sleep_on_if_one_cannot_load_the_weights(
    tiny_checkpoint: Checkpoint,
    start_threads: StartRanks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: set[int],
) -> None:
    engine = start_threads(tiny_checkpoint("llama"), 2)
    before = run(engine)
    engine.sleep(2)
    load = LoadedModel._load_weights

    def gone(runner: LoadedModel) -> None:
        if runner.group.rank in failing:
            raise ValueError("model.safetensors: there is no such file")
        load(runner)

    with monkeypatch.context() as patch:
        patch.setattr(LoadedModel, "_load_weights", gone)
        for _ in range(2):
            said = r"model\.safetensors" if 0 in failing else "another rank .* its log says why"
            with pytest.raises(ValueError, match=said):
                engine.wake_up()
            assert engine.asleep
    if 1 in failing:
        assert "rank 1 can't wake up: model.safetensors" in caplog.text
    engine.wake_up()
    assert run(engine) == before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt raises KeyboardInterrupt, as it does not in a shell's background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_waking_up_waits_for_all_ranks(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_threads(tiny_checkpoint("llama"), 2)
    before = run(engine)
    engine.sleep(2)
    load = LoadedModel._load_weights

    def interrupted(runner: LoadedModel) -> None:
        if runner.group.rank == 0:
            signal.raise_signal(signal.SIGINT)
        load(runner)

    with monkeypatch.context() as patch:
        patch.setattr(LoadedModel, "_load_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.wake_up()
    engine.wake_up()
    assert run(engine) == before


def test_a_rank_that_has_no_room_for_its_cache_ends_all(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_threads(tiny_checkpoint("llama"), 2)
    engine.sleep(1)

    def fail() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.runner, "_make_cache", fail)
    with pytest.raises(MemoryError):
        engine.wake_up()
    with pytest.raises(DeviceLost, match="rank 0 of the model: MemoryError: no room"):
        engine.check_device()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_until_all_ranks_have_computed(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank alone would be a step ahead of the others from then on."""
    path = tiny_checkpoint("llama")
    engine, expected = start_threads(path, 2), run(start_threads(path, 1))
    compute = engine.runner.followers.compute

    def interrupted(*told: object) -> None:
        compute(*told)
        signal.raise_signal(signal.SIGINT)

    for _ in range(2):
        engine.add_request("a", prompts()[0], SamplingParams(max_tokens=2))
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.followers, "compute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        while engine.has_unfinished():
            engine.step()
        engine.check()
        assert run(engine) == expected


def test_a_plan_that_was_sent_and_not_computed_ends_the_ranks(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_threads(tiny_checkpoint("llama"), 2)
    compute = engine.runner.followers.compute

    def interrupted(*told: object) -> None:
        compute(*told)
        raise MemoryError("no room")

    monkeypatch.setattr(engine.runner.followers, "compute", interrupted)
    engine.add_request("a", prompts()[0], SamplingParams(max_tokens=2))
    with pytest.raises(DeviceLost, match="rank 0 of the model: MemoryError: no room"):
        engine.step()


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
