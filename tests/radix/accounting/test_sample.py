"""Causes from a sample: exact sums, estimates near the exact accounts, and errors that are true."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import pytest

from coppice.radix.accounting.counts import Counts
from coppice.radix.accounting.ledger import Accounting
from coppice.radix.accounting.merged import merged_accounts
from coppice.radix.accounting.shares import ESTIMATED
from coppice.radix.tokens import TOKEN_BYTES

POOL = 40_000


def text(number: int, count: int) -> bytes:
    return np.random.default_rng(number).integers(0, 32_000, count, np.int32).tobytes()


def story(accounting: Accounting, requests: int, apart: float) -> None:
    """All causes: documents that are evicted, moved and read in two namespaces, and new texts."""
    rng = np.random.default_rng(1)
    now = 0.0
    for number in range(requests):
        now += apart
        document = int(rng.zipf(1.5)) % 40
        tokens = text(document, 320) + text(1000 + number, 60)
        if number % 5 == 0:
            tokens = text(2000 + number, 20) + tokens
        name = "a" if number % 7 else "b"
        hit = int(rng.integers(0, 200)) if number % 5 and name == "a" and number > 60 else 0
        flight = 30 if number % 4 == 0 else 0
        account = accounting.request(
            tokens, name, hit, in_flight_tokens=flight,
            held_elsewhere=hit + 50 * (number % 11 == 0),
            hit_limit=250 if number % 13 == 0 and hit < 250 else None, now=now,
        )  # fmt: skip
        if number % 9 == 0:
            accounting.abandoned(account, tokens, len(tokens) // TOKEN_BYTES - 40, now=now)
        else:
            accounting.finish(account, text(5000 + number, 25), now=now)


def counts(requests: int, apart: float, seed: int = 0, *, exact: bool = False) -> Counts:
    accounting = Accounting(POOL, now=0.0, exact=exact, seed=seed)
    story(accounting, requests, apart)
    return accounting.counts(now=requests * apart)


def test_requests_that_come_slowly_are_all_exact() -> None:
    slow = counts(400, apart=1.0)
    assert slow.estimated_tokens == 0
    assert slow.standard_errors == {}
    assert slow == counts(400, apart=1.0, exact=True)
    assert counts(600, apart=0.0, exact=True).estimated_tokens == 0


@pytest.fixture(scope="module")
def estimates() -> tuple[Counts, list[Counts]]:
    return counts(900, 0.0, exact=True), [counts(900, 0.0, seed) for seed in range(8)]


def test_hits_and_totals_stay_exact_when_requests_come_fast(
    estimates: tuple[Counts, list[Counts]],
) -> None:
    exact, fast = estimates
    for each in fast:
        assert each.estimated_tokens > 0.5 * each.computed_tokens
        for name in ("requests", "prompt_tokens", "hit_tokens", "last_token", "in_flight",
                     "other_replica", "no_cache"):  # fmt: skip
            assert getattr(each, name) == getattr(exact, name)
        assert sum(each.causes.values()) == each.computed_tokens
        assert min(each.causes.values()) >= 0


def test_estimates_differ_from_the_exact_causes_as_much_as_is_stated(
    estimates: tuple[Counts, list[Counts]],
) -> None:
    exact, fast = estimates
    for name in ("evicted", "namespace", "diverged", "cold"):
        found = np.array([getattr(each, name) for each in fast], float)
        errors = np.array([each.standard_errors[name] for each in fast])
        truth = getattr(exact, name)
        # Content next to a difference is cold: up to 25 tokens for the exact accounts, 15 here.
        slack = 0.01 * exact.computed_tokens if name in ("diverged", "cold") else 0.0
        mean_error = errors.mean() / np.sqrt(len(fast))
        assert abs(found.mean() - truth) < 4 * mean_error + slack + 0.005 * exact.computed_tokens
        assert found.std(ddof=1) < 2 * errors.mean()
        assert found.std(ddof=1) > errors.mean() / 4
        assert errors.mean() < 0.1 * exact.computed_tokens


def test_the_ideal_and_the_idle_time_are_estimated_too(
    estimates: tuple[Counts, list[Counts]],
) -> None:
    exact, fast = estimates
    ideal = np.mean([each.ideal_hit_rate for each in fast])
    error = np.mean([each.standard_errors["evicted"] for each in fast]) / exact.prompt_tokens
    assert abs(ideal - exact.ideal_hit_rate) < 4 * error / np.sqrt(len(fast))


def test_no_count_ever_falls() -> None:
    accounting = Accounting(POOL, now=0.0, seed=3)
    before = accounting.counts(now=0.0)
    for _ in range(12):
        story_at(accounting, 150)
        after = accounting.counts(now=0.0)
        for name in ("ideal_tokens", "estimated_tokens", *after.causes):
            assert getattr(after, name) >= getattr(before, name)
        before = after
    assert before.estimated_tokens > 0


def story_at(accounting: Accounting, requests: int, now: float = 0.0) -> None:
    rng = np.random.default_rng(accounting.counts(now=now).requests)
    for _ in range(requests):
        tokens = text(int(rng.integers(0, 30)), 200) + rng.integers(0, 9, 40, np.int32).tobytes()
        accounting.finish(accounting.request(tokens, None, 0, now=now), b"", now=now)


def test_after_a_rush_causes_stay_estimated_until_its_texts_are_forgotten() -> None:
    accounting = Accounting(2000, now=0.0, seed=0)
    story_at(accounting, 600)
    rushed = accounting.counts(now=0.0).estimated_tokens
    assert rushed > 0
    account = accounting.request(text(900, 100), None, 0, now=1000.0)
    assert not account.skipped
    assert account.causes["cold"] == 100, "settled by itself, though the sums are estimated"
    assert accounting.counts(now=1000.0).estimated_tokens == rushed + 100
    for number in range(400):  # more than 16 pools
        accounting.request(text(1000 + number, 100), None, 0, now=2000.0 + number)
    estimated = accounting.counts(now=2400.0).estimated_tokens
    accounting.request(text(7, 100), None, 0, now=2500.0)
    assert accounting.counts(now=2500.0).estimated_tokens == estimated


def test_a_reset_makes_all_exact_again() -> None:
    accounting = Accounting(POOL, now=0.0, seed=0)
    story_at(accounting, 600)
    accounting.reset()
    before = accounting.counts(now=0.0)
    accounting.request(text(1, 100), None, 0, now=100.0)
    after = accounting.counts(now=100.0)
    assert after.estimated_tokens == before.estimated_tokens
    assert after.cold == before.cold + 100


def test_a_skipped_account_says_so() -> None:
    accounting = Accounting(POOL, now=0.0, seed=0)
    accounts = [accounting.request(text(n, 50), None, 0, now=0.0) for n in range(600)]
    assert not accounts[0].skipped
    assert accounts[0].causes["cold"] == 50
    assert accounts[-1].skipped
    with pytest.raises(RuntimeError, match="requests came too fast"):
        _ = accounts[-1].causes


def test_an_abandoned_prompt_that_was_skipped_was_not_seen() -> None:
    def evicted(abandon: bool) -> float:
        accounting = Accounting(2000, now=0.0, seed=0)
        for number in range(600):
            accounting.request(text(number, 20), None, 0, now=0.0)
        accounting.counts(now=0.0)
        prompt = text(9999, 4000)
        account = accounting.request(prompt, None, 0, now=0.0)
        assert account.skipped
        if abandon:
            accounting.abandoned(account, prompt, 0, now=0.0)
        before = accounting.counts(now=0.0).evicted
        accounting.request(prompt, None, 0, now=0.0)
        return (accounting.counts(now=0.0).evicted - before) / 4000

    assert evicted(abandon=False) > 0.8
    assert evicted(abandon=True) < 0.1


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_each_namespace_and_window_has_its_own_estimate(names: tuple[Hashable, ...]) -> None:
    accounting = Accounting(POOL, now=0.0, seed=0)
    for _ in range(2):
        for number in range(900):
            name = names[number % len(names)]
            # What one namespace has seen is evicted in it, cold or known elsewhere in others.
            accounting.request(text(number // 3 % 40, 400), name, 0, now=0.0)
    snapshot = accounting.snapshot(now=30.0)
    assert set(snapshot.namespaces) == set(names)
    for windows in (snapshot.overall, *snapshot.namespaces.values()):
        minute, start = windows.last_minute, windows.since_start
        assert minute == start
        assert sum(start.causes.values()) == start.computed_tokens
        assert 0 < start.standard_error < 0.05
    total = sum(each.since_start.evicted for each in snapshot.namespaces.values())
    assert total == snapshot.overall.since_start.evicted
    assert snapshot.overall.since_start.evicted > 0.8 * snapshot.overall.since_start.computed_tokens


def test_errors_of_replicas_add_up_as_squares() -> None:
    parts = []
    for seed in range(2):
        accounting = Accounting(POOL, now=0.0, seed=seed)
        story(accounting, 800, 0.0)
        parts.append(accounting.snapshot(now=0.0))
    merged = merged_accounts(parts).overall.since_start
    each = [part.overall.since_start for part in parts]
    assert merged.estimated_tokens == sum(one.estimated_tokens for one in each)
    for cause in ESTIMATED:
        expected = np.hypot(*(one.standard_errors[cause] for one in each))
        assert merged.standard_errors[cause] == pytest.approx(expected)


@pytest.mark.parametrize("wrong", [lambda a: a.request(b"", None, 0, now=0.0)])
def test_mistakes_are_refused_in_a_rush_as_well(wrong: Callable[[Accounting], object]) -> None:
    accounting = Accounting(POOL, now=0.0, seed=0)
    story_at(accounting, 600)
    with pytest.raises(ValueError, match="at least one int32 token"):
        wrong(accounting)
