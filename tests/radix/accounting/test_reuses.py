"""What the miss-ratio curve gets: whole stretches, each with its last use."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from coppice.radix import Accounting
from coppice.radix.accounting.miss_ratio import MissRatioCurve
from coppice.radix.accounting.seen.hashes import last_border

BLOCK = 16  # of a pool as small as this
POOL = 2000


def text(number: int, count: int) -> bytes:
    return np.random.default_rng(number).integers(0, 32_000, count, np.int32).tobytes()


def curve_of(accounting: Accounting) -> MissRatioCurve:
    accounting.snapshot(now=1e9)
    return accounting._settler.uses._curve


def test_last_border() -> None:
    positions = np.arange(0, 2000)
    borders = [*range(0, 32 * BLOCK, BLOCK), *range(32 * BLOCK, 2000, 8 * BLOCK)]
    expected = [max(each for each in borders if each <= at) for at in positions.tolist()]
    assert last_border(positions, BLOCK).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [1, 300, 1 << 14])
def test_every_token_is_used_once_and_hits_as_an_unlimited_cache_would(
    seed: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share prefixes and go on from one another, some in the same batch."""
    monkeypatch.setattr("coppice.radix.accounting.reuses._ROWS", rows)
    rng = np.random.default_rng(seed)
    accounting = Accounting(POOL, now=0.0)
    lines = [b""]
    seen: dict[bytes, int] = {}  # prefixes that end at a border, and the tokens up to the last one
    for number in range(300):
        line = lines[rng.integers(len(lines))]
        cut = int(rng.integers(len(line) // 4 + 1))
        prompt = line[: 4 * cut] + text(1000 * seed + number, int(rng.integers(1, 90)))
        account = accounting.request(prompt, None, 0, now=float(number))
        output = text(10**6 + number, int(rng.integers(0, 300)))
        accounting.finish(account, output, now=float(number))
        lines.append(prompt + output)
        count = len(lines[-1]) // 4
        borders = np.unique(last_border(np.arange(count + 1), BLOCK)).tolist()
        for before, border in itertools.pairwise(borders):
            seen[lines[-1][: 4 * border]] = border - before
        if rng.random() < 0.05:
            accounting.settle()
    curve = curve_of(accounting)
    # The memory is small, and what it has forgotten counts as new.
    assert sum(seen.values()) <= curve._live.sum() <= 1.05 * sum(seen.values())
    assert -curve._live[curve._live < 0].sum() < 0.01 * sum(seen.values())
    rates = [point.hit_rate for point in curve.points()]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1]


def test_hits_of_a_pool_without_limit_are_the_ideal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice.radix.accounting.miss_ratio.FACTORS", (1.0, 1e6))
    accounting = Accounting(POOL, now=0.0)
    shared = text(1, 700)
    for number in range(40):
        tail = text(100 + number, number)
        hit = 0 if number % 3 else min(number, 10)
        limit = 40 if number % 7 == 3 else None
        prompt = (shared[: 4 * (10 + 17 * number)] + tail, shared)[number % 5 == 4]
        account = accounting.request(prompt, number % 2, hit, hit_limit=limit, now=float(number))
        accounting.finish(account, tail, now=float(number))
    curve = curve_of(accounting)
    counts = accounting.counts(now=1e9)
    assert [point.factor for point in curve.points()] == [1.0, 1e6]
    assert curve.points()[-1].hit_rate == pytest.approx(counts.ideal_hit_rate, abs=0)


def test_further_sequences_and_those_that_come_back_use_nothing() -> None:
    accounting = Accounting(POOL, now=0.0)
    prompt = text(1, 100)
    accounting.request(prompt, None, 0, now=1.0)
    accounting.request(prompt, None, 100, kind="same", now=2.0)
    accounting.request(prompt + text(2, 30), None, 50, kind="preempted", now=3.0)
    curve = curve_of(accounting)
    assert curve._live.sum() == 96
    assert curve._prompt_tokens == 100
    assert [point.hit_rate for point in curve.points()][-1] == 0.0
