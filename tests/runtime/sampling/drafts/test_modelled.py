"""A draft model is asked where it pays, as deep as it pays, and otherwise not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from followed_texts import FollowedTexts, Text, all_rows_alike, weights_once

from coppice.radix.mirror.suffixes.index import SuffixIndex
from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.drafts.modelled import DEEPEST
from coppice.runtime.sampling.drafts.network import Begun, Guess
from coppice.runtime.sampling.drafts.passes import PassCosts
from coppice.runtime.sampling.drafts.policy import TreeSpeculation
from coppice.runtime.sampling.drafts.suffixes import SuffixDrafts


class Scripted:
    """Stands for a draft model that is right with a chance, which it knows, and takes its time."""

    most_rows = 1024

    def __init__(self, rng: random.Random, right: float, fixed: float, row: float) -> None:
        self.rng, self.right, self.fixed, self.row = rng, right, fixed, row
        self.now = 0.0
        self.answers: dict[Sequence, list[int]] = {}
        self.have: dict[Sequence, int] = {}
        self.drafted: dict[Sequence, list[int]] = {}
        self.passes = self.rows = 0

    def clock(self) -> float:
        return self.now

    def begin(self, sequence: Sequence) -> Begun | None:
        length = len(sequence.tokens)
        self.drafted[sequence] = []
        self.have[sequence] = min(self.have.get(sequence, 0), length - 1)
        return Begun(length - self.have[sequence], 10_000)

    def run(self, parts: Seq[tuple[Sequence, int]]) -> list[Guess | None]:
        assert parts and len({sequence for sequence, _ in parts}) == len(parts)
        rows = sum(count for _, count in parts)
        assert rows <= self.most_rows
        self.passes += 1
        self.rows += rows
        self.now += self.fixed + self.row * rows
        return [self._guess(sequence, count) for sequence, count in parts]

    def _guess(self, sequence: Sequence, count: int) -> Guess | None:
        assert count > 0
        self.have[sequence] += count
        drafted = self.drafted[sequence]
        if self.have[sequence] < len(sequence.tokens) + len(drafted):
            return None
        place = sequence.num_generated + len(drafted)
        answer = self.answers[sequence]
        true = answer[place] if place < len(answer) else 0
        sure = min(max(self.rng.gauss(self.right, 0.1), 0.01), 0.99)
        hit = self.rng.random() < sure
        return Guess(true if hit else 5000, sure, ((6000 if hit else true, (1 - sure) / 2),))

    def append(self, sequence: Sequence, token: int) -> bool:
        self.drafted[sequence].append(token)
        return True

    def ended(self, sequence: Sequence) -> None:
        self.have.pop(sequence, None)

    def forget(self) -> None:
        self.have.clear()


class Following(FollowedTexts):
    """Texts beside a scripted draft model."""

    def __init__(
        self, seconds: Callable[[int, int], float], network: Scripted, most: int = 24
    ) -> None:
        index = SuffixDrafts(SuffixIndex(1 << 16))
        speculation = TreeSpeculation([index], most, clock=network.clock)
        super().__init__(seconds, speculation, network.clock)
        self.network = network
        self.speculation.use_model(network, share=0.2)

    def begins(self, sequence: Sequence, output: list[int]) -> None:
        self.network.answers[sequence] = output


def unforeseen(rng: random.Random, count: int, prompt: int = 20, length: int = 150) -> list[Text]:
    """Texts of which nothing is foretold by text."""
    return [
        ([rng.randrange(4000) for _ in range(prompt)], [rng.randrange(4000) for _ in range(length)])
        for _ in range(count)
    ]


def followed(
    right: float,
    batch: int = 1,
    seconds: Callable[[int, int], float] = weights_once,
    fixed: float = 0.003,
    row: float = 0.0001,
    rounds: int = 12,
    **texts: int,
) -> Following:
    rng = random.Random(3)
    following = Following(seconds, Scripted(rng, right, fixed, row))
    for _ in range(rounds):
        following.run(unforeseen(rng, batch, **texts))
    return following


def test_a_good_draft_model_makes_texts_faster_that_nothing_foretells() -> None:
    following = followed(0.85)
    assert following.gain > 1.9
    counts = following.speculation.counts.of("model")
    assert counts.accepted > 0.4 * counts.drafted
    assert counts.seconds_saved == pytest.approx(following.plain - following.time, rel=0.15)
    assert max(following.drafted) > 4


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("right", [0.02, 0.3])
def test_a_bad_draft_model_costs_hardly_anything(right: float, batch: int) -> None:
    assert followed(right, batch, rounds=12 // batch + 2).gain > 0.97


def test_one_as_slow_as_the_model_is_not_asked() -> None:
    following = followed(0.9, fixed=0.02)
    assert following.gain > 0.97
    assert following.network.passes < 0.05 * following.rows


@pytest.mark.parametrize("batch", [8, 48])
def test_it_shrinks_to_nothing_where_a_row_costs_what_a_token_is_worth(batch: int) -> None:
    following = followed(0.9, batch, all_rows_alike, rounds=4)
    assert following.gain > 0.97
    assert sum(following.drafted[-100:]) == 0


def test_it_shrinks_with_the_batch() -> None:
    alone, together = followed(0.85), followed(0.85, 12, rounds=3)
    assert together.gain > 1.0
    width = [sum(each.drafted) / each.rows for each in (alone, together)]
    assert width[1] < 0.7 * width[0]


def test_a_long_prompt_is_computed_only_for_a_text_that_goes_on() -> None:
    short = followed(0.9, prompt=3000, length=15, rounds=20)
    assert short.gain > 0.97
    long = followed(0.9, prompt=3000, length=600, rounds=4)
    assert long.gain > 1.3
    assert long.network.rows > 4 * 3000


def test_a_chain_goes_on_while_the_draft_model_is_sure() -> None:
    sure, unsure = followed(0.97), followed(0.6)
    depth = [each.network.passes / len(each.drafted) for each in (sure, unsure)]
    assert DEEPEST / 3 < depth[0] <= DEEPEST and depth[1] < 0.5 * depth[0]


def test_a_pass_is_a_fixed_part_and_rows() -> None:
    costs, rng = PassCosts(0.2), random.Random(1)
    assert sum(costs.line(0.05)) == pytest.approx(0.01)
    costs.observe(1, 9.0)  # it compiled something
    for _ in range(300):
        rows = rng.choice([1, 1, 1, 4, 8, 200])
        costs.observe(rows, (0.003 + 0.0001 * rows) * rng.uniform(0.9, 1.1))
    fixed, row = costs.line(1.0)
    assert fixed == pytest.approx(0.003, rel=0.15)
    assert row == pytest.approx(0.0001, rel=0.2)
    costs.observe(1, 5.0)  # the machine was busy
    assert costs.line(1.0)[0] < 0.006


def test_a_draft_model_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)
    following = Following(weights_once, Scripted(rng, 0.9, 0.003, 0.0001))
    following.run(unforeseen(rng, 1))

    def fail(parts: object) -> list[Guess | None]:
        raise RuntimeError("no more memory")

    following.network.run = fail  # type: ignore[assignment, method-assign]
    following.run(unforeseen(rng, 2))
    assert following.speculation.model is None and not following.network.have
    assert "the draft model failed" in caplog.text
