"""Tokens that come back from other tiers: which cause they would have had, and when they count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.radix.accounting.counts import CAUSES, TIERS, Counts
from coppice.radix.accounting.ledger import Accounting
from coppice.radix.accounting.log.account import Kind, RequestAccount
from coppice.radix.accounting.log.loaded import FromTiers


def text(number: int, count: int) -> bytes:
    return np.random.default_rng(number).integers(0, 32_000, count, np.int32).tobytes()


class Story:
    """Requests reported to an accounting, a second apart."""

    def __init__(self) -> None:
        self.accounting = Accounting(2000, now=100.0)
        self.now = 100.0

    def request(
        self,
        tokens: bytes,
        hit: int = 0,
        tiers: FromTiers | None = None,
        *,
        in_flight: int = 0,
        kind: Kind = "cross",
        namespace: str | None = None,
    ) -> RequestAccount:
        self.now += 1
        return self.accounting.request(
            tokens, namespace, hit, tiers=tiers, in_flight_tokens=in_flight, kind=kind, now=self.now
        )

    def loaded(self, account: RequestAccount) -> None:
        self.now += 1
        self.accounting.loaded(account, now=self.now)

    def counts(self) -> Counts:
        return self.accounting.counts(now=self.now)


def causes(account: RequestAccount) -> dict[str, int]:
    found = account.causes
    assert tuple(found) == CAUSES
    assert sum(found.values()) == account.computed_tokens and min(found.values()) >= 0
    return {name: count for name, count in found.items() if count}


def tiers(*loaded: tuple[int, int, str], found: list[tuple[int, int]] | None = None) -> FromTiers:
    made = FromTiers()
    made.found = [(begin, end) for begin, end, _ in loaded] if found is None else found
    for each in loaded:
        made.came(*each)
    return made


def test_what_was_evicted_and_comes_back_is_a_hit() -> None:
    story = Story()
    story.request(text(1, 320))
    account = story.request(text(1, 320), 32, tiers((32, 200, "disk"), (200, 256, "host")))
    story.loaded(account)
    assert account.loaded == {"host": 56, "disk": 168}
    assert causes(account) == {"evicted": 64}
    counts = story.counts()
    assert counts.prompt_tokens == counts.hit_tokens + counts.computed_tokens == 640
    assert (counts.hit_tokens, counts.evicted, counts.loaded_evicted) == (256, 64, 224)
    assert counts.loaded == {"host": 56, "disk": 168, "shared": 0}


@pytest.mark.parametrize("settled", [False, True])
def test_a_request_counts_once_all_has_come(settled: bool) -> None:
    story = Story()
    parts = tiers(found=[(0, 64)])
    account = story.request(text(1, 100), 0, parts)
    if settled:
        assert causes(account) == {"not_loaded": 64, "cold": 36}, "so far"
        assert story.counts().requests == 0
    parts.came(0, 32, "disk")
    parts.came(32, 64, "disk")
    assert parts.loaded == [(0, 64, "disk")], "what follows from the same tier is one part"
    story.loaded(account)
    assert causes(account) == {"cold": 36}
    counts = story.counts()
    assert (counts.requests, counts.prompt_tokens, counts.hit_tokens) == (1, 100, 64)
    assert (counts.loaded_disk, counts.loaded_evicted, counts.cold) == (64, 0, 36)
    assert counts.ideal_tokens == 64, "an unlimited cache would have kept it"
    with pytest.raises(ValueError, match="nothing was expected"):
        story.loaded(account)


def test_what_a_tier_has_and_was_computed_has_a_cause_of_its_own() -> None:
    story = Story()
    story.request(text(1, 160))
    account = story.request(text(1, 160) + text(2, 60), 32, tiers(found=[(32, 128)]), in_flight=16)
    story.loaded(account)
    assert causes(account) == {"in_flight": 16, "not_loaded": 80, "evicted": 32, "cold": 60}
    assert account.evicted_idle_seconds == 1.0
    assert story.counts().evicted_idle_seconds == 1.0


def test_known_text_after_another_beginning_that_comes_back_is_no_near_miss() -> None:
    for tokens, expected in ((0, 1), (300, 0)):
        story = Story()
        story.request(text(1, 300))
        account = story.request(text(2, 40) + text(1, 300), 0, tiers((0, 40 + tokens, "shared")))
        diverged = account.found_causes()["diverged"]
        assert 200 < diverged <= 300
        story.loaded(account)
        assert causes(account).get("diverged", 0) == (diverged if not tokens else 0)
        assert len(story.accounting.snapshot(now=story.now).near_misses) == expected


def test_further_sequences_and_resumed_ones_change_no_rate() -> None:
    story = Story()
    story.loaded(story.request(text(1, 100), 10, tiers((10, 60, "host")), kind="preempted"))
    counts = story.counts()
    assert (counts.requests, counts.hit_tokens, counts.loaded_tokens) == (0, 0, 0)
    assert (counts.preempted_tokens, counts.preempted_hit_tokens) == (100, 60)


def test_an_end_before_all_has_come_forgets_what_was_not_computed() -> None:
    story = Story()
    prompt, parts = text(1, 200), tiers((0, 64, "disk"))
    account = story.request(prompt, 0, parts)
    story.loaded(account)
    story.accounting.abandoned(account, prompt, 64, now=story.now)
    again = story.request(prompt, 0)
    assert causes(again) == {"evicted": 64, "cold": 136}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_all_tokens_are_accounted_for_in_any_mixture(data: st.DataObject) -> None:
    """Against marks for each token, which say what it would have been, and what was loaded."""
    story = Story()
    pick = lambda least, most: data.draw(st.integers(least, most))  # noqa: E731
    for number in range(pick(0, 3)):
        story.request(
            text(number, 40 * (number + 2)), namespace=data.draw(st.sampled_from([None, "a"]))
        )
    pieces = [text(pick(0, 5), pick(1, 150)) for _ in range(pick(1, 3))]
    prompt = b"".join(pieces)
    length = len(prompt) // 4
    hit = pick(0, length - 1)
    in_flight = pick(0, length - hit - 1)
    borders = sorted({pick(hit, length - 1) for _ in range(6)})
    found = list(zip(borders[::2], borders[1::2], strict=False))
    parts = FromTiers()
    parts.found = found
    loaded = [False] * length
    for begin, end in found:
        if data.draw(st.booleans()):
            middle = pick(begin, end)
            parts.came(middle, end, data.draw(st.sampled_from(TIERS)))
            loaded[middle:end] = [True] * (end - middle)
    before = story.counts()
    account = story.request(prompt, hit, parts, in_flight=in_flight)
    raw = account.found_causes()
    if data.draw(st.booleans()):
        story.counts()
    story.loaded(account)
    marks = ["hit"] * hit
    for cause in ("in_flight", "other_replica", "evicted", "prompt_logprobs", "namespace"):
        marks += [cause] * raw[cause]
    marks += ["cold"] * (length - raw["last_token"] - len(marks)) + ["last_token"] * raw[
        "last_token"
    ]
    for begin, end in parts.diverged:
        assert set(marks[begin:end]) == {"cold"}
        marks[begin:end] = ["diverged"] * (end - begin)
    assert {cause: marks.count(cause) for cause in raw} == raw, "what is known by place"
    evicted = sum(mark == "evicted" and came for mark, came in zip(marks, loaded, strict=True))
    had = [any(begin <= at < end for begin, end in found) for at in range(length)]
    for at in range(length):
        if loaded[at]:
            marks[at] = "hit"
        elif had[at] and marks[at] in ("evicted", "namespace", "diverged", "cold"):
            marks[at] = "not_loaded"
    if any(loaded) and sum(mark not in ("hit", "in_flight") for mark in marks) == 1:
        marks[[mark in ("hit", "in_flight") for mark in marks].index(False)] = "last_token"
    counts = story.counts()
    assert account.causes == {cause: marks.count(cause) for cause in CAUSES}
    assert counts.hit_tokens - before.hit_tokens == marks.count("hit")
    assert counts.loaded_tokens == sum(loaded) == sum(account.loaded.values())
    assert counts.loaded_evicted == evicted
    assert counts.prompt_tokens == counts.hit_tokens + sum(counts.causes.values())
    assert counts.ideal_tokens >= counts.hit_tokens
