"""The accounts that the engine keeps: hits and causes of misses of real requests."""

from __future__ import annotations

import random

import pytest

from coppice.radix import PagePool, RadixTree
from coppice.radix.accounting.near_misses import Difference
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.metrics.prompt_accounts import RECENT_REQUESTS, PromptAccounts
from coppice.runtime.requests.prompt_logprobs import PromptLogprobs
from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.schedule.scheduler import Scheduler


class Loop:
    """Scheduler, tree and accounts, with a step that computes and samples zeros."""

    def __init__(self, tokens: int, **limits: int) -> None:
        self.now = 0.0
        self.accounts = PromptAccounts(tokens, EngineCounters(), lambda: self.now)
        tree = RadixTree(PagePool(tokens // 4, 4))
        self.paging = Paging(tree, enable_prefix_caching=True, accounts=self.accounts)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **limits}
        self.scheduler = Scheduler(self.paging, **limits)
        self.arrivals = 0

    def add(
        self, prompt: list[int], *, out: int = 1, namespace: str | None = None, held: int = 0
    ) -> Sequence:
        request = Request(
            request_id=str(self.arrivals),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=out),
            namespace=namespace,
            arrival=self.arrivals,
            seed=0,
            max_length=len(prompt) + out,
            held_elsewhere=held,
        )
        self.arrivals += 1
        sequence = Sequence(request)
        self.scheduler.add(sequence)
        return sequence

    def run(self) -> None:
        while self.scheduler.running or len(self.scheduler.waiting):
            self.now += 1.0
            self.turn()

    def turn(self) -> None:
        """A step in which each sequence that has computed all of its tokens samples one."""
        for chunk in self.scheduler.schedule().chunks:
            sequence = chunk.sequence
            self.scheduler.computed(chunk)
            if not sequence.remaining:
                sequence.tokens.append(0)
                if len(sequence.tokens) == sequence.request.max_length:
                    self.scheduler.finish(sequence)

    def step(self) -> None:
        self.now += 1.0
        for chunk in self.scheduler.schedule().chunks:
            self.scheduler.computed(chunk)


def causes(sequence: Sequence) -> dict[str, int]:
    assert sequence.account is not None
    assert sum(sequence.account.causes.values()) == sequence.account.computed_tokens
    return {cause: count for cause, count in sequence.account.causes.items() if count}


def test_a_prompt_that_comes_again_misses_its_last_token_only() -> None:
    loop = Loop(256)
    first = loop.add(list(range(1, 33)))
    loop.run()
    second = loop.add(list(range(1, 33)))
    loop.run()
    assert causes(first) == {"cold": 32}
    assert causes(second) == {"last_token": 1}
    counts = loop.accounts.snapshot().overall.since_start
    assert (counts.requests, counts.prompt_tokens, counts.hit_tokens) == (2, 64, 31)


def test_another_namespace_is_a_cause_of_its_own() -> None:
    loop = Loop(256)
    loop.add(list(range(1, 33)), namespace="a")
    loop.run()
    other = loop.add(list(range(1, 33)), namespace="b")
    loop.run()
    assert causes(other)["namespace"] >= 31


def test_what_was_evicted_is_said_to_be_and_when_it_went() -> None:
    loop = Loop(128)
    loop.add(list(range(1, 65)))
    loop.run()
    before = loop.now
    loop.add(list(range(200, 300)))
    loop.run()
    after = loop.now
    again = loop.add(list(range(1, 65)))
    loop.run()
    assert causes(again).get("evicted", 0) >= 32
    assert again.account is not None
    went = again.account.evicted_at
    assert went is not None and before < went <= after


def test_a_hit_after_preemption_does_not_flatter_the_rate() -> None:
    loop = Loop(64, max_num_batched_tokens=16)
    for start in (100, 200, 300):
        loop.add(list(range(start, start + 16)), out=24)
    loop.run()
    assert loop.scheduler.counters.preemptions > 0
    counts = loop.accounts.snapshot().overall.since_start
    assert counts.requests == 3
    assert counts.prompt_tokens == 48
    assert counts.hit_tokens == 0
    assert counts.preempted_tokens > 0


def test_a_divergence_shows_both_sides() -> None:
    loop = Loop(256)
    loop.add([*range(1, 20), 50, 51, 52])
    loop.run()
    other = loop.add([*range(1, 20), 60, 61, 62])
    loop.run()
    assert other.account is not None and other.account.divergence is not None
    divergence = other.account.divergence
    assert divergence.position == 19
    assert list(memoryview(divergence.ours).cast("i")) == [60, 61, 62]
    assert list(memoryview(divergence.theirs).cast("i"))[:3] == [50, 51, 52]


def test_tokens_that_another_request_computes_are_in_flight() -> None:
    """Fewer than are worth waiting for; for more, the follower waits and hits them."""
    loop = Loop(256)
    loop.add([*range(1, 9), *range(50, 80)])
    follower = loop.add([*range(1, 9), *range(80, 99)])
    waiting = loop.add([*range(1, 9), *range(50, 78)])
    loop.run()
    assert causes(follower)["in_flight"] == 8
    assert waiting.account is not None and waiting.account.hit_tokens == 35


def test_tokens_that_another_replica_holds_were_lost_once() -> None:
    loop = Loop(64, max_num_batched_tokens=16)
    told = [loop.add(list(range(start, start + 16)), out=24, held=12) for start in (100, 200, 300)]
    loop.run()
    assert loop.scheduler.counters.preemptions > 0
    counts = loop.accounts.snapshot().overall.since_start
    assert (counts.other_replica, counts.cold, counts.ideal_tokens) == (36, 12, 36)
    assert sum(counts.causes.values()) == counts.computed_tokens
    back = [each for each in told if each.account is not None and each.account.kind != "cross"]
    assert back and all("other_replica" not in causes(each) for each in back)


def test_what_an_aborted_prompt_did_not_compute_was_not_seen() -> None:
    loop = Loop(256, max_num_batched_tokens=32)
    prompt = list(range(1, 101))
    for keep in (True, False):
        aborted = loop.add(prompt)
        loop.step()
        loop.scheduler.finish(aborted, keep=keep)
        loop.paging.tree.reset()
        again = loop.add(prompt)
        loop.step()
        loop.scheduler.finish(again)
        assert causes(again) == {"evicted": 32, "cold": 68}
        loop.paging.tree.reset()
        loop.accounts.cleared(loop.paging.tree)


def test_what_is_computed_again_for_prompt_logprobs_is_counted() -> None:
    loop = Loop(256, max_num_batched_tokens=128)
    prompt = list(range(1, 65))
    loop.add(prompt)
    loop.run()
    scored = loop.add(prompt)
    loop.scheduler.waiting.remove(scored)
    scored.reader = PromptLogprobs(scored.tokens.tobytes(), None, 0, None)
    loop.scheduler.add(scored)
    follower = loop.add([*prompt, 99, 98, 97])
    # The tree has the prompt, so nobody need wait for the one that computes it again.
    assert loop.scheduler.waiting.in_flight(follower) == 0
    schedule = loop.scheduler.schedule()
    assert {chunk.sequence for chunk in schedule.chunks} == {scored, follower}
    assert causes(scored) == {"prompt_logprobs": 64}
    assert causes(follower) == {"cold": 3}


def test_top_prefixes_tell_for_how_long_they_were_idle() -> None:
    loop = Loop(256)
    for own in (50, 60):
        loop.add([*range(1, 20), own])
        loop.run()
    loop.now += 100.0
    (prefix,) = loop.accounts.savings(loop.paging.tree).prefixes(5)
    assert prefix.num_tokens == 19
    assert prefix.resident_pages == 5
    assert prefix.idle_seconds == 100.0


def test_the_last_requests_are_reported_one_by_one() -> None:
    loop = Loop(256)
    shared = list(range(1, 101))
    loop.add([*shared, 901, 902, 903, 904])
    loop.run()
    loop.add([*shared, 801, 802, 903, 904, 701])
    loop.run()
    loop.add(shared, namespace="other")
    loop.run()
    loop.add(list(range(200, 440)))  # takes nearly all pages
    loop.run()
    before = loop.now
    loop.now += 50.0
    loop.add(shared)
    loop.run()
    first, second, third, _, last = loop.accounts.recent()
    assert [each.request_id for each in (first, second, third, last)] == ["0", "1", "2", "4"]
    assert (first.prompt_tokens, first.hit_tokens, first.causes) == (104, 0, {"cold": 104})
    assert first.divergence is None and first.difference is None and first.before == ()
    assert (second.hit_tokens, second.divergence) == (100, 100)
    assert second.before == tuple(shared[-48:])
    assert second.difference == Difference((801, 802), (901, 902))
    assert third.namespace == "other" and third.causes["namespace"] >= 96  # to a border
    assert last.causes["evicted"] + last.hit_tokens >= 96
    assert last.evicted_seconds is not None and last.evicted_idle_seconds is not None
    assert loop.now - before > last.evicted_seconds >= 50.0
    assert 0 <= last.seconds_ago < 50.0 <= third.seconds_ago < second.seconds_ago
    assert last.evicted_idle_seconds > last.evicted_seconds, "used, then gone, then wanted"
    for each in (first, second, third, last):
        assert each.prompt_tokens == each.hit_tokens + sum(each.causes.values())
    for number in range(RECENT_REQUESTS + 3):
        loop.add([number, 5])
        loop.run()
    recent = loop.accounts.recent()
    assert len(recent) == RECENT_REQUESTS
    assert recent[-1].request_id == str(loop.arrivals - 1), "the oldest give way"


@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_token_was_hit_or_has_one_cause(seed: int) -> None:
    """Whatever becomes of a request: chunks, preemption, an end before its time."""
    rng = random.Random(seed)
    loop = Loop(
        rng.choice((64, 128, 256)),
        max_num_batched_tokens=rng.choice((8, 16, 64)),
        max_num_seqs=rng.choice((3, 5)),
    )
    pieces = [[rng.randrange(40) for _ in range(rng.choice((1, 5, 17, 30)))] for _ in range(8)]
    told: list[Sequence] = []
    for _ in range(150):
        if rng.random() < 0.5:
            prompt = [token for _ in range(rng.randint(1, 3)) for token in rng.choice(pieces)]
            namespace = rng.choice((None, "b"))
            more = {"namespace": namespace, "held": loop.arrivals % 3 * 13}
            told.append(loop.add(prompt[:50], out=rng.randint(1, 12), **more))
        loop.now += rng.choice((0, 1, 7, 100))
        loop.turn()
        if rng.random() < 0.05 and loop.scheduler.running:
            loop.scheduler.finish(rng.choice(loop.scheduler.running), keep=rng.random() < 0.5)
    accounts = [sequence.account for sequence in told if sequence.account is not None]
    assert len(accounts) > 40
    for account in accounts:
        assert min(account.causes.values()) >= 0
        assert account.prompt_tokens == account.hit_tokens + sum(account.causes.values())
        assert account.hit_tokens <= account.ideal_tokens <= account.prompt_tokens
    counts = loop.accounts.snapshot().overall.since_start
    assert counts.prompt_tokens == counts.hit_tokens + sum(counts.causes.values())
    assert counts.hit_tokens <= counts.ideal_tokens


def test_windows_of_a_minute_of_ten_and_of_all_time() -> None:
    loop = Loop(256)
    for seconds in (0.0, 580.0, 30.0):
        loop.now += seconds
        loop.add([int(loop.now), 7, 8, 9], namespace="a" if seconds else None)
        loop.run()
    accounts = loop.accounts.snapshot()
    windows = (
        accounts.overall.last_minute,
        accounts.overall.last_ten_minutes,
        accounts.overall.since_start,
    )
    assert [each.requests for each in windows] == [2, 2, 3]
    loop.now += 61.0
    assert loop.accounts.snapshot().overall.last_minute.requests == 0
    assert accounts.namespaces[None].since_start.requests == 1
    assert accounts.namespaces["a"].last_ten_minutes.requests == 2
