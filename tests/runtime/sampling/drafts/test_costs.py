"""What rows of drafts cost is learned, though single steps are disturbed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from coppice.runtime.sampling.drafts.costs import StepCosts


def seen(steps: list[tuple[int, float]], tokens: int = 1) -> np.ndarray:
    """The curve after steps of these drafted tokens and seconds."""
    costs = StepCosts()
    for drafted in {drafted for drafted, _ in steps}:
        costs.observe(tokens, drafted, 9.0)  # the first one may compile something
    for drafted, seconds in steps:
        costs.observe(tokens, drafted, seconds)
    curve = costs.curve(tokens)
    assert curve is not None
    return curve


def test_nothing_is_known_before_a_step_without_drafts() -> None:
    costs = StepCosts()
    assert costs.curve(1) is None
    costs.observe(1, 4, 1.0)
    costs.observe(1, 4, 1.0)
    assert costs.curve(1) is None


def test_a_slow_step_is_weighed_against_those_with_more_tokens() -> None:
    disturbed = seen([(0, 1.0)] * 9 + [(1, 1.5)] + [(2, 1.1), (4, 1.1), (2, 1.1), (4, 1.1)])
    assert disturbed[1] < 1.2
    assert disturbed[4] < 1.25
    slow = seen([(0, 1.0)] * 9 + [(1, 1.5)] * 9 + [(2, 1.6), (4, 1.7)] * 4)
    assert slow[1] == pytest.approx(1.5, rel=0.03)


def test_curves_rise_and_end_a_little_after_what_was_seen() -> None:
    rng = random.Random(1)
    for _ in range(50):
        steps = [(0, rng.uniform(0.8, 1.2)) for _ in range(4)]
        steps += [(d := rng.choice((1, 2, 3, 4, 6, 8)), rng.uniform(0.7, 1.3) + 0.05 * d)
                  for _ in range(rng.randrange(30))]  # fmt: skip
        curve = seen(steps)
        assert np.all(np.diff(curve) >= 0)
        most = max(drafted for drafted, _ in steps)
        assert most < len(curve) - 1 <= max(6 * most, 4)


def test_noise_of_steps_averages_out() -> None:
    rng = random.Random(2)
    steps = [(0, rng.gauss(1.0, 0.15)) for _ in range(40)]
    for drafted in (1, 2, 3, 4, 6, 8):
        steps += [(drafted, rng.gauss(1 + 0.04 * drafted, 0.15)) for _ in range(4)]
    rng.shuffle(steps)
    curve = seen(steps)
    assert curve[:9] == pytest.approx(1 + 0.04 * np.arange(9), rel=0.13)


def test_a_drafted_token_beside_many_is_supposed_to_take_as_long_as_another() -> None:
    """With few tokens a row is nearly free, so it is tried."""
    found = []
    for tokens in (4, 40):
        costs = StepCosts()
        for _ in range(4):
            costs.observe(tokens, 0, 0.040)
            costs.observe(tokens, 4, 0.044)
            costs.observe(tokens + 8, 0, 0.070)
        curve = costs.curve(tokens)
        assert curve is not None
        found.append(curve[8])
    assert found[0] < 0.060
    assert found[1] == pytest.approx(0.070)
    for _ in range(1100):  # no step of more tokens
        costs.observe(40, 0, 0.040)
        costs.observe(40, 4, 0.044)
    curve = costs.curve(40)
    assert curve is not None and curve[8] < 0.060


def test_steps_that_become_slower_are_noticed_though_not_all_are_looked_at() -> None:
    assert seen([(0, 1.0)] * 50 + [(0, 2.0)] * 200)[0] == pytest.approx(2.0, rel=0.05)


def test_what_was_measured_too_fast_at_first_does_not_slow_steps_without_drafts() -> None:
    """Kinds that seemed to be fast are the ones that are tried, so their times rise."""
    costs = StepCosts()
    for _ in range(20):
        costs.observe(4, 0, 0.020)
    for drafted, first, later in ((2, 0.024, 0.031), (4, 0.026, 0.039), (8, 0.035, 0.056)):
        costs.observe(4, drafted, 9.0)
        for seconds in (first, *[later] * 6):
            costs.observe(4, drafted, seconds)
    curve = costs.curve(4)
    assert curve is not None
    assert curve[0] < 0.023


def test_a_step_without_drafts_tells_much_after_many_with_them() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(4, 0, 0.020)
    for _ in range(40):
        costs.observe(4, 4, 0.040)
    assert costs.drafting(4) == 40
    assert costs.drafting(64) == 0
    for _ in range(5):
        for _ in range(8):
            costs.observe(4, 4, 0.040)
        costs.observe(4, 0, 0.030)  # contexts have grown
    assert costs.drafting(4) == 0
    curve = costs.curve(4)
    assert curve is not None
    assert curve[0] > 0.027


def test_what_was_timed_at_the_start_is_the_guess_for_the_first_steps() -> None:
    costs = StepCosts()
    costs.expect([(0, 0.010), (1, 0.011), (4, 0.0105), (16, 0.030)])
    assert costs.curve(1) is None  # a step without drafts still comes first
    costs.observe(1, 0, 0.020)  # and counts, since nothing is compiled any more
    curve = costs.curve(1)
    assert curve is not None
    assert curve == pytest.approx(
        np.interp(np.arange(17), (0, 1, 4, 16), (0.02, 0.021, 0.021, 0.06))
    )
    # Beside 4 sequences a drafted token takes as long as a fourth one beside a single sequence.
    costs.observe(4, 0, 0.040)
    beside = costs.curve(4)
    assert beside is not None
    three = curve[3:16]  # to 12, the last in the grid
    assert beside == pytest.approx(0.04 * three / three[0])
    # What steps took counts more, and in the end alone.
    for _ in range(3):
        costs.observe(1, 16, 0.030)
    measured = costs.curve(1)
    assert measured is not None
    assert measured[16] == pytest.approx(0.030)
    for _ in range(1100):
        costs.observe(1, 0, 0.020)
        costs.observe(1, 2, 0.022)
    late = costs.curve(1)
    assert late is not None
    assert len(late) == 9  # up to 4 of the grid beyond what was seen


def test_times_of_the_start_are_rising_and_not_needed() -> None:
    for times in ([], [(0, 0.01)]):
        costs = StepCosts()
        costs.expect(times)
        costs.observe(1, 0, 0.02)
        curve = costs.curve(1)
        assert curve is not None
        assert len(curve) == 5
        assert np.all(np.diff(curve) >= 0)
