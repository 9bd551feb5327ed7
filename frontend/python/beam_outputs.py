"""The results of a beam search, under the field names that vLLM uses."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.frontend.text.outputs import Logprob, RequestOutput


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One result.

    Attributes:
        tokens: the prompt and its continuation, the token that ended it included.
        cum_logprob: sum of the logprobs of the continuation, as the search counts it.
        score: `cum_logprob` over the number of tokens of the continuation to the power of the
            length penalty; results are ordered by it.
        text: the continuation, without what ended it unless its inclusion was asked for.
        finish_reason: "stop" (a token or a string that ends a text) or "length".
        stop_reason: the stop string, or the id of the stop token, that ended it; None where the
            model's own end-of-text token or a length did.
        logprobs: for each token of the continuation, as in `CompletionOutput`; None: not asked for.
    """

    tokens: tuple[int, ...]
    cum_logprob: float
    score: float
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The results for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput) -> BeamSearchOutput:
    """The results of a request that was a beam search."""
    sequences = []
    for found in output.outputs:
        assert found.finish_reason is not None
        assert found.score is not None and found.cumulative_logprob is not None
        sequences.append(
            BeamSearchSequence(
                (*output.prompt_token_ids, *found.token_ids),
                found.cumulative_logprob,
                found.score,
                found.text,
                found.finish_reason,
                found.stop_reason,
                found.logprobs,
            )
        )
    return BeamSearchOutput(sequences)
