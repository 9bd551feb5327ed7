"""Drafts are as wide and deep as pays, and shrink to nothing where none does."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from followed_texts import FollowedTexts, all_rows_alike, weights_once

from coppice.radix.mirror.suffixes.index import SuffixIndex
from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
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


def test_the_first_text_gets_what_pays_where_steps_were_timed_at_the_start() -> None:
    steps = []
    for timed in (False, True):
        following = Following(weights_once)
        if timed:
            times = [(drafted, weights_once(1, drafted)) for drafted in (0, 1, 2, 4, 8, 16, 32)]
            following.speculation.costs.expect(times)
        following.run(quoting(random.Random(7), 2))
        steps.append(following.rows / following.tokens)
    assert steps[1] < 0.9 * steps[0]


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


class Doubtful:
    """Proposes one token that is as likely as not, and takes its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: Counter[object] = Counter()

    def propose(self, sequence: object, most: int) -> list[Proposed]:
        self.asked[sequence] += 1
        self.now += 0.01
        return [Proposed(7, -1, ("doubtful", 0), 0.5)]

    def forget(self) -> None: ...
    def forget_adapter(self, identity: str, mark: int | None) -> None: ...
    def ended(self, sequence: object) -> None: ...


def _request(number: int) -> Request:
    return Request(str(number), array("i", [1]), SamplingParams(), None, number, 0, 99)


def asked_in(steps: int, row: float) -> tuple[Counter[object], float]:
    """How often each of four sequences is asked in steps of a second, to which a drafted token
    adds `row`, and the seconds that asking takes."""
    source = Doubtful()
    speculation = TreeSpeculation([source], 4, clock=lambda: source.now)
    sequences: list[Any] = [(Sequence(_request(number)), 4) for number in range(4)]
    for _ in range(4):
        speculation.costs.observe(4, 0, 1.0)
        for drafted in (1, 2, 3, 4):
            speculation.costs.observe(4, drafted, 1.0 + row * drafted)
    for _ in range(steps):
        drafted = 0
        if not speculation.skips(4):
            for (sequence, _), draft in zip(
                sequences, speculation.propose(sequences, 0), strict=True
            ):
                drafted += len(draft)
                if draft:
                    speculation.verified(sequence, draft, [0])
        speculation.stepped(4, drafted, 0, 1.0 + row * drafted)
    return source.asked, source.now


def test_asking_for_drafts_that_do_not_pay_takes_a_small_share_of_the_time() -> None:
    asked, seconds = asked_in(4000, row=0.3)
    assert 0.002 * 4000 < seconds < 0.006 * 4000
    # Nobody is forgotten, or asked more than others.
    assert len(asked) == 4 and max(asked.values()) < 1.5 * min(asked.values())


def test_sequences_whose_drafts_pay_are_asked_in_each_step() -> None:
    asked, _ = asked_in(400, row=0.01)
    assert len(asked) == 4 and min(asked.values()) > 350


def test_what_was_wrong_for_long_is_drafted_again_when_it_is_right() -> None:
    speculation = TreeSpeculation([Doubtful()], 4, clock=lambda: 0.0)
    following = FollowedTexts(lambda n, drafted: 0.01 * (n + 0.2 * drafted), speculation)
    following.run([([1], [0] * 300 + [7] * 300)])
    assert sum(following.drafted[50:300]) == 0
    assert sum(following.drafted[-100:]) > 90


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


def plain_steps_of_100(row: float) -> int:
    """Of 100 steps with a sure token to draft, those without, where its row takes that long."""
    speculation = TreeSpeculation([Doubtful()], 1, clock=lambda: 0.0)
    sequence: Any = Sequence(_request(0))
    for _ in range(300):
        speculation.costs.observe(1, 0, 1.0)
        speculation.costs.observe(1, 1, 1.0 + row)
        speculation._trust.learn(("doubtful", 0), True)
    without = 0
    for _ in range(100):
        (draft,) = speculation.propose([(sequence, 1)], 0)
        without += not draft
        speculation.stepped(1, len(draft), 0, 1.0 + row * len(draft))
        if draft:
            speculation.verified(sequence, draft, [0])
    return without


def test_steps_without_drafts_come_the_oftener_the_less_drafts_promise() -> None:
    assert plain_steps_of_100(row=0.02) <= 2
    assert 3 <= plain_steps_of_100(row=0.75) <= 20


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
