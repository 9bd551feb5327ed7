"""What a prompt would hit: equal to what happens next, and without a trace."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coppice.radix import Namespace
from coppice.radix.node import Node
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.helpers.fake_model import fake_checkpoint, fake_engine

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def run(engine: Engine, prompt: list[int], **more: Any) -> int:
    """Serves a request; returns its hit."""
    engine.add_request("x", prompt, GREEDY, **more)
    outputs = [output for _ in range(50) for output in engine.step()]
    assert not engine.has_unfinished()
    return outputs[-1].cached_tokens


def state(engine: Engine) -> Any:
    """All that a peek must leave as it is."""

    def below(node: Node) -> Any:
        children = [below(node.children[key]) for key in sorted(node.children)]
        return node.edge, node.stamp, node.hits, node.locks, node.pages.tobytes(), children

    report = make_report(engine)
    assert report.accounts is not None
    return (
        engine.tree.clock,
        {name: below(root) for name, root in engine.tree.roots.items()},
        engine.tree.pool.refs.tobytes(),
        report.accounts.overall.since_start,
        report.accounts.near_misses,
        report.counts,
        [each.request_id for each in report.recent],
        engine.num_unfinished,
    )


def small_engine(folder: Path, **options: Any) -> Engine:
    """An engine of 40 pages over a model that only knows which tokens it saw."""
    checkpoint = fake_checkpoint(folder)
    return fake_engine(checkpoint, kv_cache_tokens=160, page_size=4, pin_budget=0.8, **options)[0]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return small_engine(tmp_path)


def test_what_it_says_is_what_happens(engine: Engine) -> None:
    """Of random prompts that share prefixes and contents, in two namespaces, under eviction."""
    numbers = random.Random(5)
    texts = [[numbers.randrange(40) for _ in range(60)] for _ in range(4)]
    kinds = set()
    begin = time.monotonic() + 100
    for turn in range(150):
        engine.accounts._clock = partial(float, begin + 10 * turn)
        salt = numbers.choice((None, None, "s"))
        text = numbers.choice(texts)
        prompt = [*text[: numbers.randrange(1, 60)], numbers.randrange(40)]
        if numbers.random() < 0.3:
            prompt = [numbers.randrange(40), *prompt]
        before = state(engine)
        peek = engine.peek(prompt, cache_salt=salt)
        assert state(engine) == before
        assert peek.namespace == Namespace(model=engine.config.model, cache_salt=salt)
        assert run(engine, prompt, cache_salt=salt) == peek.cached_tokens, turn
        recent = make_report(engine).recent[-1]
        assert recent.causes == peek.causes, turn
        assert recent.evicted_idle_seconds == pytest.approx(peek.evicted_idle_seconds, abs=1e-3)
        assert peek.cached_tokens + sum(peek.causes.values()) == peek.prompt_tokens == len(prompt)
        pages = peek.shared_pages + peek.new_pages
        assert pages == -(-len(prompt) // 4)
        assert peek.copied_pages == int(peek.cached_tokens % 4 > 0)
        kinds |= {*peek.causes}
    assert {"cold", "evicted", "namespace", "diverged", "last_token"} <= kinds


def test_what_another_request_computes_is_in_flight(tmp_path: Path) -> None:
    engine = small_engine(tmp_path, max_num_seqs=8, max_num_batched_tokens=16)
    prompt = [place * place % 37 for place in range(60)]
    engine.add_request("leader", prompt, GREEDY)
    engine.step()
    peek = engine.peek([*prompt[:50], 38, 39])
    assert (peek.cached_tokens, peek.causes["in_flight"]) == (16, 34)
    while engine.has_unfinished():
        engine.step()
    assert engine.peek([*prompt[:50], 38, 39]).cached_tokens == 50


def test_what_another_replica_holds(engine: Engine) -> None:
    prompt = list(range(1, 40))
    assert run(engine, prompt[:10]) == 0
    peek = engine.peek(prompt, held_elsewhere=30)
    assert (peek.cached_tokens, peek.causes) == (10, {"other_replica": 20, "cold": 9})
    assert run(engine, prompt, held_elsewhere=30) == 10
    (_, last) = make_report(engine).recent
    assert last.causes == peek.causes
    assert engine.peek(prompt, held_elsewhere=30).causes == {"last_token": 1}
    counts = make_report(engine).counts
    assert (counts.other_replica, counts.ideal_tokens) == (20, 30)
    # Several sequences of one request miss it once.
    fanned = SamplingParams(n=3, max_tokens=2, ignore_eos=True)
    engine.add_request("n", [39, *prompt], fanned, held_elsewhere=10**9)
    while engine.has_unfinished():
        engine.step()
    assert make_report(engine).counts.other_replica == 20 + 40
    for wrong in (-1, True, 2.0):
        for method in (engine.add_request, engine.add_beam_search):
            given = GREEDY if method == engine.add_request else BeamSearchParams(2, 3)
            with pytest.raises(ValueError, match="held_elsewhere must be an integer of at least 0"):
                method("x", prompt, given, held_elsewhere=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="held_elsewhere"):
            engine.peek(prompt, held_elsewhere=wrong)  # type: ignore[arg-type]
    assert not engine.has_unfinished()


def test_pins_and_prompt_logprobs(engine: Engine) -> None:
    prompt = list(range(1, 40))
    assert run(engine, prompt) == 0
    engine.pin("p", prompt[:20])
    engine.pin("other", prompt[:30], cache_salt="s")
    assert engine.peek(prompt).pinned_tokens == 20
    assert engine.peek(prompt[:10]).pinned_tokens == 9
    assert engine.peek(prompt, cache_salt="s").pinned_tokens == 0
    limited = engine.peek(prompt, prompt_logprobs=0)
    assert (limited.cached_tokens, limited.causes) == (0, {"prompt_logprobs": 39})
    later = engine.peek(prompt, prompt_logprobs=0, prompt_logprobs_start=30)
    assert later.cached_tokens == 29


def test_a_hit_that_the_pool_has_no_room_for_is_not_promised(tmp_path: Path) -> None:
    """It needs a copy of the page in which its hit ends, beside that page: 41 of 40 pages."""
    engine = small_engine(tmp_path, max_num_seqs=8)
    prompt = [place * place % 37 for place in range(157)]
    assert run(engine, prompt) == 0
    longer = [*prompt[:154], 38, 39, 38]
    peek = engine.peek(longer)
    assert (peek.cached_tokens, peek.shared_pages, peek.new_pages) == (0, 0, 40)
    assert sum(peek.causes.values()) == 157
    engine.add_request("x", [1, 2, 3], GREEDY)
    engine.step()
    again = engine.peek(longer)
    assert (again.cached_tokens, again.new_pages) == (0, 40), "others only delay it"
    while engine.has_unfinished():
        engine.step()
    engine.reset_cache()
    assert run(engine, prompt) == 0
    before = engine.peek(longer)
    assert run(engine, longer) == before.cached_tokens == 0
    assert make_report(engine).recent[-1].causes == before.causes
    # The same where a pin takes the place.
    engine.reset_cache()
    engine.pin("p", pinned := [(38 - place) % 39 for place in range(60)])
    assert run(engine, [*pinned, 1]) == 0
    assert run(engine, prompt[:90]) == 0
    for count in (85, 98, 99):
        longer = [*prompt[:82], *[39] * (count - 82)]
        expected = engine.peek(longer).cached_tokens
        assert expected == (0 if count > 96 else 82), count
        assert run(engine, longer) == expected


def test_what_cannot_be_served_is_refused(engine: Engine) -> None:
    for prompt, message in (([], "at least one token"), ([1] * 4000, "shorter than"), ([-1], "-1")):
        with pytest.raises(ValueError, match=message):
            engine.peek(prompt)


def test_without_a_cache(tmp_path: Path) -> None:
    engine = small_engine(tmp_path, enable_prefix_caching=False)
    assert run(engine, [1, 2, 3, 4, 5]) == 0
    peek = engine.peek([1, 2, 3, 4, 5])
    assert (peek.cached_tokens, peek.causes, peek.new_pages) == (0, {}, 2)
