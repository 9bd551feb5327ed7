"""The accounts that the engine keeps: hits and causes of misses of real requests."""

from __future__ import annotations

from coppice.radix import PagePool, RadixTree
from coppice.runtime.accounts import PromptAccounts
from coppice.runtime.paging import Paging
from coppice.runtime.prompt_logprobs import PromptLogprobs
from coppice.runtime.request import Request, Sequence
from coppice.runtime.sampling_params import SamplingParams
from coppice.runtime.scheduler import Scheduler


class Loop:
    """Scheduler, tree and accounts, with a step that computes and samples zeros."""

    def __init__(self, tokens: int, **limits: int) -> None:
        self.now = 0.0
        self.accounts = PromptAccounts(tokens, lambda: self.now)
        tree = RadixTree(PagePool(tokens // 4, 4))
        self.paging = Paging(tree, enable_prefix_caching=True, accounts=self.accounts)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **limits}
        self.scheduler = Scheduler(self.paging, **limits)
        self.arrivals = 0

    def add(self, prompt: list[int], *, out: int = 1, namespace: str | None = None) -> Sequence:
        request = Request(
            request_id=str(self.arrivals),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=out),
            namespace=namespace,
            arrival=self.arrivals,
            seed=0,
            max_length=len(prompt) + out,
        )
        self.arrivals += 1
        sequence = Sequence(request)
        self.scheduler.add(sequence)
        return sequence

    def run(self) -> None:
        while self.scheduler.running or len(self.scheduler.waiting):
            self.now += 1.0
            schedule = self.scheduler.schedule()
            for chunk in schedule.chunks:
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
    assert loop.scheduler.preemptions > 0
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
        loop.accounts.cleared()


def test_what_is_computed_again_for_prompt_logprobs_is_told() -> None:
    loop = Loop(256, max_num_batched_tokens=128)
    prompt = list(range(1, 65))
    loop.add(prompt)
    loop.run()
    scored = loop.add(prompt)
    loop.scheduler.waiting.remove(scored)
    scored.prompt_logprobs = PromptLogprobs(scored.tokens, None, 0, None)
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
    (prefix,) = loop.accounts.top_prefixes(loop.paging.tree, 5)
    assert prefix.num_tokens == 19
    assert prefix.resident_pages == 5
    assert prefix.idle_seconds == 100.0
