"""Sessions: forks share what they have in common, scores are exact, and closing frees."""

from __future__ import annotations

import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice import LLM, SamplingParams, Session

TEXT = "The key is under the fox. The key is under the"


@pytest.fixture
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), kv_cache_tokens=2048, max_num_seqs=8, page_size=4)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=6, seed=seed, ignore_eos=True)


def test_forks_go_their_own_ways_and_compute_nothing_twice(llm: LLM) -> None:
    with llm.session(TEXT) as root:
        root.generate(sampled(0))
        branches = root.fork(3)
        before = llm.cache_report()
        Session.generate_all(branches, [sampled(seed) for seed in (1, 2, 3)])
        after = llm.cache_report()
        assert after.computed_tokens - before.computed_tokens == 3, "the last token of each"
        assert len({branch.token_ids for branch in branches}) == 3
        assert all(branch.token_ids[: len(root.token_ids)] == root.token_ids for branch in branches)
        grandchild = branches[0].append(" and the fox").fork()[0]
        assert grandchild.token_ids == branches[0].token_ids
        assert grandchild.text.endswith(" and the fox")
        for branch in (*branches, grandchild):
            branch.close()


def test_generating_is_the_same_as_from_the_whole_text(llm: LLM) -> None:
    with llm.session(TEXT) as line:
        first = line.generate(SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        second = line.generate(SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    (whole,) = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    made = first.outputs[0].token_ids + second.outputs[0].token_ids
    assert made == whole.outputs[0].token_ids


def test_a_score_is_the_sum_of_logprobs(llm: LLM, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with llm.session(TEXT) as line:
        before = line.token_ids
        score = line.score(" quick fox")
        assert line.token_ids == before
    more = llm.get_tokenizer()(" quick fox", add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logprobs = model(torch.tensor([[*before, *more]])).logits[0].log_softmax(-1)
    expected = sum(float(logprobs[len(before) - 1 + i, token]) for i, token in enumerate(more))
    assert score == pytest.approx(expected, abs=1e-3)


def test_scoring_computes_only_the_text_and_the_token_before_it(llm: LLM) -> None:
    with llm.session(TEXT) as line:
        line.generate(sampled(1))
        line.append(" and")  # these tokens are not cached yet
        missing = (
            len(line.token_ids)
            - llm._text_engine.engine.tree.match(
                list(line.token_ids), llm._text_engine.engine.intake.namespace(None)
            ).length
        )
        more = llm.get_tokenizer()(" the key", add_special_tokens=False)["input_ids"]
        before = llm.cache_report().computed_tokens
        score = line.score(" the key")
        assert llm.cache_report().computed_tokens - before == missing + len(more)
        before = llm.cache_report().computed_tokens
        assert line.score(" the key") == pytest.approx(score, abs=1e-5)
        assert llm.cache_report().computed_tokens - before == len(more) + 1


def test_open_sessions_stay_cached_and_closed_ones_may_go(llm: LLM) -> None:
    engine = llm._text_engine.engine
    line = llm.session(TEXT)
    line.generate(sampled(0))
    kept = list(line.token_ids)[:-1]
    for number in range(8):
        llm.generate([[5 + number, 7] * 200], SamplingParams(max_tokens=1))
    assert engine.tree.match(kept, engine.intake.namespace(None)).length == len(kept)
    line.close()
    line.close()
    assert len(engine.pins) == 0
    for number in range(8):
        llm.generate([[20 + number, 7] * 200], SamplingParams(max_tokens=1))
    assert engine.tree.match(kept, engine.intake.namespace(None)).length == 0


@pytest.mark.parametrize("max_tokens", [200, None])
def test_a_session_may_grow_into_what_it_pins_itself(
    checkpoint: Path, max_tokens: int | None
) -> None:
    """With `pin_budget=1.0` its own pin refused it, or cut what it generates."""
    llm = LLM(str(checkpoint), kv_cache_tokens=512, page_size=4, max_num_seqs=2, pin_budget=1.0)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with llm.session([5, 7, 9] * 100) as line:
        line.generate(SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        pins = llm._text_engine.engine.pins
        assert len(pins) == 1 and pins.promised_pages() > 70
        made = line.generate(params).outputs[0]
        assert len(made.token_ids) == (200 if max_tokens else 512 - 301)
        assert len(pins) == 1, "it is kept again"
        llm._text_engine.engine.check()
    with llm.session([5, 7, 9] * 100) as line, llm.session([8, 6] * 80) as other:
        other.generate(SamplingParams(max_tokens=1))
        line.generate(SamplingParams(max_tokens=1))
        assert line.score(" quick fox") < 0
        with pytest.raises(ValueError, match="the part of the KV cache that no pin keeps"):
            line.append(" quick" * 60).generate(params)
        assert other._name in {pin.name for pin in pins}, "another session keeps its pin"


def test_sessions_end_in_any_order_and_leave_no_pin(llm: LLM) -> None:
    """A fork may outlive its origin, and nothing is computed again for that."""
    pins = llm._text_engine.engine.pins
    root = llm.session(TEXT)
    root.generate(sampled(0))
    child = root.fork()[0]
    root.close()
    grandchildren = child.fork(2)
    child.close()
    before = llm.cache_report().computed_tokens
    Session.generate_all(grandchildren, [sampled(1), sampled(2)])
    assert llm.cache_report().computed_tokens - before <= 2 + 2 * 6
    grandchildren[1].close()
    with pytest.raises(ValueError, match="it was closed"):
        Session.generate_all(grandchildren)
    assert len(pins) == 1
    again = grandchildren[0].append(" and").fork(2)
    grandchildren[0].close()
    for each in reversed(again):
        each.close()
    assert len(pins) == 0
    llm._text_engine.engine.reset_cache()


def test_the_example_searches_a_tree_and_closes_all_but_the_best(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = Path(__file__).parents[3] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    example = import_module("tree_of_thoughts")
    best = example.search(llm, TEXT, depth=2, branches=3)
    assert best.text.startswith(TEXT) and len(best.text) > len(TEXT)
    assert len(llm._text_engine.engine.pins) == 1
    best.close()
    counts = llm.cache_report().accounts.overall.since_start
    assert counts.evicted == 0
    assert counts.hit_tokens > 0.95 * counts.ideal_tokens, "branches share what they can"
    lines = (benchmarks / "tree_of_thoughts.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


def test_what_does_not_fit_the_budget_still_works(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), kv_cache_tokens=256, page_size=4, pin_budget=0.0)
    with llm.session(TEXT) as line:
        line.generate(sampled(0))
        assert len(llm._text_engine.engine.pins) == 0


def test_closing_after_the_llm_was_shut_down_does_nothing(llm: LLM) -> None:
    compiling = llm._text_engine.engine.intake._grammars._thread
    with llm.session(TEXT) as line:
        llm.shutdown()
    line.close()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        compiling.submit(print)


def test_a_stop_token_that_is_shown_stays_in_the_session(llm: LLM) -> None:
    greedy = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    made = llm.generate(TEXT, SamplingParams(**greedy))[0].outputs[0].token_ids
    for shown in (False, True):
        with llm.session(TEXT) as line:
            stop = SamplingParams(
                **greedy, stop_token_ids=[made[2]], include_stop_str_in_output=shown
            )
            before = line.token_ids
            output = line.generate(stop).outputs[0]
            text, count = output.text, len(output.token_ids) - (not shown)
            assert line.token_ids == before + output.token_ids[:count]
            assert line.text.endswith(text)


def test_sessions_among_other_requests_in_a_small_pool(checkpoint: Path) -> None:
    """Random calls: each text and score as without a cache, pages recounted at each step."""
    alone = LLM(str(checkpoint), kv_cache_tokens=2048, enable_prefix_caching=False)
    _random_sessions(checkpoint, alone, 0, 3)


@pytest.mark.slow
def test_more_sessions_among_other_requests(checkpoint: Path) -> None:
    alone = LLM(str(checkpoint), kv_cache_tokens=2048, enable_prefix_caching=False)
    _random_sessions(checkpoint, alone, 100, int(os.environ.get("COPPICE_SCHEDULES", "60")))


def _random_sessions(checkpoint: Path, alone: LLM, first: int, count: int) -> None:
    refused = 0
    for seed in range(first, first + count):
        rng = random.Random(seed)
        size = rng.choice([1, 4, 7, 16])
        llm = LLM(
            str(checkpoint), kv_cache_tokens=size * -(-rng.choice([160, 200, 300]) // size),
            page_size=size, max_num_seqs=rng.randint(1, 4), max_num_batched_tokens=32,
            pin_budget=rng.choice([0.0, 0.3, 0.7, 1.0]), max_model_len=150,
        )  # fmt: skip
        try:
            refused += _random_calls(rng, llm, alone)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert count < 30 or refused, "no pin was in the way of another request"


def _random_calls(rng: random.Random, llm: LLM, alone: LLM) -> int:
    engine, refused = llm._text_engine.engine, 0
    step = engine.step

    def checked() -> Any:
        outputs = step()
        engine.check()
        return outputs

    engine.step = checked  # type: ignore[method-assign]
    opened = [llm.session(TEXT)]
    for _ in range(14):
        line, chance = rng.choice(opened), rng.random()
        greedy = SamplingParams(temperature=0, max_tokens=rng.randint(1, 6), ignore_eos=True)
        try:
            if chance < 0.2:
                opened += line.fork(rng.randint(1, 2))
            elif chance < 0.5:
                lines = rng.sample(opened, rng.randint(1, len(opened)))
                before = [each.token_ids for each in lines]
                outputs = Session.generate_all(lines, greedy)
                theirs = alone.generate([list(each) for each in before], greedy)
                for each, old, mine, their in zip(lines, before, outputs, theirs, strict=True):
                    assert mine.outputs[0].token_ids == their.outputs[0].token_ids
                    assert each.token_ids == old + their.outputs[0].token_ids
            elif chance < 0.6:
                with alone.session(list(line.token_ids)) as other:
                    expected = other.score(" quick fox")
                assert line.score(" quick fox") == pytest.approx(expected, abs=1e-4)
            elif chance < 0.7:
                line.append(rng.choice([" and", " the key", " Where is the mat?"]))
            elif chance < 0.8:
                opened.append(llm.session([rng.randrange(5, 300) for _ in range(30)]))
            elif chance < 0.85 and len(opened) > 1:
                opened.remove(line)
                line.close()
            elif chance < 0.88:
                llm.reset_prefix_cache()
            else:
                prompt = [rng.randrange(5, 300) for _ in range(rng.randint(1, 120))]
                (mine,), (their,) = (
                    each.generate(prompt, greedy)[0].outputs for each in (llm, alone)
                )
                if (made := len(mine.token_ids)) < len(their.token_ids):
                    # It grew until the other pages were those that pins may take.
                    assert mine.finish_reason == "length"
                    pages = -(-(len(prompt) + made) // engine.tree.pool.page_size)
                    assert pages + engine.pins.promised_pages() >= engine.num_pages
                assert mine.token_ids == their.token_ids[:made]
        except ValueError as error:
            pinned = "that no pin keeps" in str(error)
            if not (pinned or "max_model_len" in str(error)):
                raise
            refused += pinned
        engine.check()
    for line in opened:
        line.close()
    assert len(engine.pins) == 0
    llm.reset_prefix_cache()
    assert engine.tree.pool.free_pages == engine.num_pages
    return refused


def test_misuse_is_refused(llm: LLM) -> None:
    line = llm.session()
    with pytest.raises(ValueError, match="a session and its continuation need a token each"):
        line.score("x")
    line.append("The key")
    with pytest.raises(ValueError, match="count must be an integer of at least 1"):
        line.fork(0)
    with pytest.raises(ValueError, match="n must be 1 in a session"):
        line.generate(SamplingParams(n=2))
    with pytest.raises(ValueError, match=r"sessions must differ.*; sessions\[1\] came before"):
        Session.generate_all([line, line])
    with pytest.raises(ValueError, match="sampling_params must be a SamplingParams or a list"):
        Session.generate_all([line], ["x"])  # type: ignore[list-item]
    line.close()
    with pytest.raises(ValueError, match="it was closed"):
        line.append("more")
    with pytest.raises(ValueError, match="sessions must not be empty"):
        Session.generate_all([])
