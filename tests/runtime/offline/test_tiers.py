"""Simulated tiers: an unlimited one makes up for any pool, and all tokens are accounted for."""

from __future__ import annotations

import random
from array import array

import pytest

from coppice.runtime.offline.replay import Replay, ReplayOptions, ReplayRequest
from coppice.runtime.offline.tiers import TierRates, TierSize

DISK, HOST = TierSize("disk", None), TierSize("host", 200)


def trace(seed: int, count: int = 150) -> list[ReplayRequest]:
    rng = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(100) for _ in range(rng.randint(least, most))]

    stems = [tokens(5, 60) for _ in range(12)]
    return [
        ReplayRequest(
            array("i", rng.choice(stems) + tokens(1, 30)),
            array("i", tokens(0, 9)),
            rng.choice([None, None, "a"]),
            float(number),
        )
        for number in range(count)
    ]


def replayed(requests: list[ReplayRequest], *tiers: TierSize, rates=None, **options) -> Replay:
    replay = Replay(ReplayOptions(**{"pool_tokens": 300, "page_size": 4} | options), tiers, rates)
    list(replay.run(iter(requests), len(requests)))
    return replay


@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("tiers", [(DISK,), (HOST, DISK)])
@pytest.mark.parametrize("policy", ["lru", "density"])
def test_an_unlimited_disk_hits_what_an_unlimited_pool_hits(page_size, tiers, policy) -> None:
    """To the token, though the pool evicts most of the time."""
    requests = trace(page_size)
    unlimited = replayed(requests, pool_tokens=100_000, page_size=page_size)
    tiny = replayed(requests, *tiers, page_size=page_size, eviction_policy=policy)
    alone = replayed(requests, page_size=page_size, eviction_policy=policy)
    assert alone.hit_rate < tiny.hit_rate == unlimited.hit_rate
    counts, told = tiny.report().accounts.overall.since_start, tiny.report().tiers
    assert counts.prompt_tokens == counts.hit_tokens + sum(counts.causes.values())
    assert counts.evicted == 0 < counts.loaded_evicted <= counts.loaded_tokens
    assert told is not None and told.loaded_tokens == counts.loaded_tokens
    assert [each.loaded_tokens for each in told.stores] == [counts.loaded[t.name] for t in tiers]


@pytest.mark.parametrize("concurrency", [2, 5])
@pytest.mark.parametrize("tokens", [40, 400, 4000, None])
def test_any_size_with_several_at_once(concurrency: int, tokens: int | None) -> None:
    requests = trace(9)
    replay = replayed(requests, TierSize("disk", tokens), concurrency=concurrency)
    counts, told = replay.report().accounts.overall.since_start, replay.report().tiers
    assert counts.requests == len(requests)
    assert counts.prompt_tokens == counts.hit_tokens + sum(counts.causes.values())
    assert told is not None and replay.tiers is not None
    assert counts.loaded_disk <= told.loaded_tokens, "resumed sequences load, too"
    assert tokens is None or replay.tiers.kept_tokens()["disk"] <= tokens


def test_a_larger_tier_keeps_what_was_used_last() -> None:
    rates = [replayed(trace(3), TierSize("disk", size)).hit_rate for size in (40, 400, 1600, 9999)]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_what_is_slower_than_computing_is_not_loaded() -> None:
    requests = trace(4)
    slow = TierRates(1000, 1000.0, {"disk": 1e3})
    counts = replayed(requests, DISK, rates=slow).report().accounts.overall.since_start
    assert counts.loaded_tokens == 0 < counts.not_loaded
    fast = replayed(requests, DISK, rates=TierRates(1000, 1000.0, {"disk": 1e9}))
    counts, told = fast.report().accounts.overall.since_start, fast.report().tiers
    assert told is not None and counts.not_loaded == 0
    [disk] = told.stores
    assert disk.loaded_bytes == disk.loaded_pages * 4 * 1000
    assert disk.load_seconds == pytest.approx(disk.loaded_bytes / 1e9)
    assert told.saved_seconds == pytest.approx(counts.loaded_tokens / 1000 - disk.load_seconds)
    both = TierRates(1000, 1000.0, {"disk": 1e6})
    counts = replayed(requests, DISK, rates=both).report().accounts.overall.since_start
    assert counts.not_loaded and counts.loaded_tokens, "each does a part"


@pytest.mark.parametrize("bad", [{"token_bytes": 0}, {"compute": -1.0}, {"read": {"disk": 0.0}}])
def test_wrong_numbers_are_refused(bad) -> None:
    with pytest.raises(ValueError, match=r"must be above 0, got"):
        TierRates(**{"token_bytes": None, "compute": None, "read": {}} | bad)
    with pytest.raises(ValueError, match="disk: its size must be at least a token, got 0"):
        TierSize("disk", 0)
