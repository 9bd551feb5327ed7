"""Beam search over token scores: which beams go on, which have ended, when nothing can improve.

The rules are those of transformers' `generate(num_beams=...)`, so that sequences and scores are the
same on the same weights. No model, no pages: the engine brings each beam's best continuations.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search; field names as in vLLM, meanings as in transformers' `generate`.

    Attributes:
        beam_width: beams that are kept.
        max_tokens: most tokens of a result.
        n: results to return, the best first; None: all, `beam_width`.
        length_penalty: a result's score is the sum of its tokens' logprobs over its number of
            tokens to this power; above 0 prefers longer ones.
        early_stopping: True: end when `beam_width` results have ended; False: when no beam at its
            present length can beat the worst of them; "never": when no beam ever can.
        stop_token_ids: tokens that end a result beside the model's own end of sequence.
        min_tokens: fewest tokens before anything may end a result.
        ignore_eos: whether the model's own end of sequence is a token like others.
        temperature: the logits are divided by it before they become logprobs; 0 means 1.

    Raises ValueError with the name, the value and what is allowed.
    """

    beam_width: int
    max_tokens: int = 16
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (("beam_width", 1), ("max_tokens", 1), ("min_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.n is not None and (
            isinstance(self.n, bool)
            or not isinstance(self.n, int)
            or not 1 <= self.n <= self.beam_width
        ):
            raise ValueError(f"n must be from 1 to beam_width, {self.beam_width}, got {self.n!r}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {self.early_stopping!r}"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}"
            )
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature!r}")
        if not isinstance(self.length_penalty, (int, float)):
            raise ValueError(f"length_penalty must be a number, got {self.length_penalty!r}")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A result: generated tokens that have ended."""

    tokens: tuple[int, ...]  # the one that ended it included
    score: float  # sum of logprobs over length to the power of the length penalty
    cumulative_logprob: float
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class Beam:
    """A line that goes on."""

    parent: int  # index of the beam of the step before that it continues
    tokens: tuple[int, ...]  # generated so far
    logprob: float  # their sum


class BeamSearch:
    """The search of one request. `beams` go on; `finished` are the results so far, best first.

    search = BeamSearch(params, stop_ids={2}, max_tokens=32)
    while not search.done:
        search.advance([best continuations of each of search.beams])
    """

    def __init__(self, params: BeamSearchParams, *, stop_ids: set[int], max_tokens: int) -> None:
        """`stop_ids` end a result; `max_tokens` may be less than the params' for want of room."""
        self.params = params
        self.max_tokens = max_tokens
        self.beams: list[Beam] = [Beam(0, (), 0.0)]
        self.finished: list[Hypothesis] = []
        self.done = False
        self.ended: list[int] = []  # beams on which the last step ended what is a result so far
        self._stop_ids = stop_ids
        # One beam is a greedy search: what it reaches first is the result.
        self._stops_early = params.early_stopping is True or params.beam_width == 1

    @property
    def continuations(self) -> int:
        """How many continuations of each beam `advance` needs.

        With as many per stop token as there are beams, `beam_width` of them go on at least.
        """
        return max(2, 1 + len(self._stop_ids)) * self.params.beam_width

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> list[Beam]:
        """Takes one step; returns the beams that go on, none if the search is done.

        Args:
            continuations: for each beam its best (token, logprob), best first: at least
                `self.continuations`, or the whole vocabulary.
        """
        width, length = self.params.beam_width, len(self.beams[0].tokens) + 1
        candidates = heapq.nlargest(
            self.continuations,
            (
                (beam.logprob + logprob, -index, -rank, token)
                for index, (beam, best) in enumerate(zip(self.beams, continuations, strict=True))
                for rank, (token, logprob) in enumerate(best)
                if token not in self._stop_ids or length >= self.params.min_tokens
            ),
        )
        full = self._stops_early and len(self.finished) == width
        going_on: list[Beam] = []
        new: list[tuple[Hypothesis, int]] = []
        for place, (logprob, negative, _, token) in enumerate(candidates):
            tokens = (*self.beams[-negative].tokens, token)
            reason = self._ends(token, length)
            if reason is None:
                if len(going_on) < width:
                    going_on.append(Beam(-negative, tokens, logprob))
            elif place < width and not full:
                score = logprob / length**self.params.length_penalty
                new.append((Hypothesis(tokens, score, logprob, reason), -negative))
        self.finished += [hypothesis for hypothesis, _ in new]
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[width:]
        self.beams = going_on
        self.done = not going_on or not self._can_improve(length)
        held = {id(each) for each in (self.results() if self.done else self.finished)}
        self.ended = [parent for hypothesis, parent in new if id(hypothesis) in held]
        return [] if self.done else going_on

    def results(self) -> list[Hypothesis]:
        """The best `n` results, best first."""
        return self.finished[: self.params.n or self.params.beam_width]

    def _ends(self, token: int, length: int) -> str | None:
        if token in self._stop_ids:
            return "stop"
        return "length" if length >= self.max_tokens else None

    def _can_improve(self, length: int) -> bool:
        """Whether a beam may still end up among the results."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if self._stops_early:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        best = self.beams[0].logprob / length**params.length_penalty
        return best > self.finished[-1].score
