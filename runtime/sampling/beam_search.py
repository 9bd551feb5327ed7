"""Beam search over token scores: which beams go on, which have ended, when nothing can improve.

The rules are those of transformers' `generate(num_beams=...)`, so that sequences and scores are the
same on the same weights. No model, no pages: the engine brings each beam's best continuations.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from coppice.runtime.requests.sampling_params import (
    GREEDY_BELOW,
    MAX_N,
    LogitsProcessor,
    SamplingParams,
)
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

EarlyStopping = bool | Literal["never"]

# Any number of tokens to this power is a float, and no sum of logprobs over it is infinite.
MAX_PENALTY = 30.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search; field names as in vLLM, meanings as in transformers' `generate`.

    What changes the tokens' scores acts on their logprobs, as in transformers, and those are not
    normalised again; with one beam on the logits, as in any greedy search.

    Attributes:
        beam_width: beams that are kept.
        max_tokens: most tokens of a result.
        n: results to return, the best first; None: all, `beam_width`. There are fewer if what is
            forbidden leaves no more.
        length_penalty: a result's score is the sum of its tokens' logprobs over its number of
            tokens to this power; above 0 prefers longer ones. From -30 to 30.
        early_stopping: True: end when `beam_width` results have ended; False: when no beam at its
            present length can beat the worst of them; "never": when no beam ever can.
        stop_token_ids: tokens that end a result beside the model's own end of sequence.
        min_tokens: fewest tokens before anything may end a result.
        ignore_eos: whether the model's own end of sequence is a token like others.
        temperature: the logits are divided by it before they become logprobs; 0 means 1.
        stop, include_stop_str_in_output, skip_special_tokens: strings that end a result, and what
            its text has, as in `SamplingParams`.
        presence_penalty, frequency_penalty, repetition_penalty, logit_bias, allowed_token_ids,
        bad_words, bad_words_token_ids, logits_processors: as in `SamplingParams`.
        structured_outputs: the form that every result must have, but for one that `max_tokens` or
            a stop of the user's cuts short. Each beam is at its own place in the grammar, and ends
            where the grammar does.
        logprobs: of each token of a result, its own and so many of the most probable ones; -1: all.
            Of the model's logits, before temperature and all else.
        best_so_far: whether each step tells the best line as it is then, for streaming.
        sampling: those that sampling has too, checked, with `n` as the number of results.

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
        if not _is_integer(self.beam_width) or not 1 <= self.beam_width <= MAX_N:
            raise ValueError(
                f"beam_width must be an integer from 1 to {MAX_N}, got {self.beam_width!r}"
            )
        if not _is_integer(self.max_tokens):
            raise ValueError(
                f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}"
            )
        if self.n is not None and (not _is_integer(self.n) or not 1 <= self.n <= self.beam_width):
            raise ValueError(f"n must be from 1 to beam_width, {self.beam_width}, got {self.n!r}")
        # An integer equals a bool, but is none.
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {self.early_stopping!r}"
            )
        penalty = self.length_penalty
        number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool)
        if not number or not abs(penalty) <= MAX_PENALTY:  # a NaN fails the comparison too
            raise ValueError(
                f"length_penalty must be a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}, "
                f"got {penalty!r}"
            )
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
"""Parameters of a search that mean what they mean in `SamplingParams`."""


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class LineWatch(Protocol):
    """Watches one line of generated tokens for an end that no token alone tells: a stop string."""

    def follow(self, token: int) -> tuple[LineWatch, str | None]:
        """The watch of the line with one token more, and what ended it there; this one stays."""


WatchLines = Callable[[BeamSearchParams, Sequence[int]], LineWatch]
"""Makes the watch of a search's beginning behind a prompt. Engines know no text: who does gives
them this."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A line and its score: a result, or the best that there is so far."""

    tokens: tuple[int, ...]  # the one that ended it included
    score: float  # sum of logprobs over length to the power of the length penalty
    cumulative_logprob: float
    finish_reason: str | None  # "stop" or "length"; None: it goes on
    stop_reason: int | str | None = None  # the stop string, or the user's stop token


@dataclass(frozen=True, slots=True)
class Beam:
    """A line that goes on."""

    parent: int  # index of the beam of the step before that it continues
    tokens: tuple[int, ...]  # generated so far
    logprob: float  # their sum
    watch: LineWatch | None = None


class BeamSearch:
    """The search of one request. `beams` go on; `finished` are the results so far, best first.

    search = BeamSearch(params, stop_ids={2}, max_tokens=32)
    while not search.done:
        search.advance([best continuations of each of search.beams])
    """

    def __init__(
        self,
        params: BeamSearchParams,
        *,
        stop_ids: set[int],
        max_tokens: int,
        watch: LineWatch | None = None,
    ) -> None:
        """`stop_ids` end a result; `max_tokens` may be less than the params' for want of room."""
        self.params = params
        self.max_tokens = max_tokens
        self.beams: list[Beam] = [Beam(0, (), 0.0, watch)]
        self.finished: list[Hypothesis] = []
        self.done = False
        # What the last step ended and is a result so far, each with the beam that it ended on.
        self.ended: list[tuple[int, Hypothesis]] = []
        self.beaten: list[Hypothesis] = []  # results until then that the last step made none
        self._stop_ids = stop_ids
        # One beam is a greedy search: what it reaches first is the result.
        self._stops_early = params.early_stopping is True or params.beam_width == 1

    @property
    def continuations(self) -> int:
        """How many continuations of each beam `advance` needs.

        With as many per stop token as there are beams, `beam_width` of them go on at least, unless
        stop strings end them.
        """
        return max(2, 1 + len(self._stop_ids)) * self.params.beam_width

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> list[Beam]:
        """Takes one step; returns the beams that go on, none if the search is done.

        Args:
            continuations: for each beam its best (token, logprob), best first: at least
                `self.continuations`, or all that are allowed.
        """
        width, length = self.params.beam_width, len(self.beams[0].tokens) + 1
        candidates = heapq.nlargest(
            self.continuations,
            (
                (beam.logprob + logprob, -index, -rank, token)
                for index, (beam, best) in enumerate(zip(self.beams, continuations, strict=True))
                for rank, (token, logprob) in enumerate(best)
                if token not in self._stop_ids or length > self.params.min_tokens
            ),
        )
        full = self._stops_early and len(self.finished) == width
        going_on: list[Beam] = []
        new: list[tuple[int, Hypothesis]] = []
        for place, (logprob, negative, _, token) in enumerate(candidates):
            may_end = place < width and not full
            if not may_end and len(going_on) == width:
                continue  # neither as a beam nor as a result
            beam = self.beams[-negative]
            watch, reason, stop = self._follow(beam, token, length)
            tokens = (*beam.tokens, token)
            if reason is None:
                if len(going_on) < width:
                    going_on.append(Beam(-negative, tokens, logprob, watch))
            elif may_end:
                score = self._score(logprob, length)
                new.append((-negative, Hypothesis(tokens, score, logprob, reason, stop)))
        before = self.finished[:]
        self.finished += [hypothesis for _, hypothesis in new]
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[width:]
        self.beams = going_on
        self.done = not going_on or not self._can_improve(length)
        held = {id(each) for each in (self.results() if self.done else self.finished)}
        self.ended = [each for each in new if id(each[1]) in held]
        self.beaten = [each for each in before if id(each) not in held]
        return [] if self.done else going_on

    def results(self) -> list[Hypothesis]:
        """The best `n` results, best first; fewer if there are no more."""
        return self.finished[: self.params.num_results]

    def best(self) -> Hypothesis | None:
        """The line with the best score at its present length; None if there is none."""
        lines = self.finished[:1]
        if self.beams:
            beam = self.beams[0]  # all are of one length, and the first has the best sum
            score = self._score(beam.logprob, len(beam.tokens))
            lines.append(Hypothesis(beam.tokens, score, beam.logprob, None))
        return max(lines, key=lambda line: line.score, default=None)

    def _follow(
        self, beam: Beam, token: int, length: int
    ) -> tuple[LineWatch | None, str | None, int | str | None]:
        """The watch behind `token`, and what ends the line there: finish reason, stop reason."""
        if token in self._stop_ids:
            return None, "stop", token if token in self.params.stop_token_ids else None
        watch = beam.watch
        if watch is not None:
            watch, stop = watch.follow(token)
            if stop is not None:
                return None, "stop", stop
        return watch, "length" if length >= self.max_tokens else None, None

    def _score(self, logprob: float, length: int) -> float:
        score: float = logprob / length**self.params.length_penalty
        return score

    def _can_improve(self, length: int) -> bool:
        """Whether a beam may still end up among the results."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if self._stops_early:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        return self._score(self.beams[0].logprob, length) > self.finished[-1].score
