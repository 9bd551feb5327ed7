"""Why tokens missed: each cause alone, all mixed against a model that keeps every prompt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.radix import PagePool, RadixTree
from coppice.radix.accounting.counts import CAUSES
from coppice.radix.accounting.ledger import MOST_WAITING, Accounting
from coppice.radix.accounting.log.account import Divergence, Kind, RequestAccount
from coppice.radix.accounting.seen.anchors import MEAN_GAP
from coppice.radix.tokens import TOKEN_BYTES

BLOCK = 16  # of a pool as small as these


def text(number: int, count: int) -> bytes:
    """`count` tokens that no other text has in this order."""
    return np.random.default_rng(number).integers(0, 32_000, count, np.int32).tobytes()


def length(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


class Story:
    """Requests reported to an accounting, a second apart."""

    def __init__(self, pool_tokens: int = 2000) -> None:
        self.accounting = Accounting(pool_tokens, now=100.0)
        self.now = 100.0

    def request(
        self,
        tokens: bytes,
        hit: int = 0,
        namespace: Hashable = None,
        *,
        in_flight: int = 0,
        hit_limit: int | None = None,
        held: int = 0,
        kind: Kind = "cross",
        theirs: bytes = b"",
    ) -> RequestAccount:
        self.now += 1
        return self.accounting.request(
            tokens, namespace, hit, in_flight_tokens=in_flight, hit_limit=hit_limit,
            held_elsewhere=held, kind=kind, theirs=theirs, now=self.now,
        )  # fmt: skip


def causes(account: RequestAccount) -> dict[str, int]:
    """Those that there are."""
    found = account.causes
    assert tuple(found) == CAUSES
    assert sum(found.values()) == account.computed_tokens
    assert min(found.values()) >= 0
    return {name: count for name, count in found.items() if count}


# -- each cause alone ----------------------------------------------------------------------------


def test_what_was_never_seen_is_cold() -> None:
    story = Story()
    assert causes(story.request(text(1, 100))) == {"cold": 100}
    assert causes(story.request(text(2, 7))) == {"cold": 7}


def test_a_prompt_hit_but_for_its_last_token() -> None:
    story = Story()
    story.request(text(1, 100))
    assert causes(story.request(text(1, 100), 99)) == {"last_token": 1}
    assert causes(story.request(text(5, 1))) == {"last_token": 1}


def test_what_another_request_computes_is_in_flight() -> None:
    story = Story()
    shared = text(1, 200)
    story.request(shared + text(2, 50))
    second = story.request(shared + text(3, 50), 40, in_flight=160)
    assert causes(second) == {"in_flight": 160, "cold": 50}
    # All but the last token: that one would have been computed anyhow.
    third = story.request(shared, 40, in_flight=159)
    assert causes(third) == {"in_flight": 159, "last_token": 1}


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 1000])
def test_the_same_prompt_again_was_evicted(size: int) -> None:
    story = Story()
    story.request(text(1, size))
    again = story.request(text(1, size))
    assert causes(again) == ({"evicted": size} if size > 1 else {"last_token": 1})
    assert again.ideal_tokens == size - 1


def test_eviction_from_the_tail_of_a_prefix() -> None:
    story = Story()
    shared = text(1, 320)
    story.request(shared + text(2, 40))
    account = story.request(shared + text(3, 40), 100)
    assert causes(account) == {"evicted": 220, "cold": 40}
    assert account.ideal_tokens == 320


def test_what_a_request_added_is_part_of_its_prefix() -> None:
    story = Story()
    prompt, answer, question = text(1, 90), text(2, 70), text(3, 30)
    for settled in (False, True):
        story = Story()
        first = story.request(prompt)
        if settled:
            assert causes(first) == {"cold": 90}
        story.accounting.finish(first, answer, now=story.now)
        if settled:
            story.accounting.settle()
        second = story.request(prompt + answer + question)
        assert causes(second) == {"evicted": 160, "cold": 30}


def test_when_the_evicted_tokens_were_last_used_and_evicted() -> None:
    story = Story()
    story.request(text(1, 100))  # at 101
    story.request(text(2, 100))  # at 102
    story.accounting.evicted(50.0, now=103.0)
    story.accounting.evicted(101.5, now=107.0)
    story.now = 120.0
    account = story.request(text(1, 100))  # at 121
    assert account.evicted_idle_seconds == 20.0
    assert account.evicted_at == 107.0
    later = story.request(text(2, 100))
    assert later.evicted_idle_seconds == 20.0
    assert later.evicted_at is None  # was not reported
    cold = story.request(text(3, 100))
    assert cold.evicted_idle_seconds is None
    assert cold.evicted_at is None
    counts = story.accounting.snapshot(now=125.0).overall.since_start
    assert counts.evicted == 200
    assert counts.evicted_idle_seconds == 20.0


def test_a_prefix_that_another_namespace_has() -> None:
    story = Story()
    shared = text(1, 160)
    story.request(shared + text(2, 40), namespace="a")
    account = story.request(shared + text(3, 40), namespace="b")
    assert causes(account) == {"namespace": 160, "cold": 40}
    assert account.ideal_tokens == 0
    # Now it was seen in this one too.
    assert causes(story.request(shared + text(4, 40), namespace="b")) == {
        "evicted": 160,
        "cold": 40,
    }
    # The order does not matter: what one namespace has seen is known to all others.
    only_b = text(5, 160)
    story.request(only_b, namespace="b")
    for number, namespace in enumerate(("a", "c", None)):
        account = story.request(only_b + text(6 + number, 5), namespace=namespace)
        assert causes(account) == {"namespace": 160, "cold": 5}


@pytest.mark.parametrize("pairs", [("a", "b"), (("x", "yz"), ("xy", "z")), (1, "1"), (None, 0)])
def test_namespaces_do_not_alias(pairs: tuple[Hashable, Hashable]) -> None:
    story = Story()
    story.request(text(9, 16), namespace="first")
    story.request(text(1, 160), namespace=pairs[0])
    assert causes(story.request(text(1, 160), namespace=pairs[1])) == {"namespace": 160}


def test_known_content_after_another_prefix_has_diverged() -> None:
    story = Story(10_000)  # blocks and chunks of 32 tokens
    shared = text(1, 3000)
    story.request(text(2, 40) + shared)
    account = story.request(text(3, 50) + shared)
    found = causes(account)
    assert set(found) == {"diverged", "cold"}
    assert 50 <= found["cold"] <= 50 + 250
    assert account.ideal_tokens == 0
    # In another namespace the content is not looked up.
    assert causes(story.request(text(4, 50) + shared, namespace="b")) == {"cold": 3050}


def test_content_that_a_prompt_repeats_itself_is_not_known() -> None:
    story = Story()
    once = text(1, 500)
    assert causes(story.request(once + once)) == {"cold": 1000}


def test_all_causes_in_one_prompt() -> None:
    story = Story()
    parts = [text(number, 160) for number in range(1, 6)]
    hit, flight, evicted, elsewhere, moved = parts
    story.request(hit + flight + evicted, namespace="a")
    story.request(hit + flight + evicted + elsewhere, namespace="b")
    story.request(text(7, 30) + moved, namespace="a")
    prompt = b"".join(parts) + text(6, 100)
    account = story.request(prompt, 160, "a", in_flight=160)
    found = causes(account)
    diverged = found.pop("diverged")
    assert found.pop("cold") == 260 - diverged
    assert 60 <= diverged <= 160
    assert found == {"in_flight": 160, "evicted": 160, "namespace": 160}
    assert account.ideal_tokens == 480


def test_what_is_computed_again_for_prompt_logprobs() -> None:
    story = Story()
    story.request(text(1, 96))
    again = story.request(text(1, 96) + text(2, 30), 40, hit_limit=40)
    assert causes(again) == {"prompt_logprobs": 56, "cold": 30}
    assert again.ideal_tokens == 40
    # Of evicted tokens those before the limit could have been hit.
    story.request(text(3, 96))
    evicted = story.request(text(3, 96) + text(4, 30), 10, hit_limit=64)
    assert causes(evicted) == {"evicted": 54, "prompt_logprobs": 32, "cold": 30}
    assert evicted.ideal_tokens == 64
    # Beyond what was known the limit costs nothing.
    new = story.request(text(5, 50), 0, hit_limit=0)
    assert causes(new) == {"cold": 50}
    counts = story.accounting.snapshot(now=story.now).overall.since_start
    assert counts.prompt_logprobs == 88


@pytest.mark.parametrize("evicted", [0, 100, 320])
def test_what_another_replica_holds_was_lost_by_routing(evicted: int) -> None:
    story = Story()
    shared = text(1, 320)
    if evicted:
        story.request(shared[: evicted * TOKEN_BYTES])
    account = story.request(shared + text(2, 40), 16, in_flight=14, held=160)
    found = {"in_flight": 14, "other_replica": 130, "evicted": evicted - 160, "cold": 40}
    found["cold"] += min(160, 320 - evicted)
    assert causes(account) == {name: count for name, count in found.items() if count > 0}
    assert account.ideal_tokens == max(160, evicted), "one cache for all replicas"
    counts = story.accounting.snapshot(now=story.now).overall.since_start
    assert counts.other_replica == 130


def test_a_replica_that_holds_no_more_than_is_here_costs_nothing() -> None:
    story = Story()
    prompt = text(1, 100)
    story.request(prompt)
    assert causes(story.request(prompt, 60, held=60)) == {"evicted": 40}
    assert causes(story.request(prompt, 60, in_flight=10, held=65)) == {
        "in_flight": 10,
        "evicted": 30,
    }
    assert causes(story.request(prompt, 99, held=100)) == {"last_token": 1}
    # More than all counts as all.
    whole = story.request(text(2, 50), held=10**6)
    assert causes(whole) == {"other_replica": 50}
    assert whole.ideal_tokens == 49


def test_no_replica_can_save_what_is_computed_for_prompt_logprobs() -> None:
    story = Story()
    account = story.request(text(1, 96), 0, hit_limit=40, held=64)
    assert causes(account) == {"other_replica": 40, "prompt_logprobs": 24, "cold": 32}
    assert account.ideal_tokens == 40
    story.request(text(2, 96))
    again = story.request(text(2, 96) + text(3, 30), 0, hit_limit=40, held=64)
    assert causes(again) == {"other_replica": 40, "prompt_logprobs": 56, "cold": 30}


@pytest.mark.parametrize("known", [False, True])
def test_what_was_not_computed_of_a_prompt_that_another_replica_holds(known: bool) -> None:
    story = Story()
    prompt = text(1, 320)
    if known:
        story.request(prompt)
    abandoned = story.request(prompt, held=160)
    story.accounting.abandoned(abandoned, prompt, 64, now=story.now)
    found = causes(story.request(prompt))
    if known:
        assert found == {"evicted": 320}
    else:
        assert 64 <= found["evicted"] < 64 + BLOCK


def test_the_curve_is_of_this_replica_alone() -> None:
    alone, beside = Story(), Story()
    for number in range(30):
        prompt = text(number % 4, 300) + text(number, 50)
        hit = 0 if number < 4 else 200
        for story, held in ((alone, 0), (beside, 340)):
            story.request(prompt, hit, held=held)
    first, second = (story.accounting.snapshot(now=story.now) for story in (alone, beside))
    assert first.curve == second.curve
    assert first.overall.since_start.ideal_tokens < second.overall.since_start.ideal_tokens


@pytest.mark.parametrize("namespace", [None, "other"])
@pytest.mark.parametrize("computed", [0, 64, 70])
def test_what_was_never_computed_of_a_prompt_was_not_seen(
    computed: int, namespace: Hashable
) -> None:
    story = Story()
    story.request(text(9, 20))  # the keys of the first namespace have no salt
    shared, prompt = text(1, 32), text(1, 32) + text(2, 300)
    story.request(shared, namespace=namespace)
    abandoned = story.request(prompt, 20, namespace)
    story.accounting.abandoned(abandoned, prompt, computed, now=story.now)
    assert abandoned.finished
    assert causes(abandoned) == {"evicted": 12, "cold": 300}, "its causes stay"
    again = story.request(prompt, 0, namespace)
    known = max(32, computed // BLOCK * BLOCK)
    found = causes(again)
    assert known <= found["evicted"] < known + BLOCK
    assert found.get("diverged", 0) < BLOCK
    assert found["cold"] > 300 - known - 2 * BLOCK
    elsewhere = causes(story.request(text(2, 300), 0, namespace))
    assert elsewhere["cold"] + elsewhere.get("diverged", 0) == 300


def test_what_others_have_computed_stays_seen_when_a_prompt_is_abandoned() -> None:
    story = Story()
    prompt = text(1, 320)
    first = story.request(prompt)
    second = story.request(prompt)
    story.accounting.abandoned(first, prompt, 0, now=story.now)
    assert causes(story.request(prompt)) == {"evicted": 320}
    third = story.request(text(2, 40) + prompt)
    story.accounting.abandoned(third, text(2, 40) + prompt, 0, now=story.now)
    assert causes(story.request(text(3, 50) + prompt))["diverged"] > 250
    story.accounting.finish(second, b"", now=story.now)
    for account, tokens, computed, named in (
        (second, prompt, 0, "finished already"),
        (story.request(prompt), prompt[4:], 0, "the prompt had 320 tokens, got 1276 bytes"),
        (story.request(prompt), prompt, 320, "computed must be in 0 .. 319, got 320"),
    ):
        with pytest.raises(ValueError, match=named):
            story.accounting.abandoned(account, tokens, computed, now=story.now)


def test_after_a_reset_nothing_was_seen() -> None:
    story = Story()
    story.request(text(1, 100))
    story.accounting.reset()
    assert causes(story.request(text(1, 100))) == {"cold": 100}
    assert story.accounting.snapshot(now=story.now).overall.since_start.requests == 2


# -- all mixed -----------------------------------------------------------------------------------

SEGMENTS = [text(number, 10 + 23 * number) for number in range(6)]


@st.composite
def prompts(draw: st.DrawFn) -> bytes:
    chosen = draw(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=4))
    joined = b"".join(chosen)
    return joined[: draw(st.integers(1, length(joined))) * TOKEN_BYTES]


def common(a: bytes, b: bytes) -> int:
    pairs = zip(np.frombuffer(a, np.int32), np.frombuffer(b, np.int32), strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(length(a), length(b)))


def longest(tokens: bytes, others: Sequence[bytes]) -> int:
    return max((common(tokens, other) for other in others), default=0)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_against_a_model_that_keeps_every_prompt(data: st.DataObject) -> None:
    story = Story()
    seen: dict[Hashable, list[bytes]] = {}
    total = dict.fromkeys(("prompt", "hit", "ideal", *CAUSES), 0)
    for _ in range(data.draw(st.integers(1, 12), "requests")):
        namespace = data.draw(st.sampled_from([None, "a", "b"]), "namespace")
        tokens = data.draw(prompts(), "prompt")
        size = length(tokens)
        own = longest(tokens, seen.get(namespace, []))
        others = [each for name, prefixes in seen.items() if name != namespace for each in prefixes]
        other = longest(tokens, others)
        # The tree has kept some part of what it had.
        hit = data.draw(st.integers(0, min(own, size - 1)), "hit")
        flight = data.draw(st.integers(0, max(0, own - hit)), "in flight")
        held = data.draw(st.sampled_from([0, size // 2, size]), "held by another replica")
        account = story.request(tokens, hit, namespace, in_flight=flight, held=held)
        sequence = tokens
        if data.draw(st.booleans(), "look"):
            causes(account)
        if data.draw(st.booleans(), "finish"):
            added = data.draw(prompts(), "added")
            sequence += added
            story.accounting.finish(account, added, now=story.now)
        found = account.causes
        causes(account)  # sums

        paid = hit + flight
        if size - paid == 1:
            assert found["last_token"] == 1
        else:
            assert found["last_token"] == 0
            assert found["other_replica"] == max(0, held - paid)
            paid = max(paid, held)
            # Exact but for what follows the last border of a block.
            reach = paid + found["evicted"]
            border = own // BLOCK * BLOCK
            assert max(paid, border) <= reach <= max(paid, border + BLOCK - 1)
            over = reach + found["namespace"]
            assert max(reach, other // BLOCK * BLOCK) <= over <= max(reach, other)
            if namespace not in seen:
                assert found["diverged"] == 0
        assert found["in_flight"] == flight
        ideal = max(hit, min(size - 1, max(held, own // BLOCK * BLOCK)))
        assert ideal <= account.ideal_tokens <= max(ideal, min(size - 1, ideal + BLOCK - 1))
        if tokens in seen.get(namespace, []):
            assert account.ideal_tokens == size - 1
        seen.setdefault(namespace, []).extend((tokens, sequence))
        total["prompt"] += size
        total["hit"] += hit
        total["ideal"] += account.ideal_tokens
        for name in CAUSES:
            total[name] += found[name]
    counts = story.accounting.snapshot(now=story.now).overall.since_start
    assert counts.prompt_tokens == total["prompt"]
    assert counts.hit_tokens == total["hit"]
    assert counts.ideal_tokens == total["ideal"]
    assert counts.causes == {name: total[name] for name in CAUSES}
    assert counts.hit_rate <= counts.ideal_hit_rate < 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(prompts(), st.sampled_from([None, "a"])), min_size=2, max_size=20))
def test_batches_change_nothing(requests: list[tuple[bytes, Hashable]]) -> None:
    together, alone = Story(), Story()
    accounts = [
        (together.request(tokens, 0, name), alone.request(tokens, 0, name))
        for tokens, name in requests
    ]
    one_by_one = Story()
    for (batched, _), (tokens, name) in zip(accounts, requests, strict=True):
        assert batched.causes == one_by_one.request(tokens, 0, name).causes
        one_by_one.accounting.settle()


def test_the_log_is_processed_when_it_is_full() -> None:
    story = Story()
    accounts = [story.request(text(1, 64)) for _ in range(MOST_WAITING + 10)]
    settled = [account.place == -1 for account in accounts]  # nothing was asked
    assert 100 < sum(settled) < MOST_WAITING
    assert settled == sorted(settled, reverse=True)
    long = [story.request(text(number, 300_000)) for number in range(2, 12)]
    assert [account.place >= 0 for account in accounts + long].count(True) < 5
    assert all(causes(account) == {"evicted": 64} for account in accounts[1:])


def test_a_caller_settles_a_batch_at_a_time() -> None:
    story = Story()
    assert not story.accounting.settle_batch()
    accounts = [story.request(text(1, 64)) for _ in range(600)]
    done = [story.accounting.settle_batch() for _ in range(4)]
    assert done == [True, True, False, False], "less than a batch waits for more"
    assert [account.place == -1 for account in accounts] == [True] * 512 + [False] * 88
    story.request(text(2, 100_000))
    assert story.accounting.settle_batch()
    assert all(account.place == -1 for account in accounts)
    story.request(text(1, 64))
    story.accounting.settle()
    assert not story.accounting.settle_batch()


def test_what_hit_is_hashed_once_and_changes_nothing() -> None:
    """With the node where a hit ends, its hashes are kept in the tree, through all its changes."""
    rng = np.random.default_rng(0)
    texts = [text(number, 30 + 40 * number) for number in range(8)]
    plain, kept = Story(4000), Story(4000)
    tree = RadixTree(PagePool(500, 8))
    for _ in range(400):
        prompt = b"".join(texts[at] for at in rng.integers(0, 8, rng.integers(1, 5)))
        match = tree.match(prompt[:-TOKEN_BYTES])
        hold = tree.lock(match)
        plain.now = kept.now = plain.now + 1
        accounts = [
            story.accounting.request(prompt, None, match.length, node=node, now=story.now)
            for story, node in ((plain, None), (kept, hold.node))
        ]
        table = tree.page_table(hold)
        if match.length % 8 and not tree.claim_tail(hold):
            table[-1] = tree.allocate(1)[0]
        table += tree.allocate(-(-length(prompt) // 8) - len(table))
        tree.insert(hold, prompt, table)
        tree.release(hold, table)
        if rng.random() < 0.2:
            assert accounts[0].causes == accounts[1].causes
            assert accounts[0].ideal_tokens == accounts[1].ideal_tokens
    first, second = (story.accounting.snapshot(now=story.now) for story in (plain, kept))
    assert replace(first, near_misses=()) == replace(second, near_misses=())
    # Where prompts diverged is known from the tree, if there is one.
    for ours, theirs in zip(first.near_misses, second.near_misses, strict=True):
        assert (ours.requests, ours.tokens_cost) == (theirs.requests, theirs.tokens_cost)
    assert first.overall.since_start.evicted > 0
    assert sum(node.borders is not None for node in tree.nodes()) > 3


def test_a_prompt_larger_than_a_group_of_blocks() -> None:
    story = Story(1 << 20)
    prompt = text(1, 300_001)
    assert causes(story.request(prompt)) == {"cold": 300_001}
    story.request(text(2, 70_000))
    assert causes(story.request(prompt)) == {"evicted": 300_001}
    found = causes(story.request(text(3, 10) + prompt))
    assert found["diverged"] > 299_000


# -- hits ----------------------------------------------------------------------------------------


def test_only_hits_across_requests_count_in_the_rate() -> None:
    story = Story()
    prompt = text(1, 96)
    story.request(prompt)
    story.request(prompt, 60)
    fork = story.request(prompt, 96, kind="same")
    assert causes(fork) == {}
    back = story.request(prompt + text(2, 20), 50, kind="preempted")
    assert causes(back) == {"evicted": 46, "cold": 20}
    counts = story.accounting.snapshot(now=story.now).overall.since_start
    assert (counts.requests, counts.prompt_tokens, counts.hit_tokens) == (2, 192, 60)
    assert (counts.same_tokens, counts.same_hit_tokens) == (96, 96)
    assert (counts.preempted_tokens, counts.preempted_hit_tokens) == (116, 50)
    assert counts.hit_rate == 60 / 192
    assert counts.ideal_tokens == 95
    assert sum(counts.causes.values()) == counts.computed_tokens == 132


# -- near misses ---------------------------------------------------------------------------------


def test_a_date_at_the_top() -> None:
    story = Story(10_000)
    opening, rules = text(1, 20), text(2, 1500)
    for day in range(20):
        date = np.array([40_000 + day, 50_000], np.int32).tobytes()
        tokens = opening + date + rules + text(100 + day, 60)
        theirs = np.array([40_000, 50_000], np.int32).tobytes() + rules
        account = story.request(
            tokens, 20 if day else 0, theirs=theirs[: 48 * TOKEN_BYTES] if day else b""
        )
        for _ in range(2 if day else 0):
            expected = Divergence.at(tokens, 20, theirs[: 48 * TOKEN_BYTES])
            assert account.divergence == expected, "before it is settled, and after"
            story.accounting.settle()
    (group,) = story.accounting.snapshot(now=story.now).near_misses
    assert group.requests == 19
    assert group.position == 20
    assert group.before == tuple(np.frombuffer(opening, np.int32).tolist())
    assert len(group.differences) == 4
    assert group.differences[0].ours == (40_001,)
    assert group.differences[0].theirs == (40_000,)
    assert 1500 - 4 * 32 <= group.tokens_after <= 1502
    assert group.tokens_cost >= 19 * (1500 - 4 * 32)
    joined = np.frombuffer(rules, np.int32).tolist()
    at = joined.index(group.after[0])
    assert group.after == tuple(joined[at : at + 48])


POOLS = (20_000, 100_000, 1_000_000, 3_000_000, 10_000_000)


@pytest.mark.parametrize("pool_tokens", POOLS)
@pytest.mark.parametrize("shared", [110, 330])
def test_a_date_before_a_short_handbook_is_found_at_every_size(
    pool_tokens: int, shared: int
) -> None:
    story = Story(pool_tokens)
    handbook = text(2, shared)
    for day in range(12):
        date = np.array([40_000 + day, 50_000], np.int32).tobytes()
        story.request(text(1, 5) + date + handbook + text(100 + day, 40), 5 if day else 0)
    (group,) = story.accounting.snapshot(now=story.now).near_misses
    assert group.requests == 11
    assert shared - 2 * MEAN_GAP <= group.tokens_after <= shared


def test_nearly_all_short_texts_after_another_beginning_are_found() -> None:
    story = Story(3_000_000)
    found = 0
    for number in range(0, 300, 3):
        shared = text(number, 120)
        story.request(text(number + 1, 60) + shared)
        found += story.request(text(number + 2, 300) + shared).causes["diverged"] >= 50
    assert found >= 95


def test_content_stays_known_for_many_pools() -> None:
    story = Story(20_000)
    texts = [text(number, 2000) for number in range(80)]  # eight pools of it
    for number, each in enumerate(texts):
        story.request(text(1000 + number, 10) + each)
    found = [
        causes(story.request(text(2000 + number, 20) + each)).get("diverged", 0)
        for number, each in enumerate(texts[:40])
    ]
    assert sum(found) > 0.8 * 40 * 2000


def test_a_long_prompt_is_known_at_coarser_borders_and_through_its_content() -> None:
    story = Story(1_000_000)
    shared = text(1, 20_000)
    story.request(shared + text(2, 500))
    account = story.request(shared + text(3, 500))
    assert 19_700 <= causes(account)["evicted"] <= 20_000
    assert account.ideal_tokens == causes(account)["evicted"]


def test_a_shuffled_list_of_tools() -> None:
    story = Story(10_000)
    opening = text(1, 100)
    tools = [text(10 + number, 200) for number in range(6)]
    order = np.random.default_rng(0)
    seen: list[bytes] = []
    for number in range(30):
        shuffled = b"".join(tools[at] for at in order.permutation(6))
        tokens = opening + shuffled + text(100 + number, 50)
        story.request(tokens, longest(tokens, seen))
        seen.append(tokens)
    groups = story.accounting.snapshot(now=story.now).near_misses
    assert groups[0].requests >= 20
    assert groups[0].tokens_cost > 20 * 500
    assert groups[0].position == 100
    assert groups[0].before == tuple(np.frombuffer(opening, np.int32)[-48:].tolist())
    assert sum(group.requests for group in groups) <= 29


def test_a_hit_that_goes_on_with_the_last_token_has_not_diverged() -> None:
    story = Story()
    account = story.request(text(1, 50), 49, theirs=text(1, 50)[49 * TOKEN_BYTES :])
    assert account.divergence is None
    story.accounting.settle()
    assert account.divergence is None


def test_two_causes_of_near_misses_stay_apart() -> None:
    story = Story(10_000)
    for number in range(20):
        rules = text(number % 2, 1000 + 500 * (number % 2))
        story.request(text(10 + number, 15) + rules)
    groups = story.accounting.snapshot(now=story.now).near_misses
    assert [group.requests for group in groups] == [9, 9]
    assert groups[0].tokens_cost > groups[1].tokens_cost


def test_unrelated_requests_are_no_near_miss() -> None:
    story = Story()
    shared = text(1, 320)
    for number in range(20):
        story.request(shared + text(2 + number, 300), 320 if number else 0)
    assert story.accounting.snapshot(now=story.now).near_misses == ()


# -- bounds and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("pool_tokens", [300_000, 1_000_000, 3_000_000])
def test_memory_of_a_large_pool_is_little_more_than_two_bytes_a_token(pool_tokens: int) -> None:
    assert Accounting(pool_tokens, now=0.0).nbytes <= 2.3 * pool_tokens


def test_the_past_is_forgotten_in_bounded_memory() -> None:
    story = Story()
    before = story.accounting.nbytes
    story.request(text(1, 64))
    for number in range(2, 900):
        story.request(text(number, 640), namespace=number % 300)
    assert story.accounting.nbytes == before
    assert causes(story.request(text(1, 64))) == {"cold": 64}
    snapshot = story.accounting.snapshot(now=story.now)
    assert len(snapshot.namespaces) == 64
    assert snapshot.other_namespaces.since_start.requests > 600


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": b""}, "tokens"),
        ({"tokens": b"12345"}, "tokens"),
        ({"hit_tokens": -1}, "hit_tokens"),
        ({"hit_tokens": 10}, "hit_tokens must be in 0 .. 9, got 10"),
        ({"hit_tokens": 11, "kind": "same"}, "hit_tokens must be in 0 .. 10"),
        ({"hit_tokens": 4, "in_flight_tokens": 7}, "in_flight_tokens must be in 0 .. 6"),
        ({"hit_tokens": 4, "hit_limit": 3}, "hit_limit must be in 4 .. 10, got 3"),
        ({"hit_limit": 11}, "hit_limit must be in 0 .. 10, got 11"),
        ({"kind": "other"}, "kind must be one of cross, same, preempted, got 'other'"),
        ({"now": 99.0}, "now must not go backwards, got 99.0 after 100.0"),
        ({"now": math.nan}, "now"),
        ({"now": math.inf}, "now"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, object], named: str) -> None:
    accounting = Accounting(1000, now=100.0)
    arguments = {"tokens": text(1, 10), "namespace": None, "hit_tokens": 0, "now": 101.0}
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        accounting.request(**(arguments | change))  # type: ignore[arg-type]
    assert accounting.snapshot(now=102.0).overall.since_start.requests == 0


def test_other_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="pool_tokens must be at least 1, got 0"):
        Accounting(0, now=0.0)
    with pytest.raises(ValueError, match="now must be a finite"):
        Accounting(1, now=math.inf)
    story = Story()
    account = story.request(text(1, 10))
    with pytest.raises(ValueError, match="added: 3 bytes"):
        story.accounting.finish(account, b"123", now=story.now)
    story.accounting.finish(account, b"", now=story.now)
    with pytest.raises(ValueError, match="finished already"):
        story.accounting.finish(account, b"", now=story.now)
