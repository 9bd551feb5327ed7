"""What a request takes of a replica besides the tokens of its prompt."""

from __future__ import annotations

import random

import pytest

from coppice.frontend.router.choosing.overhead import RequestOverhead


def test_it_is_what_answers_take_besides_their_tokens() -> None:
    overhead, rng = RequestOverhead(), random.Random(1)
    for number in range(400):
        assert (overhead.seconds > 0) is (number >= 8)
        tokens = rng.choice([0.001, 0.02, 0.4])
        overhead.learn(tokens, 0.03 + 1.4 * tokens * rng.uniform(0.9, 1.1))
    assert overhead.seconds == pytest.approx(0.03, rel=0.2)
    overhead.learn(0.02, 60.0)  # a replica was stuck
    assert overhead.seconds == pytest.approx(0.03, rel=0.3)


def test_of_those_that_are_answered_together_each_has_its_share() -> None:
    overhead = RequestOverhead()
    for _ in range(100):
        overhead.learn(0.01, 0.01 + 0.03)
        overhead.learn(0.01, 0.0)
        overhead.learn(0.01, 0.0)
    assert overhead.seconds == pytest.approx((0.04 - 0.03) / 3, rel=0.1)


def test_tokens_that_take_less_than_the_rate_says_leave_nothing() -> None:
    overhead = RequestOverhead()
    for _ in range(20):
        overhead.learn(0.1, 0.05)
    assert overhead.seconds == 0.0
