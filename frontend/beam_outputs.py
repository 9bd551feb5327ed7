"""What a beam search gives back, under the field names that vLLM uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coppice.runtime.request import StepOutput


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One result.

    Attributes:
        tokens: the prompt and what was found behind it, the token that ended it included.
        cum_logprob: sum of the logprobs of the tokens behind the prompt.
        score: `cum_logprob` over their number to the power of the length penalty; results are
            ordered by it.
        text: the text behind the prompt, without the token that ended it.
        finish_reason: "stop" (a token that ends a text) or "length".
    """

    tokens: tuple[int, ...]
    cum_logprob: float
    score: float
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The results for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_sequence(
    output: StepOutput, prompt_token_ids: Sequence[int], decode: Callable[..., str]
) -> BeamSearchSequence:
    """A result as the engine gives it, with its text."""
    new = output.new_token_ids
    silent = output.finish_reason == "stop"
    assert output.finish_reason is not None
    assert output.score is not None and output.cumulative_logprob is not None
    return BeamSearchSequence(
        (*prompt_token_ids, *new),
        output.cumulative_logprob,
        output.score,
        decode(new[:-1] if silent else new, skip_special_tokens=True),
        output.finish_reason,
    )
