"""Several sequences of one request: one prefill, shared pages, reproducible and independent."""

from __future__ import annotations

import pytest
import torch
from reference_engine import reference_engine as make

from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.sampling_params import SamplingParams

PROMPT = [5, 9, 33, 7, 12, 81, 44, 3, 3, 17, 60, 61, 62, 63, 64, 65, 66, 67, 68]


def run(engine, requests):
    """Tokens by (request, index); every page and lock is recounted after each step."""
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    tokens, ended = {}, set()
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            key = output.request_id, output.index
            assert key not in ended
            tokens.setdefault(key, []).extend(output.new_token_ids)
            if output.finish_reason:
                ended.add(key)
        engine.check()
    assert set(tokens) == ended
    assert make_report(engine).pages_held == 0
    return tokens


def sampled(n, **options):
    return SamplingParams(n=n, temperature=1.0, max_tokens=12, ignore_eos=True, **options)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_is_computed_once(tiny_checkpoint, page_size, caching):
    engine = make(tiny_checkpoint("llama"), page_size=page_size, enable_prefix_caching=caching)
    rows = []
    forward = engine.runner.decoder.forward
    engine.runner.decoder.forward = lambda ids, *rest: rows.append(len(ids)) or forward(ids, *rest)
    tokens = run(engine, {"a": (PROMPT, sampled(5, seed=1))})
    assert rows == [len(PROMPT)] + [5] * 11
    assert len({tuple(each) for each in tokens.values()}) > 1, "siblings differ"
    report = make_report(engine)
    assert (report.requests, report.prompt_tokens) == (1, len(PROMPT))
    assert report.hit_tokens == 0, "what siblings share is not a hit between requests"
    if caching:
        counts = report.accounts.overall.since_start
        assert (counts.requests, counts.hit_tokens) == (1, 0)
        assert counts.same_hit_tokens == 4 * len(PROMPT)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_sequence_is_reproducible_beside_any_requests(tiny_checkpoint, page_size):
    """Alone, beside others, with too few places, and with a pool so small that they preempt."""
    path = tiny_checkpoint("qwen2")
    alone = run(make(path), {"a": (PROMPT, sampled(4, seed=7))})
    few = run(make(path), {"a": (PROMPT, sampled(2, seed=7))})
    assert few == {key: alone[key] for key in few}, "index i does not depend on n"
    others = {
        "b": ([*PROMPT[:9], 1, 2], sampled(3, seed=8)),
        "c": (PROMPT, SamplingParams(temperature=0, max_tokens=9)),
    }
    for options in (
        {},
        {"max_num_seqs": 2},
        {"kv_cache_tokens": 64, "max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
    ):
        engine = make(path, page_size=page_size, **options)
        tokens = run(engine, {"a": (PROMPT, sampled(4, seed=7)), **others})
        assert {key: tokens[key] for key in alone} == alone, options
        if "kv_cache_tokens" in options:
            assert engine.counters.preemptions > 0


def test_greedy_siblings_are_equal_and_share_their_pages(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"), page_size=4)
    params = SamplingParams(n=3, temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    engine.step()
    tables = [sequence.table for sequence in engine.scheduler.running]
    assert len(tables) == 3
    full = len(PROMPT) // 4
    assert all(table[:full] == tables[0][:full] for table in tables)
    assert len({table[full] for table in tables}) == 3, "each has the unfinished page to itself"
    tokens = run(engine, {})
    assert len({tuple(each) for each in tokens.values()}) == 1


def test_one_sequence_can_end_before_the_others(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"))
    engine.add_request("a", PROMPT, sampled(3, seed=3))
    engine.step()
    assert engine.abort("a", 1)
    assert not engine.abort("a", 1)
    engine.check()
    tokens = run(engine, {})
    assert set(tokens) == {("a", 0), ("a", 2)}
    engine.add_request("b", PROMPT, sampled(3, seed=3))
    engine.step()
    assert engine.abort("b")
    assert not engine.has_unfinished()
    engine.check()


def test_a_step_that_fails_ends_all_of_a_request(tiny_checkpoint, monkeypatch):
    engine = make(tiny_checkpoint("llama"), max_num_seqs=2)
    engine.add_request("a", PROMPT, sampled(3, seed=3))
    engine.step()

    def broken(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.decoder, "forward", broken)
        outputs = engine.step()
    assert sorted(output.index for output in outputs) == [0, 1, 2]
    assert all(output.finish_reason == "error" for output in outputs)
    assert not engine.has_unfinished()
    engine.check()
    assert len(run(engine, {"b": (PROMPT, sampled(2))})) == 2


def test_logprobs_of_siblings_are_their_own(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"))
    engine.add_request("a", PROMPT, sampled(3, seed=5, logprobs=2))
    seen = {}
    while engine.has_unfinished():
        for output in engine.step():
            seen.setdefault(output.index, []).append(float(output.logprobs.logprobs[0]))
    assert len({tuple(values) for values in seen.values()}) == 3
    assert torch.tensor(list(seen.values())).lt(0).all()


def test_best_of_above_n_is_left_to_the_caller_who_has_the_texts(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"))
    with pytest.raises(ValueError, match="best_of must not be above n here"):
        engine.add_request("a", PROMPT, SamplingParams(n=1, best_of=2))
    assert len(run(engine, {"a": (PROMPT, sampled(2, best_of=2))})) == 2
