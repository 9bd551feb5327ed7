"""The budget of reasoning: what it counts, and that its end is the only token that may follow."""

from __future__ import annotations

from array import array

import pytest
import torch

from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams, ThinkingMarks
from coppice.runtime.sampling.logit_rules import apply_rules, may_have_rules
from coppice.runtime.sampling.thinking import Thinking

BEGIN, END = 30, 31


def sequence(budget: int, *generated: int, inside: bool = False) -> Sequence:
    params = SamplingParams(
        thinking_token_budget=budget, thinking_marks=ThinkingMarks(BEGIN, END, inside)
    )
    made = Sequence(Request("r", array("i", (1, BEGIN, 3)), params, None, 0, 0, 1000))
    made.tokens.extend(generated)
    return made


@pytest.mark.parametrize(
    ("budget", "inside", "generated", "due"),
    [
        (2, False, (BEGIN, 5), False),
        (2, False, (BEGIN, 5, 6), True),
        (2, False, (9, BEGIN, 5, 6), True),  # white space before the mark
        (2, False, (5, 6, 7), False),  # it answers
        (2, False, (5, 6, 7, 8, 9, BEGIN, 5, 6, 7), False),  # a mark in the middle of an answer
        (2, False, (BEGIN, 5, END, 6, 7, 8), False),  # it ended before
        (2, False, (BEGIN, 5, 6, END, 7), False),
        (0, False, (BEGIN,), True),
        (0, True, (), True),
        (1, True, (5,), True),
        (2, True, (5,), False),
    ],
)
def test_when_the_end_is_due(
    budget: int, inside: bool, generated: tuple[int, ...], due: bool
) -> None:
    made = sequence(budget, *generated, inside=inside)
    whole = Thinking.of(made.request.params)
    assert whole is not None
    assert whole.due(made) == (END if due else None)
    grown = sequence(budget, inside=inside)
    step = Thinking.of(grown.request.params)
    assert step is not None
    for token in (*generated, None):
        found = step.due(grown)
        if token is not None:
            grown.tokens.append(token)
    assert found == (END if due else None)


def test_only_the_end_mark_is_left_and_a_fork_has_its_own_count() -> None:
    made, other = sequence(1, BEGIN), sequence(9, BEGIN, 5)
    logits = torch.zeros(2, 40)
    apply_rules(logits, [made, other], ())
    assert logits.isfinite().all()
    fork = Sequence(made.request)
    fork.tokens.extend((BEGIN, END))
    fork.logit_rules = made.logit_rules.forked()
    made.tokens.append(5)
    logits = torch.zeros(3, 40)
    logits[:, END] = -torch.inf
    apply_rules(logits, [made, other, fork], (), [0, 1, 2])
    assert logits[0].isfinite().nonzero().flatten().tolist() == [END]
    assert logits[1:, :END].isfinite().all()
    assert may_have_rules(made)
    assert not may_have_rules(Sequence(Request("r", array("i", (1,)), SamplingParams(), None, 0,
                                               0, 1000)))  # fmt: skip


def test_values_that_are_refused() -> None:
    for value in (-1, True, 1.5):
        with pytest.raises(ValueError, match="thinking_token_budget must be an integer from 0"):
            SamplingParams(thinking_token_budget=value)  # type: ignore[arg-type]
    params = SamplingParams(thinking_token_budget=1, thinking_marks=ThinkingMarks(1, 99))
    with pytest.raises(ValueError, match="thinking_marks must be from 0 to 39, got 99"):
        params.check_vocabulary(40)
