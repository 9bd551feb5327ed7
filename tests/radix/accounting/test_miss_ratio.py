"""The miss-ratio curve against exact stack distances."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.radix.accounting.miss_ratio import FACTORS, MissRatioCurve

BLOCK = 16


class Exact:
    """The LRU stack as a list, most recent first, and the hits of pools of some blocks."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes
        self.stack: list[int] = []
        self.seen: set[int] = set()
        self.hits = np.zeros(len(sizes), np.int64)

    def refer(self, blocks: list[int], counted: bool) -> None:
        known = [block for block in blocks if block in self.seen]
        if counted:
            at = np.array([self.stack.index(block) for block in known])
            self.hits += (at[:, None] + 1 <= self.sizes).sum(0)
        for block in known:
            self.stack.remove(block)
        self.stack[:0] = blocks
        self.seen.update(blocks)


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


def feed(curve: MissRatioCurve, uses: list[tuple[list[int], bool]], batch: int) -> None:
    """A stamp for each request; `batch` of them at once."""
    stamps: dict[int, int] = getattr(curve, "stamps_of_blocks", {})
    curve.stamps_of_blocks = stamps  # type: ignore[attr-defined]
    for first in range(0, len(uses), batch):
        now, before, counts, ends = [], [], [], []
        for blocks, counted in uses[first : first + batch]:
            at = curve.now = getattr(curve, "now", 0) + 1  # type: ignore[attr-defined]
            now += [at] * len(blocks)
            counts += [counted] * len(blocks)
            ends += range(BLOCK, BLOCK * (len(blocks) + 1), BLOCK)
            before += [stamps.get(block, 0) for block in blocks]
            stamps |= dict.fromkeys(blocks, at)
        stamp, used = np.array(now, np.uint64), np.array(before, np.uint64)
        size = np.full(len(now), BLOCK)
        curve.use(stamp, size, used[used > 0], size[used > 0])
        hits = (used > 0) & np.array(counts)
        ages = (stamp - 1 - used)[hits]
        end = np.array(ends)[hits]
        curve.prompts(ages, end - BLOCK, end, BLOCK * sum(counts))


@pytest.mark.parametrize("batch", [7, 64])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_against_the_exact_stack(batch: int, seed: int) -> None:
    curve = MissRatioCurve(100 * BLOCK)
    assert curve.points() == ()
    uses = [(blocks, at % 5 != 0) for at, blocks in enumerate(requests(seed, 60, 2000))]
    exact = Exact(np.floor(np.array(FACTORS) * 100))
    for blocks, yes in uses:
        exact.refer(blocks, yes)
    feed(curve, uses, batch)
    total = sum(len(blocks) for blocks, yes in uses if yes)
    rates = np.array([point.hit_rate for point in curve.points()])
    # The smallest pools hold but one or two requests.
    assert np.abs(rates - exact.hits / total).max() < 0.03
    assert (np.diff(rates) >= 0).all()
    assert np.abs(rates - exact.hits / total)[4:].max() < 0.02
    assert [point.pool_tokens for point in curve.points()][::2] == [
        400, 800, 1600, 3200, 6400, 12800, 25600,
    ]  # fmt: skip


def test_spans_are_joined_with_little_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [(blocks, True) for blocks in requests(2, 1500, 6000)]
    fine = MissRatioCurve(4000 * BLOCK)
    monkeypatch.setattr("coppice.radix.accounting.miss_ratio._SPANS", 10**6)
    feed(fine, uses, 50)
    monkeypatch.setattr("coppice.radix.accounting.miss_ratio._SPANS", 200)
    coarse = MissRatioCurve(4000 * BLOCK)
    feed(coarse, uses, 50)
    assert len(coarse._spans) <= 250 < len(fine._spans)
    assert coarse._live.sum() == fine._live.sum()
    rates = np.array([[point.hit_rate for point in each.points()] for each in (fine, coarse)])
    assert np.abs(rates[0] - rates[1]).max() < 0.02
    assert rates[0][0] < rates[0][-1] - 0.1


def test_a_scan_hits_in_pools_that_hold_it() -> None:
    curve = MissRatioCurve(100 * BLOCK)
    scan = [([number], True) for number in range(300)]
    feed(curve, scan * 20, 10)
    rates = {point.factor: point.hit_rate for point in curve.points()}
    assert rates[2.0] < 0.06
    assert rates[2.0**1.5] < 0.06
    assert rates[4.0] == pytest.approx(0.95, abs=0.02)


def test_what_was_forgotten_takes_no_room() -> None:
    curve = MissRatioCurve(100 * BLOCK)
    feed(curve, [([number], True) for number in range(500)], 10)
    assert curve._live.sum() == 500 * BLOCK
    curve.clear()
    assert curve._live.sum() == 0
    assert [point.hit_rate for point in curve.points()] == [0.0] * len(FACTORS)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="pool_tokens must be at least 1, got 0"):
        MissRatioCurve(0)


def test_stretches_of_uneven_lengths_weigh_as_much_as_they_hold() -> None:
    curve = MissRatioCurve(1000)
    lengths = [100 * number for number in range(1, 11)]  # 5,500 tokens, again and again
    for now in range(1, 401):
        at, size = np.array([now], np.uint64), np.array([lengths[now % 10]])
        used = at - 10 if now > 10 else at - at
        known = used > 0
        curve.use(at, size, used[known], size[known])
        curve.prompts((at - 1 - used)[known], 0 * size[known], size[known], int(size[0]))
    rates = {point.factor: point.hit_rate for point in curve.points()}
    assert rates[4.0] == 0
    assert rates[8.0] == rates[16.0] == pytest.approx(39 / 40)


def test_a_pool_hits_as_much_of_a_stretch_as_it_has_room_for() -> None:
    curve = MissRatioCurve(1000)
    now, size = np.array([1], np.uint64), np.array([1500])
    curve.use(now, size, now[:0], size[:0])
    stretches = np.array([0, 600]), np.array([600, 1500])
    curve.prompts(np.array([0, 0], np.uint64), *stretches, 1600)
    hits = [point.hit_rate * 1600 for point in curve.points()]
    assert hits == sorted(hits)
    assert hits == pytest.approx([min(1500, 1000 * factor) for factor in FACTORS])
