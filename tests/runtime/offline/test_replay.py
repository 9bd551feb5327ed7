"""Replays without a model: their hits, merged steps, reports and the nodes they show."""

from __future__ import annotations

import random
from array import array
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.radix import PrefixSavings, check
from coppice.runtime.offline.replay import Replay, ReplayOptions, ReplayReport, ReplayRequest
from coppice.runtime.report.snapshot import Counts


def request(prompt, output=(), namespace=None, time=0.0) -> ReplayRequest:
    return ReplayRequest(array("i", prompt), array("i", output), namespace, time)


def replayed(requests, kind=Replay, **options) -> tuple[Replay, ReplayReport]:
    """A finished replay, after which every page is free or cached, and its report."""
    replay = kind(ReplayOptions(**options))
    finished = list(replay.run(requests, len(requests)))
    assert finished == sorted(finished)
    assert finished[-1:] == [len(requests)][: len(requests)]
    check(replay.tree)
    report = replay.report()
    assert report.pages_free + replay.tree.cached_pages == report.pages_total
    assert report.generated_tokens == sum(len(each.output) for each in requests)
    return replay, report


class StepByStep(Replay):
    """Takes every decoding step by itself."""

    def _sample_ahead(self) -> set[int]:
        return set()


def random_trace(seed: int, count: int, longest: int) -> list[ReplayRequest]:
    """Prompts of two namespaces, half of which continue earlier ones."""
    rng = random.Random(seed)
    texts: list[list[int]] = []
    requests = []
    for number in range(count):
        start = rng.choice(texts)[: rng.randint(1, longest // 2)] if texts and number % 2 else []
        prompt = start + [rng.randrange(4) for _ in range(rng.randint(1, longest // 4))]
        output = [rng.randrange(4) for _ in range(rng.choice((0, 1, 2, longest // 5)))]
        texts.append(prompt + output)
        namespace = rng.choice((None, None, "other"))
        requests.append(request(prompt, output, namespace, number / 2))
    return requests


# -- what hits ---------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)
traces = st.lists(
    st.tuples(tokens, st.lists(st.integers(0, 2), max_size=5), st.sampled_from((None, "a"))),
    min_size=1,
    max_size=12,
)


@given(trace=traces, page_size=st.integers(1, 5))
def test_one_after_another_hits_the_longest_prefix_of_all_before(trace, page_size) -> None:
    known: list[tuple[str | None, list[int]]] = []
    hits = 0
    for prompt, output, namespace in trace:
        longest = 0
        for other, text in known:
            same = 0
            while same < min(len(text), len(prompt) - 1) and text[same] == prompt[same]:
                same += 1
            longest = max(longest, same if other == namespace else 0)
        hits += longest
        # The KV of the last token that was sampled is never computed.
        known.append((namespace, prompt + output[:-1]))
    requests = [request(*each, time=number) for number, each in enumerate(trace)]
    _, report = replayed(requests, pool_tokens=1000, page_size=page_size)
    counts = report.accounts.overall.since_start
    assert counts.hit_tokens == hits
    assert counts.requests == len(trace)
    assert counts.prompt_tokens == sum(len(prompt) for prompt, _, _ in trace)
    assert sum(counts.causes.values()) == counts.computed_tokens


def test_a_request_waits_for_a_prompt_that_another_computes() -> None:
    prompt = list(range(300))
    twins = [request(prompt, range(5)), request(prompt, range(5, 9))]
    _, report = replayed(twins, pool_tokens=2000, concurrency=2)
    assert report.accounts.overall.since_start.hit_tokens == 299


def test_the_longest_hit_of_the_waiting_requests_is_admitted_first() -> None:
    """With a pool for one conversation, order decides whether its second turn still hits."""
    first, other = list(range(100)), list(range(500, 600))
    trace = [
        request(first, range(1000, 1004)),
        request([*range(700, 750)], range(1010, 1030)),
        request(other, [1]),
        request([*first, 5], [1]),
    ]
    _, together = replayed(trace, pool_tokens=208, concurrency=2)
    _, one_by_one = replayed(trace, pool_tokens=208, concurrency=1)
    assert one_by_one.accounts.overall.since_start.hit_tokens < 100
    assert together.accounts.overall.since_start.hit_tokens >= 100


# -- merged steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 2, 3, 8])
@pytest.mark.parametrize("pool_tokens", [96, 200, 600, 5000])
def test_merged_steps_change_no_result(concurrency: int, pool_tokens: int) -> None:
    for seed in range(6):
        trace = random_trace(seed, 40, 60)
        options = {"pool_tokens": pool_tokens, "page_size": 4, "concurrency": concurrency}
        _, fast = replayed(trace, **options)
        _, slow = replayed(trace, StepByStep, **options)
        assert (fast.accounts, fast.tree.nodes) == (slow.accounts, slow.tree.nodes)
        for name in ("stretches", "top_prefixes", "evicted_tokens", "preemptions"):
            assert getattr(fast, name) == getattr(slow, name), name


def test_steps_are_merged() -> None:
    steps = []

    class Counting(Replay):
        def _step(self) -> None:
            steps.append(len(self._outputs))
            super()._step()

    replayed([request([1, 2, 3], range(1000))], Counting, pool_tokens=2000)
    assert len(steps) < 5


def test_preempted_sequences_finish() -> None:
    prompts = [[100 * number + each for each in range(20)] for number in range(8)]
    trace = [request(prompt, range(2000, 2040)) for prompt in prompts]
    _, report = replayed(trace, pool_tokens=128, page_size=4, concurrency=4)
    counts = report.accounts.overall.since_start
    assert report.preemptions > 0
    assert counts.requests == 8
    assert counts.preempted_tokens > 0


# -- what it reports ---------------------------------------------------------------------------


def test_stretches_add_up_to_the_whole() -> None:
    trace = random_trace(3, 230, 40)
    _, report = replayed(trace, pool_tokens=300, page_size=4)
    whole = report.accounts.overall.since_start
    assert 10 < len(report.stretches) <= 60
    for field in fields(Counts):
        parts = sum(getattr(stretch.counts, field.name) for stretch in report.stretches)
        assert parts == getattr(whole, field.name), field.name
    assert sum(stretch.evicted_tokens for stretch in report.stretches) == report.evicted_tokens
    assert [stretch.seconds for stretch in report.stretches] == sorted(
        stretch.seconds for stretch in report.stretches
    )
    assert report.stretches[-1].requests == 230
    assert report.accounts.seconds == trace[-1].time


def test_the_curve_may_be_of_another_size() -> None:
    trace = random_trace(3, 30, 40)
    _, report = replayed(trace, pool_tokens=8000, accounted_tokens=500)
    assert report.accounts.pool_tokens == 500
    assert report.accounts.curve[-1].pool_tokens == 8000


def test_nothing_to_replay() -> None:
    _, report = replayed([], pool_tokens=100)
    assert report.stretches == ()
    assert report.accounts.overall.since_start.requests == 0


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([request(range(90), range(11))], "at most the pool's 100 tokens; number 1 has 90 \\+ 11"),
        ([request([1]), request([])], "must have a prompt.* number 2 has 0"),
        ([request([1], time=3.0), request([1], time=2.0)], "must not decrease, got 2.0 after 3.0"),
    ],
)
def test_requests_that_cannot_be_replayed(trace: list[ReplayRequest], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(Replay(ReplayOptions(pool_tokens=100, page_size=4)).run(trace, len(trace)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_tokens": 0}, "pool_tokens must be an integer of at least 1, got 0"),
        ({"page_size": 1.5}, "page_size must be an integer of at least 1, got 1.5"),
        ({"concurrency": True}, "concurrency must be an integer of at least 1, got True"),
        ({"accounted_tokens": 0}, "accounted_tokens must be"),
        ({"pool_tokens": 2**36 + 1}, "pool_tokens must be at most 68719476736, got 68719476737"),
        ({"page_size": 2**37}, "page_size must be at most 68719476736"),
        ({"pool_tokens": 2**36}, "pool_tokens must be at most 1073741823 pages of 16"),
        ({"eviction_policy": "fifo"}, "eviction_policy must be one of lru, .*got 'fifo'"),
    ],
)
def test_options_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayOptions(**options)


# -- the picture of the tree -------------------------------------------------------------------


def test_every_node_shown_has_its_parent_before_it() -> None:
    replay, report = replayed(random_trace(5, 200, 60), pool_tokens=4000, page_size=4)
    assert len(report.tree.nodes) > 20
    for place, node in enumerate(report.tree.nodes):
        assert node.parent < place
        if node.parent >= 0:
            parent = report.tree.nodes[node.parent]
            assert parent.end == node.start
            assert parent.hits >= node.hits
            assert parent.namespace == node.namespace
            assert parent.subtree_saved >= parent.tokens_saved + node.subtree_saved
    saved = sum(node.hits * node.length for node in replay.tree.nodes())
    shown = PrefixSavings(replay.tree).nodes(10_000)
    assert sum(node.subtree_saved for node in shown if node.parent < 0) == saved
