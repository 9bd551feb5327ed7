"""Bounds of reasoning: gives the engine the marks of a model's reasoning as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coppice.frontend.chat.dialect import Dialect, Reading
from coppice.frontend.chat.reasoning.format import Start
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.sampling_params import SamplingParams


def bounded(
    params: SamplingParams, reading: Reading | None, *, binds: bool = True
) -> SamplingParams:
    """The parameters with what the engine needs for `thinking_token_budget`.

    The budget is left out where the prompt has ended the reasoning already; and, unless it `binds`,
    where the reasoning can't be bounded.

    Raises ValueError if it binds and how the model marks reasoning is not known, or not by tokens.
    """
    if params.thinking_token_budget is None or params.thinking_marks is not None:
        return params
    marks, why = None, "how this model marks its reasoning is not known"
    if reading is not None and (reasoning := reading.dialect.reasoning) is not None:
        if reading.start is Start.ENDED:
            return replace(params, thinking_token_budget=None)
        marks = reasoning.token_marks(reading.start, reading.dialect.marks)
        why = "the end of this model's reasoning is not a single token"
    if marks is not None:
        return replace(params, thinking_marks=marks)
    if binds:
        raise ValueError(f"thinking_token_budget: it can't be held, since {why}")
    return replace(params, thinking_token_budget=None)


def bounded_after(
    prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer
) -> SamplingParams:
    """`bounded` for a text after a prompt, by the marks that the chat template shows."""
    if params.thinking_token_budget is None or params.thinking_marks is not None:
        return params
    return bounded(params, Dialect.of(tokenizer).reading(prompt, None))
