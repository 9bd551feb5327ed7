"""The limit of prompt tokens that is learned from the times of steps, on known machines."""

from __future__ import annotations

import random

import pytest

from coppice.runtime.schedule.step_times import LEAST_PREFILL, StepTimes


def test_there_is_no_limit_before_both_kinds_were_seen():
    times = StepTimes(2.0)
    assert times.prefill_tokens(4) is None
    times.observe(4, [], 0.010)
    assert times.prefill_tokens(4) is None
    times.observe(0, [(2000, 0)], 0.400)  # without decodes: all that is known of prompts yet
    assert times.prefill_tokens(4) == pytest.approx(50, rel=0.1)
    with pytest.raises(ValueError, match="stretch must be more than 1"):
        StepTimes(1.0)


def observe(times, seconds, steps=100, seed=0):
    """Observes `steps` of a machine; about half of them have prompts, within the limit."""
    rng = random.Random(seed)
    for _ in range(steps):
        decodes, limit = rng.randrange(1, 64), times.prefill_tokens(32)
        tokens = rng.choice((0, min(rng.randrange(1, 400), limit or 400)))
        times.observe(decodes, [(tokens, 0)] if tokens else [], seconds(decodes, tokens))


def test_each_part_of_a_steps_time_is_found():
    times = StepTimes(2.5)
    observe(times, lambda decodes, tokens: 0.01 + 0.0002 * decodes + 0.0001 * tokens)
    assert times.prefill_tokens(32, waiting=0) == pytest.approx(1.5 * 0.0164 / 0.0001, rel=0.02)
    assert times.prefill_tokens(4, waiting=0) == pytest.approx(1.5 * 0.0108 / 0.0001, rel=0.02)
    observe(times, lambda decodes, tokens: 0.01 + 0.0002 * decodes + 0.0004 * tokens, 200)
    assert times.prefill_tokens(32, waiting=0) == pytest.approx(1.5 * 0.0164 / 0.0004, rel=0.02)
    observe(times, lambda decodes, tokens: 0.01 + 0.1 * tokens, 200)
    assert times.prefill_tokens(32) == LEAST_PREFILL


def test_a_step_may_take_longer_where_more_sequences_wait_than_decode():
    times = StepTimes(2.5)
    observe(times, lambda decodes, tokens: 0.01 + 0.0002 * decodes + 0.0001 * tokens)
    few = times.prefill_tokens(4, waiting=0)
    assert times.prefill_tokens(4, waiting=12) == pytest.approx(3 * few, abs=3)


def test_a_step_may_take_what_it_would_take_if_those_that_wait_decoded():
    times = StepTimes(2.5)
    observe(times, lambda decodes, tokens: 0.01 + 0.002 * decodes + 0.0001 * tokens)
    for decodes, waiting in ((8, 8), (4, 3), (15, 1)):
        spare = 2.5 * (0.01 + 0.002 * (decodes + waiting)) - (0.01 + 0.002 * decodes)
        allowed = times.prefill_tokens(decodes, waiting=waiting)
        assert allowed == pytest.approx(spare / 0.0001, rel=0.02)


def test_drafts_count_as_what_a_sequence_takes():
    def seconds(rows, tokens):
        return 0.01 + 0.002 * rows + 0.0001 * tokens

    plain, drafting = StepTimes(2.5), StepTimes(2.5)
    observe(plain, seconds)
    observe(drafting, seconds)
    for _ in range(150):
        plain.observe(8, [], seconds(8, 0))
        drafting.observe(8, [], seconds(32, 0), drafted=24)
    allowed = drafting.prefill_tokens(8, waiting=2)
    assert allowed == pytest.approx((2.5 * seconds(40, 0) - seconds(32, 0)) / 0.0001, rel=0.1)
    assert allowed > 2.5 * plain.prefill_tokens(8, waiting=2)
    for _ in range(200):  # of drafts that are no longer made nothing is left
        drafting.observe(8, [], seconds(8, 0))
    assert drafting.prefill_tokens(8, waiting=2) == pytest.approx(
        plain.prefill_tokens(8, waiting=2), rel=0.02
    )


def test_a_suspended_machine_does_not_keep_prompts_waiting():
    def seconds(decodes, tokens):
        return 0.01 + 0.0002 * decodes + 0.0001 * tokens

    times = StepTimes(2.5)
    observe(times, seconds)
    before = times.prefill_tokens(32)
    times.observe(32, [(100, 0)], 5.0)  # suspended in the middle of it
    assert times.prefill_tokens(32) > before / 2
    times.observe(32, [], 5.0)
    observe(times, seconds, 20)
    assert times.prefill_tokens(32) == pytest.approx(before, rel=0.3)


def test_the_constant_cost_of_prompts_is_not_attributed_to_their_tokens():
    """Else a few tokens seem expensive, fewer are allowed, and these seem more expensive still."""

    def seconds(decodes, tokens):
        return 0.01 + (0.02 if tokens and decodes else 0.0) + 0.0001 * tokens

    times = StepTimes(2.5)
    for _ in range(100):
        times.observe(64, [(LEAST_PREFILL, 0)], seconds(64, LEAST_PREFILL))
    observe(times, seconds)
    # Half of the time that is allowed: the constant alone takes more than all of it.
    half = 1.5 * 0.01 / 2 / 0.0001
    assert 0.6 * half < times.prefill_tokens(64) < 1.1 * half


def test_a_long_context_costs_time():
    times = StepTimes(2.5)
    for context in range(0, 32_000, 100):
        times.observe(16, [(100, context)], 0.01 + 100 * (1e-4 + 1e-8 * context))
        times.observe(16, [], 0.01)
    assert times.prefill_tokens(16, 0) == pytest.approx(150, rel=0.1)
    assert times.prefill_tokens(16, 30_000) == pytest.approx(0.015 / 4e-4, rel=0.1)
