"""Beam search over token scores: which beams continue, which have ended, when it is done.

The rules are those of transformers' `generate(num_beams=...)`, so that sequences and scores are the
same on the same weights. It knows no model and no pages: each step is given the best continuations
of each beam.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coppice.runtime.requests.beam_search_params import BeamSearchParams


class LineWatch(Protocol):
    """Watches one line of generated tokens for a stop string, which may take several tokens."""

    def follow(self, token: int) -> tuple[LineWatch, str | None]:
        """The watch after one more token, and the stop string that ends the line; a new object."""


WatchLines = Callable[[BeamSearchParams, Sequence[int]], LineWatch]
"""Makes the watch of a new search from its parameters and its prompt's tokens. The engine has no
tokenizer, so its caller provides this function."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A line and its score: a result, or the best that there is so far."""

    tokens: tuple[int, ...]  # the one that ended it included
    score: float  # sum of logprobs over length to the power of the length penalty
    cumulative_logprob: float
    finish_reason: str | None  # "stop" or "length"; None: it continues
    stop_reason: int | str | None = None  # the stop string, or the user's stop token


@dataclass(frozen=True, slots=True)
class Beam:
    """A line that continues."""

    parent: int  # index of the beam of the step before that it continues
    tokens: tuple[int, ...]  # generated so far
    logprob: float  # their sum
    watch: LineWatch | None = None


class BeamSearch:
    """The search of one request. `beams` continue; `finished` are the results so far, best first.

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
        """`stop_ids` end a result; `max_tokens` is at most the params', within the context."""
        self.params = params
        self.max_tokens = max_tokens
        self.beams: list[Beam] = [Beam(0, (), 0.0, watch)]
        self.finished: list[Hypothesis] = []
        self.done = False
        # The results that the last step added, each with the beam that it ended on.
        self.ended: list[tuple[int, Hypothesis]] = []
        self.beaten: list[Hypothesis] = []  # earlier results that the last step displaced
        self._stop_ids = stop_ids
        # One beam is a greedy search: what it reaches first is the result.
        self._stops_early = params.early_stopping is True or params.beam_width == 1

    @property
    def continuations(self) -> int:
        """The number of continuations of each beam that `advance` needs.

        With `beam_width` of them for each stop token, at least `beam_width` beams continue, unless
        stop strings end them.
        """
        return max(2, 1 + len(self._stop_ids)) * self.params.beam_width

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> list[Beam]:
        """Takes one step; returns the beams that continue, none if the search is done.

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
                continue  # it would be neither a beam nor a result
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
        """The watch after `token`, and what ends the line there: finish reason, stop reason."""
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
