"""The snapshots of an engine: cumulative counts for metrics, and counts that must stay 0."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coppice.radix import Match
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report, make_stats
from coppice.runtime.report.snapshot import EngineStats
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.request import QueueFull, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.paging import Paging

PROMPT = list(range(40, 77))


def params(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **more)


@pytest.fixture
def make(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        model = str(tiny_checkpoint("llama"))
        return Engine(EngineConfig(model, **({"kv_cache_tokens": 1024} | options)))

    return make


def run(engine: Engine) -> EngineStats:
    while engine.has_unfinished():
        engine.step()
    return make_stats(engine)


def test_every_request_and_token_is_counted_once(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add_request("a", PROMPT, params(5))
    assert (make_stats(engine).requests_waiting, make_stats(engine).requests_running) == (1, 0)
    engine.step()
    assert (make_stats(engine).requests_waiting, make_stats(engine).requests_running) == (0, 1)
    run(engine)
    engine.add_request("b", PROMPT, params(3, n=2))
    engine.add_request("c", PROMPT[:9], params(50))
    engine.step()
    engine.abort("c")
    stats = run(engine)
    assert stats.finished == {"stop": 0, "length": 2, "abort": 1, "error": 0}
    assert (stats.queue.count, stats.ttft.count, stats.request.count) == (3, 3, 3)
    assert stats.itl.count == 4 + 2 * 2
    assert stats.generated_tokens == 5 + 6 + 1
    assert stats.prompt_tokens == 2 * len(PROMPT) + 9 == stats.counts.prompt_tokens
    assert stats.counts.hit_tokens == len(PROMPT) - 1 + 8
    assert stats.step.count == stats.step_tokens.count == stats.step_sequences.count == 8
    assert stats.step_tokens.total == stats.computed_tokens + 4 + 2 * 2
    assert (stats.pages_free + stats.pages_cached, stats.pages_held) == (stats.pages_total, 0)
    assert stats.request.total >= stats.ttft.total >= stats.queue.total >= 0
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_a_request_whose_only_sequence_is_aborted_has_stopped(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add_request("a", PROMPT, params(5))
    engine.step()
    engine.abort("a", 0)
    assert make_stats(engine).finished["stop"] == 1


def test_a_search_counts_from_its_arrival_to_its_end(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add_beam_search("a", PROMPT, BeamSearchParams(beam_width=3, max_tokens=4))
    stats = run(engine)
    assert stats.request.count == stats.queue.count == 1
    assert stats.ttft.count == 0
    assert sum(stats.finished.values()) == 1


def test_refusals_by_their_limit(make: Callable[..., Engine]) -> None:
    engine = make(max_queued_requests=1)
    engine.add_request("a", PROMPT, params(1))
    with pytest.raises(QueueFull) as refused:
        engine.add_request("b", PROMPT, params(1))
    assert pickle.loads(pickle.dumps(refused.value)).limit == "max_queued_requests"
    with pytest.raises(ValueError, match="prompt"):
        engine.add_request("c", [], params(1))
    stats = run(engine)
    assert stats.refused == {"max_queued_requests": 1, "max_queued_tokens": 0}
    assert stats.request.count == 1


def test_a_failed_step_ends_its_requests_as_errors(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine.runner, "run", broken)
    engine.add_request("a", PROMPT, params(5))
    stats = run(engine)
    assert (stats.failed_steps, stats.finished["error"], stats.step.count) == (1, 1, 0)


def test_evictions_with_their_age(make: Callable[..., Engine]) -> None:
    engine = make(kv_cache_tokens=128)
    for first in range(0, 300, 60):
        engine.add_request(str(first), range(first, first + 60), params(4))
        run(engine)
    stats = make_stats(engine)
    assert stats.evicted_tokens > 100
    assert stats.eviction_age.count == stats.evicted_tokens
    assert stats.eviction_age.total > 0
    assert stats.counts.evicted == 0
    engine.add_request("again", range(60), params(1))
    assert run(engine).counts.evicted > 0


def test_nothing_is_lost_to_page_rounding(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hit is rounded down; and if one were, it would be counted."""
    engine = make(page_size=16)
    for length in range(3, 37, 4):
        engine.add_request(str(length), PROMPT[:length], params(2))
        run(engine)
    engine.add_request("whole", PROMPT, params(2))
    engine.add_request("logprobs", PROMPT[:20], params(2, prompt_logprobs=1))
    assert run(engine).rounded_off_tokens == 0

    exact = Paging.match

    def rounded(paging: Paging, sequence: Sequence) -> Match:
        length = exact(paging, sequence).length // 16 * 16
        return paging.tree.match(sequence.tokens, sequence.request.namespace, length)

    monkeypatch.setattr(Paging, "match", rounded)
    other = list(range(150, 190))  # one node holds all of it
    engine.add_request("other", other, params(2))
    assert run(engine).rounded_off_tokens == 0
    engine.add_request("rounded", [*other[:30], 7, 7, 7], params(2))
    assert run(engine).rounded_off_tokens == 30 % 16


def test_the_report_is_plain_data(make: Callable[..., Engine]) -> None:
    engine = make()
    for request in "ab":
        engine.add_request(request, PROMPT, params(2), cache_salt="secret")
        run(engine)
    engine.pin("p", PROMPT[:9])
    report = pickle.loads(pickle.dumps(make_report(engine)))
    assert report.hit_tokens == report.counts.hit_tokens == len(PROMPT) - 1
    assert [pin.name for pin in report.pins] == ["p"]
    (prefix, *_) = report.top_prefixes
    assert (prefix.num_tokens, prefix.token_ids) == (36, tuple(PROMPT[:36]))
    assert report.tree.nodes[0].token_ids[:5] == tuple(PROMPT[:5])
    assert report.tree.seconds > 0
    cheap = make_report(engine, tree=False)
    assert (cheap.tree, cheap.top_prefixes) == (None, ())
    assert repr(cheap) == "<CacheReport: 2 requests, 36 of 74 prompt tokens hit (48.6%)>"
