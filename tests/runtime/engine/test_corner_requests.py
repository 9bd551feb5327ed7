"""Requests at the borders of what is served: lengths, pages, forks, forms beside other rules."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_grammars import FORMS, LateGrammars, Words, follows
from fake_model import EOS, FakeModel, fake_checkpoint, fake_engine

from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.request import StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.logit_rules import NO_CHOICE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


def run(engine: Engine, model: FakeModel) -> dict[tuple[str, int], list[StepOutput]]:
    outputs: dict[tuple[str, int], list[StepOutput]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.check()
        model.check_cache()
        model.poison()
    return outputs


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_prompts_as_long_as_the_model_allows(checkpoint: Path, size: int, late: bool) -> None:
    """Again from the cache, where the hit needs a copy beside the page in which it ends."""
    engine, model = fake_engine(
        checkpoint, page_size=size, kv_cache_tokens=32, max_model_len=32, async_scheduling=late
    )
    prompt = [3 + place % 5 for place in range(31)]
    params = SamplingParams(n=3, temperature=0, max_tokens=9, ignore_eos=True)
    for turn in range(3):
        engine.add_request("x", [*prompt[:30], 3 + turn], params)
        found = run(engine, model)
        assert {index: len(tokens(each)) for (_, index), each in found.items()} == {
            0: 1, 1: 1, 2: 1
        }  # fmt: skip
        assert {each[-1].finish_reason for each in found.values()} == {"length"}
    for count in (32, 33, 400):
        with pytest.raises(ValueError, match=f"prompt must be shorter than.*got {count}"):
            engine.add_request("x", [3] * count, params)
        with pytest.raises(ValueError, match="prompt must be shorter than"):
            engine.add_beam_search("x", [3] * count, BeamSearchParams(1, 2))
    assert not engine.has_unfinished()


@pytest.mark.parametrize("size", [1, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_a_stop_token_at_any_place_of_a_page(checkpoint: Path, size: int) -> None:
    """What was computed before it is hit by the next request; the token itself never was."""
    engine, model = fake_engine(checkpoint, page_size=size, kv_cache_tokens=280)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for length in range(1, 2 * size + 2):
        engine.reset_cache()
        prompt = [3 + place % 7 for place in range(length)]
        engine.add_request("free", prompt, free)
        made = tokens(run(engine, model)["free", 0])
        for stop in sorted(set(made)):
            engine.reset_cache()
            params = SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]
            )
            engine.add_request("stop", prompt, params)
            last = run(engine, model)["stop", 0]
            count = made.index(stop) + 1
            assert tokens(last) == made[:count]
            assert (last[-1].finish_reason, last[-1].stop_reason) == ("stop", stop)
            engine.add_request("next", [*prompt, *made[:count], 5], free)
            found = run(engine, model)["next", 0]
            assert found[0].cached_tokens == length + count - 1


@pytest.mark.slow
def test_forks_that_are_cancelled_in_any_order(checkpoint: Path) -> None:
    params = SamplingParams(n=4, temperature=1, seed=5, max_tokens=8, ignore_eos=True)
    engine, model = fake_engine(checkpoint, page_size=4, kv_cache_tokens=256)
    engine.add_request("whole", [5, 6, 7, 8, 9, 10], params)
    whole = {index: tokens(each) for (_, index), each in run(engine, model).items()}
    for seed in range(40):
        rng = random.Random(seed)
        engine, model = fake_engine(
            checkpoint, page_size=4, kv_cache_tokens=rng.choice([16, 24, 48]),
            max_num_seqs=rng.randint(1, 4), async_scheduling=rng.random() < 0.5,
        )  # fmt: skip
        engine.add_request("x", [5, 6, 7, 8, 9, 10], params)
        got: dict[int, list[int]] = {}
        kept, order = rng.randrange(4), rng.sample(range(4), 4)
        while engine.has_unfinished():
            for output in engine.step():
                got.setdefault(output.index, []).extend(output.new_token_ids)
            if order and rng.random() < 0.4 and (index := order.pop()) != kept:
                engine.abort("x", index)
            engine.check()
            model.check_cache()
            model.poison()
        assert kept in got or not got, f"seed {seed}"
        for index, made in got.items():
            assert made == whole[index][: len(made)], f"seed {seed}"


def test_beams_wider_than_the_pages_are_refused_by_name(checkpoint: Path) -> None:
    engine, model = fake_engine(checkpoint, page_size=4, kv_cache_tokens=80, max_num_seqs=8)
    engine.pin("p", list(range(3, 23)))
    with pytest.raises(ValueError, match=r"beam_width: 5 beams of 4 tokens .* 15 that no pin"):
        engine.add_beam_search("x", [3, 4, 5, 6], BeamSearchParams(5, 4))
    engine.add_beam_search("x", [3, 4, 5, 6], BeamSearchParams(4, 4))
    assert len(run(engine, model)) == 4


def _rules(rng: random.Random) -> dict[str, Any]:
    count = len(Words.tokens)
    rules: dict[str, Any] = {}
    if rng.random() < 0.6:
        words = rng.sample(range(3, count), rng.randint(1, 12))
        rules["bad_words_token_ids"] = tuple((word,) for word in words)
    if rng.random() < 0.5:
        allowed = rng.sample(range(3, count), rng.randint(count // 2, count - 4))
        rules["allowed_token_ids"] = tuple({*allowed, EOS})
    if rng.random() < 0.5:
        few = rng.sample(range(3, count), 4)
        rules["logit_bias"] = {token: rng.choice([-100, 5, 100]) for token in few}
    return rules


@pytest.mark.parametrize(
    "seeds", [range(120), pytest.param(range(120, 3000), marks=pytest.mark.slow)]
)
def test_forms_beside_rules_for_tokens(checkpoint: Path, seeds: range) -> None:
    """No forbidden token comes, not even to complete JSON in time; each text has its form."""
    engine, model = fake_engine(checkpoint, page_size=4, kv_cache_tokens=512, max_num_seqs=8)
    engine.intake._grammars = LateGrammars(late=False)
    asked: dict[str, tuple[Any, dict[str, Any]]] = {}
    for seed in seeds:
        rng = random.Random(seed)
        form, rules = rng.choice(FORMS), _rules(rng)
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), max_tokens=rng.choice([2, 6, 12, 30]), seed=seed,
            structured_outputs=form, **rules,
        )  # fmt: skip
        engine.add_request(str(seed), [3 + seed % 9, 4], params)
        asked[str(seed)] = form, rules
    whole = 0
    for (name, _), outputs in run(engine, model).items():
        form, rules = asked[name]
        made, last = tokens(outputs), outputs[-1]
        bad = {word for (word,) in rules.get("bad_words_token_ids", ())}
        assert not bad & {*made}, f"seed {name}"
        assert {*made} <= {*rules.get("allowed_token_ids", made)}, f"seed {name}"
        follow, complete = follows(form, made)
        assert follow, f"seed {name}"
        if last.finish_reason == "stop":
            assert complete, f"seed {name}"
            whole += 1
        elif last.finish_reason == "error":
            assert last.error is not None and NO_CHOICE in last.error, f"seed {name}"
    assert whole > len(seeds) // 10
