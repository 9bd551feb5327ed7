"""The miss-ratio curve against exact stack distances."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.radix.curve import FACTORS, MissRatioCurve

BLOCK = 16


class Exact:
    """The LRU stack as a list, most recent first, and the hits of pools of some blocks."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes
        self.stack: list[int] = []
        self.hits = np.zeros(len(sizes), np.int64)

    def refer(self, blocks: list[int], counted: bool) -> None:
        for block in blocks if counted else []:
            if block in self.stack:
                self.hits += self.stack.index(block) + 1 <= self.sizes
        for block in reversed(blocks):
            if block in self.stack:
                self.stack.remove(block)
            self.stack.insert(0, block)


def mixed(numbers: list[int]) -> np.ndarray:
    hashes = np.array(numbers, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> 31
    return hashes * np.uint64(0xBF58476D1CE4E5B9)


def requests(seed: int, documents: int, count: int) -> list[list[int]]:
    """Zipf popularity; each document's blocks, then some of its own."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, documents + 1)
    lengths = rng.integers(1, 30, documents)
    made = []
    for number in rng.choice(documents, count, p=weights / weights.sum()).tolist():
        own = 10**6 + 3 * len(made)
        made.append([1000 * number + at for at in range(lengths[number])] + [own, own + 1])
    return made


def feed(curve: MissRatioCurve, told: list[tuple[list[int], bool]], batch: int) -> None:
    for at in range(0, len(told), batch):
        part = told[at : at + batch]
        keys = mixed([block for blocks, _ in part for block in blocks])
        groups = np.repeat(np.arange(len(part)), [len(blocks) for blocks, _ in part])
        counted = np.array([yes for _, yes in part])[groups]
        sampled = curve.sample(keys)
        references = int(counted.sum())
        curve.refer(
            keys[sampled], groups[sampled], counted[sampled], references, references * BLOCK
        )


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_small_pools_are_followed_exactly(batch: int) -> None:
    curve = MissRatioCurve(100 * BLOCK, BLOCK)
    assert curve.rate == 1
    assert curve.points() == ()
    told = [(blocks, at % 5 != 0) for at, blocks in enumerate(requests(1, 60, 400))]
    exact = Exact(np.floor(np.array(FACTORS) * 100))
    for blocks, yes in told:
        exact.refer(blocks, yes)
    feed(curve, told, batch)
    total = sum(len(blocks) for blocks, yes in told if yes)
    assert [point.hit_rate for point in curve.points()] == pytest.approx(exact.hits / total)
    assert [point.pool_tokens for point in curve.points()][::2] == [
        400, 800, 1600, 3200, 6400, 12800, 25600,
    ]  # fmt: skip


def test_large_pools_are_sampled_within_two_points(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [(blocks, True) for blocks in requests(2, 1500, 6000)]
    pool = 4000
    sampled = MissRatioCurve(pool * BLOCK, BLOCK)
    assert 0 < sampled.rate < 0.15
    monkeypatch.setattr("coppice.radix.curve._MAX_TRACKED", 10**6)
    exact = MissRatioCurve(pool * BLOCK, BLOCK)  # as the test above shows
    assert exact.rate == 1
    feed(sampled, told, 64)
    feed(exact, told, 64)
    rates = np.array([[point.hit_rate for point in each.points()] for each in (sampled, exact)])
    assert np.abs(rates[0] - rates[1]).max() < 0.02
    assert rates[1][0] < rates[1][-1] - 0.1
    assert (np.diff(rates[0]) >= 0).all()


def test_what_sinks_below_the_largest_pool_is_forgotten() -> None:
    curve = MissRatioCurve(10 * BLOCK, BLOCK)
    feed(curve, [([number], True) for number in range(5000)], 50)
    assert curve.tracked <= 161
    assert all(point.hit_rate == 0 for point in curve.points())


def test_a_group_larger_than_a_batch() -> None:
    curve = MissRatioCurve(1000 * BLOCK, BLOCK)
    long = list(range(1000))
    assert curve.rate < 1
    feed(curve, [(long, True)] * 3, 2)
    rates = {point.factor: point.hit_rate for point in curve.points()}
    assert rates[0.25] < 0.3
    assert rates[2.0] == pytest.approx(2 / 3, abs=0.05)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="pool_tokens must be at least 1, got 0"):
        MissRatioCurve(0, 1)
    with pytest.raises(ValueError, match="block_tokens must be at least 1, got 0"):
        MissRatioCurve(1, 0)


def test_too_few_sampled_references_give_no_curve() -> None:
    """Better none than one that is chance: a large pool follows few blocks of few requests."""
    curve = MissRatioCurve(10_000_000, 128)
    assert curve.rate < 0.1
    keys = np.random.default_rng(0).integers(0, 2**63, 40_000).astype(np.uint64)

    def refer(count: int) -> None:
        followed = keys[:count][curve.sample(keys[:count])]
        nobody = np.zeros(len(followed), np.int64)
        curve.refer(followed, nobody, np.ones(len(followed), np.bool_), count, 128 * count)

    refer(100)
    assert curve.points() == ()
    refer(40_000)
    assert len(curve.points()) == len(FACTORS)
