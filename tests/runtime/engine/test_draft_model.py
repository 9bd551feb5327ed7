"""A draft model beside the model: the same texts in fewer steps, from a cache of its own."""

from __future__ import annotations

import random
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_files import load, save_adapter
from free_costs import make_free

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report, make_stats
from coppice.runtime.report.merged import merged_stats
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams, ThinkingMarks
from coppice.runtime.sampling.drafts.suffixes import SuffixDrafts

VOCABULARY = 320
Texts = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def other(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A model of other layers and weights, whose guesses are wrong."""
    return tiny_checkpoint("llama", seed=1, num_hidden_layers=1)


def start(path: Path, draft: Path | None = None, **options: Any) -> Engine:
    limits = {"kv_cache_tokens": 1024, "max_num_seqs": 6, "max_num_batched_tokens": 60}
    if draft is not None:
        options |= {"speculation": "auto", "draft_model": str(draft)}
    engine = Engine(EngineConfig(model=str(path), device="cpu", **(limits | options)))
    make_free(engine)
    return engine


def prompts(seed: int, count: int, length: int = 21) -> list[list[int]]:
    """Prompts that share a beginning."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCABULARY) for _ in range(length)]
    return [
        stem + [rng.randrange(3, VOCABULARY) for _ in range(2 + number)] for number in range(count)
    ]


MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "seed": 4, "n": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "temperature": 0, "min_tokens": 2},
    {"temperature": 0.7, "seed": 9, "top_p": 0.9, "top_k": 50, "logit_bias": {5: 3.0, 9: -5.0}},
]


def mixed(seed: int = 1, tokens: int = 24) -> list[tuple[list[int], SamplingParams]]:
    return [
        (prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, **params))
        for prompt, params in zip(prompts(seed, len(MIXED)), MIXED, strict=True)
    ]


def run(engine: Engine, asked: list[tuple[list[int], Any]], **options: Any) -> Texts:
    """The tokens of each sequence; all requests run together, and all is recounted at each step."""
    for number, (prompt, params) in enumerate(asked):
        engine.add_request(str(number), prompt, params, **options)
    return finished(engine)


def finished(engine: Engine) -> Texts:
    tokens: Texts = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.check()
    model = engine.drafting.model
    if model is not None:  # nothing is held once nothing runs
        assert model.tree.locked_pages == 0
        pool = model.tree.pool
        assert pool.free_pages + model.tree.evictable_pages == pool.num_pages
    return tokens


@pytest.fixture(scope="module")
def plain(llama: Path) -> Texts:
    return run(start(llama), mixed())


def test_one_equal_to_the_model_is_nearly_always_right(llama: Path, plain: Texts) -> None:
    """With random numbers, penalties and biases as well; and told as its own source."""
    engine = start(llama, llama)
    without = start(llama)
    run(without, mixed())
    assert run(engine, mixed()) == plain
    assert engine.counters.steps < 0.5 * without.counters.steps
    assert engine.drafts is not None
    counts = engine.drafts.counts.of("model")
    generated = sum(map(len, plain.values()))
    assert counts.accepted > 0.6 * generated
    stats = make_stats(engine)
    assert stats.accepted_tokens["model"] == counts.accepted
    assert stats.tokens_a_step > 2
    assert stats.draft_model_tokens["computed"] > counts.accepted
    assert stats.draft_model_seconds > 0
    both = merged_stats({"a": stats, "b": make_report(engine)})
    assert both.draft_model_tokens == {
        name: 2 * count for name, count in stats.draft_model_tokens.items()
    }
    assert make_stats(without).draft_model_tokens == {}
    engine.close()


def test_one_that_is_wrong_changes_no_token(llama: Path, other: Path, plain: Texts) -> None:
    engine = start(llama, other)
    assert run(engine, mixed()) == plain
    assert engine.drafts is not None
    counts = engine.drafts.counts.of("model")
    assert counts.drafted > 20 and counts.accepted < 0.2 * counts.drafted


def test_a_known_prompt_costs_the_draft_model_nothing(llama: Path) -> None:
    """Its tree has what it computed, by namespace; a reset empties it."""
    engine = start(llama, llama, kv_cache_tokens=2048)
    assert engine.drafts is not None
    engine.drafts._sources = []  # they foretell what was written before
    asked = [(prompts(5, 1, length=40)[0], SamplingParams(max_tokens=30, temperature=0))]
    model = engine.drafting.model
    assert model is not None

    def computed(**options: Any) -> tuple[int, int]:
        before = model.counts.hit_tokens, model.counts.computed_tokens
        run(engine, asked, **options)
        counts = model.counts
        return counts.hit_tokens - before[0], counts.computed_tokens - before[1]

    prompt = len(asked[0][0])
    hit, first = computed()
    assert hit == 0 and first > prompt
    hit, again = computed()
    assert hit == prompt and again == first - prompt  # all but the first token of the answer
    assert computed(cache_salt="other") == (0, first)
    assert computed(cache_salt="other") == (hit, again)
    engine.reset_cache()
    assert model.tree.cached_tokens == 0
    assert computed() == (0, first)


@pytest.mark.parametrize("tokens", [96, pytest.param(80, marks=pytest.mark.slow)])
def test_in_a_tiny_pool_it_gives_its_pages_back(llama: Path, tokens: int) -> None:
    """Sequences are preempted, and the draft model has room for some of them only."""
    asked = [
        (prompt, SamplingParams(max_tokens=30, seed=number, ignore_eos=True))
        for number, prompt in enumerate(prompts(7, 5, length=6))
    ]
    options = {"kv_cache_tokens": tokens, "page_size": 4}
    without = start(llama, **options)
    expected = run(without, asked)
    engine = start(llama, llama, **options)
    model = engine.drafting.model
    assert model is not None
    refused = []
    give_back = model._give_back

    def noted(busy: Any) -> bool:
        refused.append(give_back(busy))
        return refused[-1]

    model._give_back = noted  # type: ignore[method-assign]
    assert run(engine, asked) == expected
    assert engine.counters.preemptions > 0
    assert True in refused
    assert engine.drafts is not None and engine.drafts.counts.of("model").accepted > 20


def test_requests_that_end_early_and_beams_leave_nothing_behind(llama: Path) -> None:
    engine, without = start(llama, llama), start(llama)
    for each in (engine, without):
        for number, (prompt, params) in enumerate(mixed()):
            each.add_request(str(number), prompt, params)
        each.add_beam_search("beams", prompts(2, 1)[0], BeamSearchParams(2, 5, ignore_eos=True))
        for _ in range(4):
            each.step()
        assert each.abort("0") and each.abort("1", 1)
    model = engine.drafting.model
    assert model is not None
    # Both end with the same tokens; how many came before depends on the drafts.
    rest, plainly = finished(engine), finished(without)
    assert rest.keys() == plainly.keys()
    assert all(tokens == plainly[key][-len(tokens) :] for key, tokens in rest.items())
    assert not model._followers
    assert run(engine, mixed()) == run(without, mixed())


def test_it_follows_sequences_of_adapters_from_the_base(llama: Path, tmp_path: Path) -> None:
    """It has no adapter: a text of one is found for another, and the texts are the adapters'."""
    save_adapter(tmp_path, load(llama), seed=10)
    adapter = LoRARequest("own", 1, str(tmp_path))
    asked = mixed(3, tokens=16)
    expected = run(start(llama, enable_lora=True), asked, lora_request=adapter)
    engine = start(llama, llama, enable_lora=True)
    model = engine.drafting.model
    assert model is not None
    assert run(engine, asked) != expected
    before = model.counts.hit_tokens
    assert run(engine, asked, lora_request=adapter) == expected
    assert model.counts.hit_tokens - before >= sum(len(prompt) - 1 for prompt, _ in asked)
    assert engine.drafts is not None
    (index,) = (each.index for each in engine.drafts._sources if isinstance(each, SuffixDrafts))
    before = len(index)
    engine.adapters.unload("own")
    assert 0 < len(index) < before  # what the base model wrote is still known


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_with_the_engine(llama: Path, plain: Texts, level: int) -> None:
    engine = start(llama, llama)
    run(engine, mixed())
    engine.sleep(level)
    model = engine.drafting.model
    assert model is not None
    assert model.runner.asleep == level and model.tree.cached_tokens == 0
    assert not model.runner.kv_cache
    engine.wake_up()
    assert run(engine, mixed()) == plain
    assert engine.drafts is not None and engine.drafts.model is not None
    engine.close()


def test_if_it_fails_texts_go_on_without_it(
    llama: Path, plain: Texts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(llama, llama)
    model = engine.drafting.model
    assert model is not None
    real, calls = model.runner.run, []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("no more memory")
        return real(*args)

    monkeypatch.setattr(model.runner, "run", fails)
    assert run(engine, mixed()) == plain
    assert len(calls) == 3 and "the draft model failed" in caplog.text
    assert engine.drafts is not None and engine.drafts.model is None


def test_an_interrupt_of_the_draft_model_is_passed_on(
    llama: Path, plain: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(llama, llama)
    model = engine.drafting.model
    assert model is not None
    real, calls = model.runner.run, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(model.runner, "run", interrupted)
    for number, (prompt, params) in enumerate(mixed()):
        engine.add_request(str(number), prompt, params)
    tokens: Texts = {}
    interrupts = 0
    while engine.has_unfinished():
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        for output in outputs:
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.check()
    assert interrupts == 1 and tokens == plain and len(calls) > 6


def test_a_shorter_context_and_other_sizes(llama: Path, tiny_checkpoint: Any) -> None:
    """What is longer than the draft model takes is continued without it."""
    short = tiny_checkpoint("llama", max_position_embeddings=40)
    asked = mixed(4, tokens=40)
    expected = run(start(llama), asked)
    engine = start(llama, short)
    assert run(engine, asked) == expected
    model = engine.drafting.model
    assert model is not None and model.runner.max_model_len == 40


def test_its_cache_has_a_part_of_the_memory(llama: Path) -> None:
    engine = start(llama, llama)
    model = engine.drafting.model
    assert model is not None
    assert model.runner.num_pages == engine.num_pages
    assert "and one of the draft model" in engine.memory
    alone = Engine(EngineConfig(model=str(llama), device="cpu", kv_cache_memory_fraction=0.001))
    both = Engine(
        EngineConfig(
            model=str(llama), device="cpu", kv_cache_memory_fraction=0.001, speculation="auto",
            draft_model=str(llama),
        )
    )  # fmt: skip
    assert 0.3 * alone.num_pages < both.num_pages < 0.7 * alone.num_pages
    for each in (engine, alone, both):
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_backend": "reference", "page_size": 4}),
        ("ministral", {"page_size": 1}),
        ("gemma2", {"page_size": 8}),
        ("mixtral", {}),
        ("llama", {"model_impl": "transformers"}),
        ("llama", {"async_scheduling": True, "kv_cache_dtype": "bfloat16"}),
        ("llama", {"enable_prefix_caching": False}),
        ("llama", {"eviction_policy": "adaptive", "max_step_stretch": 1.5}),
    ],
)
def test_other_families_backends_and_options(
    tiny_checkpoint: Any, family: str, options: dict[str, Any]
) -> None:
    path = tiny_checkpoint(family)
    expected = run(start(path, **options), mixed())
    for draft in (path, tiny_checkpoint("qwen3", seed=2)):
        engine = start(path, draft, **options)
        assert run(engine, mixed()) == expected
        assert run(engine, mixed()) == expected
        assert engine.drafts is not None
        accepted = engine.drafts.counts.of("model").accepted
        assert draft != path or accepted > 60
        engine.close()


@pytest.mark.slow
def test_with_interpreted_kernels_of_a_gpu(llama: Path) -> None:
    """Branches, and chains of the draft model, in plans of that backend."""
    asked = mixed(tokens=5)[:2]
    expected = run(start(llama, attention_backend="triton"), asked)
    engine = start(llama, llama, attention_backend="triton")
    assert run(engine, asked) == expected
    assert engine.drafts is not None and engine.drafts.counts.of("model").accepted > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_requests_in_random_pools(llama: Path, other: Path, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 3, 16])
    options = {
        "page_size": size,
        "kv_cache_tokens": size * -(-rng.choice([80, 150, 400]) // size),
        "max_num_seqs": rng.choice([2, 5]),
        "max_num_batched_tokens": rng.choice([9, 40]),
    }
    asked = []
    for number, prompt in enumerate(prompts(seed, 8, length=rng.choice([1, 9, 30]))):
        params = dict(rng.choice(MIXED)) | {"seed": number, "max_tokens": rng.choice([2, 9, 30])}
        asked.append((prompt, SamplingParams(ignore_eos=True, **params)))
    expected = run(start(llama, **options), asked)
    for draft in (llama, other):
        engine = start(llama, draft, **options)
        assert run(engine, asked) == expected
        assert run(engine, asked) == expected
        engine.close()


def write_tokenizer(folder: Path, words: dict[str, int]) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(words, unk_token="w3")).save(str(folder / "tokenizer.json"))


def test_a_draft_model_has_the_tokens_of_the_model(
    llama: Path, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    words = {f"w{number}": number for number in range(300)}
    changed = words | {"x": words["w250"]}
    del changed["w250"]
    model, same, wider, differs, short = (tmp_path / each for each in "abcde")
    for folder, source, known in (
        (model, llama, words),
        (same, llama, words),
        (wider, tiny_checkpoint("llama", vocab_size=384), words),
        (differs, llama, changed),
        (short, tiny_checkpoint("llama", vocab_size=299), words),
    ):
        shutil.copytree(source, folder)
        write_tokenizer(folder, known)
    asked = mixed(tokens=6)
    expected = run(start(model), asked)
    for draft in (same, wider):  # rows of logits that no token has may differ
        engine = start(model, draft)
        assert run(engine, asked) == expected
        engine.close()
    with pytest.raises(ValueError, match="token 250 is 'x' in it, 'w250' in the model"):
        start(model, differs)
    with pytest.raises(ValueError, match=r"it has 299 tokens, the model 320: .* lacks token 299"):
        start(model, short)
    with pytest.raises(ValueError, match="it has 384 tokens, the model 320"):
        start(llama, tiny_checkpoint("llama", vocab_size=384))  # neither has a tokenizer


@pytest.fixture(scope="module")
def narrower(tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of 320 tokens and a draft model of 310; their tokenizer has 300."""
    folder = tmp_path_factory.mktemp("narrower")
    model, draft = folder / "model", folder / "draft"
    shutil.copytree(tiny_checkpoint("llama"), model)
    shutil.copytree(tiny_checkpoint("llama", vocab_size=310), draft)
    for path in (model, draft):
        write_tokenizer(path, {f"w{number}": number for number in range(300)})
    return model, draft


def test_tokens_that_the_draft_model_lacks_are_not_asked_about(
    narrower: tuple[Path, Path],
) -> None:
    """The model has more rows of logits than its tokenizer has tokens."""
    model, draft = narrower
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={315: 50.0})
    asked = [([5, 6, 7], params), ([5, 315, 7], SamplingParams(temperature=0, max_tokens=9))]
    engine = start(model, draft)
    assert run(engine, asked) == run(start(model), asked)


@pytest.mark.parametrize(
    ("rules", "asked"),
    [
        ({"logit_bias": {315: -100.0}}, True),
        ({"logit_bias": {315: -100.0, 5: 2.0}, "repetition_penalty": 1.3}, True),
        ({"allowed_token_ids": [5, 6, 315]}, True),
        ({"allowed_token_ids": [315, 316]}, False),
        ({"allowed_token_ids": [5, 315], "bad_words_token_ids": [[5]]}, False),
        ({"allowed_token_ids": [5, 315], "min_tokens": 30, "stop_token_ids": [5]}, False),
        ({"bad_words_token_ids": [[315]]}, True),
        ({"bad_words_token_ids": [[6], [315], [5, 316], [315, 5]]}, True),
        ({"min_tokens": 30, "stop_token_ids": [5, 315]}, True),
        ({"thinking_token_budget": 3, "thinking_marks": ThinkingMarks(4, 315, inside=True)}, True),
    ],
)
def test_rules_about_tokens_that_the_draft_model_lacks(
    narrower: tuple[Path, Path], rules: dict[str, Any], asked: bool
) -> None:
    """It follows the rest of them; what leaves it no token is not asked about."""
    model, draft = narrower
    options = {"seed": 3, "n": 4, "max_tokens": 30, "ignore_eos": True} | rules
    requests = [([5, 6, 7], SamplingParams(**options))]
    engine = start(model, draft)
    assert run(engine, requests) == run(start(model), requests)
    assert engine.drafts is not None and engine.drafts.model is not None
    assert engine.drafting.model is not None
    assert (engine.drafting.model.counts.passes > 0) == asked


def test_what_the_draft_model_begins_with(narrower: tuple[Path, Path]) -> None:
    """Nothing that leaves it no token; and no prediction, which it does not read."""
    engine = start(*narrower)
    model = engine.drafting.model
    assert model is not None

    def begun(**params: Any) -> Sequence:
        request = Request("a", array("i", [5, 6]), SamplingParams(**params), None, 0, 0, 100)
        sequence = Sequence(request)
        assert (model.begin(sequence) is not None) == ("prediction_token_ids" in params)
        return sequence

    refused, taken = begun(allowed_token_ids=[315, 316]), begun(prediction_token_ids=[5, 6])
    assert model._followers[taken].own.request.params.prediction_token_ids == ()
    for each in (refused, taken):
        model.ended(each)
    assert not model._followers


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (True, False)),
        ({"async_scheduling": True}, (False, False)),
        ({"draft_model": "d"}, (True, True)),
        ({"speculation": "auto"}, (True, True)),
        ({"speculation": "off"}, (False, False)),
    ],
)
def test_where_drafts_are_made(options: dict[str, Any], expected: tuple[bool, bool]) -> None:
    """On a CPU and on a GPU."""
    config = EngineConfig(model="m", **options)
    assert (config.makes_drafts(on_gpu=False), config.makes_drafts(on_gpu=True)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "off"}, "with speculation 'off' it must be None: leave speculation out"),
        ({"tensor_parallel_size": 2}, "with tensor_parallel_size 2 it must be None"),
        ({"draft_model": ""}, "draft_model must be a folder or a hub id, or None, got ''"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"speculation": "auto", "draft_model": "d"} | options
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **given)


def test_a_folder_that_holds_no_model_is_refused(llama: Path, tmp_path: Path) -> None:
    wrong = "draft_model '.*' cannot be used: "
    with pytest.raises(ValueError, match=f"{wrong}model is '.*nowhere'; there is no such folder"):
        start(llama, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"{wrong}.*config.json does not exist"):
        start(llama, tmp_path)
