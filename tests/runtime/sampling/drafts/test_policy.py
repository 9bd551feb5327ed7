"""Drafts are as wide and deep as pays, and shrink to nothing where none does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from followed_texts import FollowedTexts, all_rows_alike, weights_once

from coppice.radix.mirror.suffixes.index import SuffixIndex
from coppice.runtime.sampling.drafts.policy import TreeSpeculation
from coppice.runtime.sampling.drafts.predicted import PredictedDrafts
from coppice.runtime.sampling.drafts.source import Proposed
from coppice.runtime.sampling.drafts.suffixes import SuffixDrafts


class Following(FollowedTexts):
    """Texts with drafts from text and predictions."""

    def __init__(self, seconds: Callable[[int, int], float], most: int = 24) -> None:
        sources = [PredictedDrafts(), SuffixDrafts(SuffixIndex(1 << 16))]
        super().__init__(seconds, TreeSpeculation(sources, most, clock=lambda: 0.0))


def quoting(rng: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
    texts = []
    for _ in range(count):
        prompt = [rng.randrange(1000) for _ in range(300)]
        begin = rng.randrange(200)
        texts.append((prompt, [rng.randrange(1000), *prompt[begin : begin + 60]]))
    return texts


def nothing(rng: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
    """Texts with few tokens, whose last ones have occurred before and foretell nothing."""
    return [
        ([rng.randrange(12) for _ in range(200)], [rng.randrange(12) for _ in range(150)])
        for _ in range(count)
    ]


def test_repeated_text_takes_a_fraction_of_the_steps() -> None:
    rng, following = random.Random(0), Following(weights_once)
    for _ in range(20):
        following.run(quoting(rng, 1))
    assert following.tokens / following.rows > 4
    assert following.gain > 3
    counts = following.speculation.counts
    assert counts.accepted > 0.6 * counts.drafted
    assert counts.of("text").seconds_saved == pytest.approx(
        following.plain - following.time, rel=0.1
    )


@pytest.mark.parametrize("batch", [1, 4, 16, 32])
@pytest.mark.parametrize("seconds", [weights_once, all_rows_alike])
def test_what_foretells_nothing_loses_nothing(
    seconds: Callable[[int, int], float], batch: int
) -> None:
    rng, following = random.Random(1), Following(seconds)
    for _ in range(6 // batch + 2):
        following.run(nothing(rng, batch))
    assert following.gain > 0.97


@pytest.mark.parametrize("batch", [4, 16])
def test_it_shrinks_to_nothing_where_a_row_costs_what_a_token_is_worth(batch: int) -> None:
    rng, following = random.Random(2), Following(all_rows_alike)
    for _ in range(20):
        following.run(quoting(rng, batch))
    assert following.gain > 0.97
    first, last = following.drafted[:300], following.drafted[-300:]
    assert sum(last) < 0.5 * sum(first), (sum(first), sum(last))


@pytest.mark.parametrize(("row", "often"), [(0.3, False), (0.01, True)])
def test_a_sequence_whose_proposals_do_not_pay_is_asked_less_often(row: float, often: bool) -> None:
    asked = 0

    class Doubtful:
        """Proposes one token that is as likely as not, and takes its time."""

        def propose(self, sequence: object, most: int) -> list[Proposed]:
            nonlocal asked
            asked += 1
            now[0] += 0.01
            return [Proposed(7, -1, ("doubtful", 0), 0.5)]

        def forget(self) -> None: ...
        def forget_adapter(self, identity: str, mark: int | None) -> None: ...
        def ended(self, sequence: object) -> None: ...

    now = [0.0]
    speculation = TreeSpeculation([Doubtful()], 4, clock=lambda: now[0])
    sequences: list[Any] = [(object(), 4) for _ in range(2)]
    for _ in range(4):
        speculation.costs.observe(2, 0, 1.0)
        for drafted in (1, 2, 3, 4):
            speculation.costs.observe(2, drafted, 1.0 + row * drafted)
    for _ in range(100):
        speculation.propose(sequences, 0)
    assert (asked > 150) == often
    assert asked > 40  # and is not forgotten


def test_a_batch_gets_fewer_tokens_each_than_one_sequence() -> None:
    rng = random.Random(3)
    width = {}
    for batch in (1, 16):
        following = Following(weights_once)
        for _ in range(10):
            following.run(quoting(rng, batch))
        width[batch] = sum(following.drafted) / following.rows
        assert following.gain > 1.1
    assert width[16] < 0.7 * width[1]


def test_a_wrong_measurement_is_forgotten() -> None:
    """Steps with drafts seem slow for a while, as when another process disturbs them."""
    rng, following = random.Random(4), Following(weights_once)
    following.run(quoting(rng, 1))
    following.seconds = lambda n, drafted: 1.0 if drafted else weights_once(n, 0)
    for _ in range(10):
        following.run(quoting(rng, 1))
    following.seconds = weights_once
    for _ in range(40):
        following.run(quoting(rng, 1))
    following.time = following.plain = 0.0
    for _ in range(10):
        following.run(quoting(rng, 1))
    assert following.gain > 2


def test_a_prediction_is_followed() -> None:
    rng, following = random.Random(5), Following(weights_once)
    following.run(quoting(rng, 1))  # so that the costs are known
    following.time = following.plain = 0.0
    output = [rng.randrange(1000) for _ in range(300)]
    predicted = [*output[:100], 5, *output[101:200], *output[210:]]
    following.run([([1, 2, 3], output)], prediction_token_ids=predicted)
    assert following.gain > 3
    assert following.speculation.counts.of("prediction").accepted > 220


def test_a_draft_has_as_many_tokens_as_allowed() -> None:
    rng, following = random.Random(6), Following(weights_once, most=3)
    for _ in range(5):
        following.run(quoting(rng, 1))
    assert max(following.drafted) == 3
