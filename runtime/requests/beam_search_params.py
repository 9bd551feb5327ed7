"""What a user may ask of a beam search, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from coppice.runtime.requests.sampling_params import (
    GREEDY_BELOW,
    MAX_N,
    LogitsProcessor,
    SamplingParams,
    check_integer,
    check_number,
)
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

EarlyStopping = bool | Literal["never"]

# With this bound a length to the power of the penalty, and so each score, is a finite float.
MAX_PENALTY = 30.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search; field names as in vLLM, meanings as in transformers' `generate`.

    Penalties and other rules act on the tokens' logprobs, which are not normalised again, as in
    transformers; with one beam they act on the logits, as in any greedy search.

    Attributes:
        beam_width: beams that are kept.
        max_tokens: most tokens of a result.
        n: results to return, the best first; None: all, `beam_width`. There are fewer if
            forbidden tokens leave no more.
        length_penalty: a result's score is the sum of its tokens' logprobs over its number of
            tokens to this power; above 0 prefers longer ones. From -30 to 30.
        early_stopping: True: end when `beam_width` results have ended; False: when no beam at its
            present length can beat the worst of them; "never": when no beam ever can.
        stop_token_ids: tokens that end a result beside the model's own end of sequence.
        min_tokens: fewest tokens before anything may end a result.
        ignore_eos: whether the model's own end of sequence is a token like others.
        temperature: the logits are divided by it before they become logprobs; 0 means 1.
        stop, include_stop_str_in_output, skip_special_tokens, presence_penalty,
        frequency_penalty, repetition_penalty, logit_bias, allowed_token_ids, bad_words,
        bad_words_token_ids, logits_processors: as in `SamplingParams`.
        structured_outputs: the form that every result must have, except one that `max_tokens` or
            a stop of the user's cuts short. Each beam has its own position in the grammar, and
            ends where the grammar does.
        logprobs: of each token of a result, its own and those of this many most probable ones; -1:
            all. Of the model's logits, before temperature and all else.
        best_so_far: whether each step reports the best line as it is then, for streaming.
        sampling: the parameters that sampling has too, checked, with `n` as the number of results.

    Raises ValueError with the name, the value and what is allowed.
    """

    beam_width: int
    max_tokens: int = 16
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logprobs: int | None = None
    best_so_far: bool = False
    sampling: SamplingParams = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_N)
        if not _is_integer(self.max_tokens):
            raise ValueError(
                f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}"
            )
        if self.n is not None and (not _is_integer(self.n) or not 1 <= self.n <= self.beam_width):
            raise ValueError(f"n must be from 1 to beam_width, {self.beam_width}, got {self.n!r}")
        # 0 and 1 equal False and True, but are not allowed.
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {self.early_stopping!r}"
            )
        check_number("length_penalty", self.length_penalty, -MAX_PENALTY, MAX_PENALTY)
        if not isinstance(self.best_so_far, bool):
            raise ValueError(f"best_so_far must be True or False, got {self.best_so_far!r}")
        shared = {name: getattr(self, name) for name in SHARED_WITH_SAMPLING}
        sampling = SamplingParams(**shared | {"n": self.num_results})
        if 0 < sampling.temperature < GREEDY_BELOW:
            raise ValueError(
                f"temperature must be 0, which means 1 here, or from {GREEDY_BELOW:g} on, "
                f"got {sampling.temperature!r}"
            )
        object.__setattr__(self, "sampling", sampling)
        for name in SHARED_WITH_SAMPLING:
            object.__setattr__(self, name, getattr(sampling, name))

    @property
    def num_results(self) -> int:
        return self.beam_width if self.n is None else self.n


SHARED_WITH_SAMPLING = tuple(
    name
    for name in BeamSearchParams.__dataclass_fields__
    if name in SamplingParams.__dataclass_fields__ and name != "n"
)
"""Parameters of a search with the meaning that they have in `SamplingParams`."""


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
