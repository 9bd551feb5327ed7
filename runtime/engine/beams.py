"""Runs beam searches: decides which sequences continue, which are forked and which end."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from coppice.kernels.transfer import send
from coppice.runtime.engine.sequences import Sequences
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.request import BestLine, Request, Sequence, StepOutput
from coppice.runtime.sampling.beam_search import BeamSearch, Hypothesis, WatchLines
from coppice.runtime.sampling.logit_rules import change_logits
from coppice.runtime.sampling.logprob_rows import best_of_rows, log_probabilities, of_tokens
from coppice.runtime.schedule.paging import Paging

logger = logging.getLogger(__name__)

Continuations = list[tuple[int, float]]
"""A beam's best next tokens with their logprobs, best first, without forbidden ones."""


class Found(NamedTuple):
    """What the model gives for a beam's next token."""

    continuations: Continuations
    raw: torch.Tensor | None  # logprobs by the model alone, float32 [vocabulary], if asked for


class Trail(NamedTuple):
    """The logprobs of a line's tokens, linked from the last one back; forks share a common part."""

    before: Trail | None
    last: Logprobs  # of one token

    def whole(self) -> Logprobs:
        """The logprobs of all tokens, in order."""
        parts, trail = [self.last], self.before
        while trail is not None:
            parts.append(trail.last)
            trail = trail.before
        return Logprobs.joined(parts[::-1])


@dataclass(frozen=True, slots=True)
class Moves:
    """What a step of the search requires. The forks are made before the tokens are appended."""

    ended: list[Sequence]  # sequences on which a result ended; they may continue as well
    dropped: list[Sequence]  # sequences that no beam continues
    forks: list[tuple[Sequence, int]]  # (parent, next token) of each beam that needs a new sequence
    tokens: list[tuple[Sequence, int]]  # next token of each sequence that continues


class BeamGroup:
    """The search of one request, and the sequence that carries each of its beams.

    All beams of a step have the same length. A sequence that is computed before the others, some
    of which may have been preempted, waits for them.
    """

    def __init__(self, search: BeamSearch, first: Sequence) -> None:
        self.search = search
        self.lines = [first]  # in the order of `search.beams`
        self.error: str | None = None  # why the search can't continue
        self._found: dict[int, Found] = {}  # by id of the sequence
        self._trails: list[Trail | None] = [None]  # of the lines
        self._ended: dict[tuple[int, ...], Trail] = {}  # of what has ended, by its tokens
        self._reported: tuple[int, ...] = ()  # the best line that `news` returned last

    def take(self, sequence: Sequence, found: Found) -> None:
        """Records the possible next tokens of one of its sequences."""
        self._found[id(sequence)] = found

    @property
    def complete(self) -> bool:
        """Whether the possible next tokens of all sequences are known."""
        return self.error is not None or all(id(line) in self._found for line in self.lines)

    def advance(self) -> Moves:
        """Takes a step of the search; call `adopt` once its forks are made."""
        lines, found = self.lines, [self._found[id(line)] for line in self.lines]
        beams = self.search.advance([each.continuations for each in found])
        self._found = {}
        if self.search.params.logprobs is not None:
            self._extend_trails(found)
        forks, tokens = [], []
        carried: set[int] = set()
        for beam in beams:
            parent, token = lines[beam.parent], beam.tokens[-1]
            if beam.parent in carried:
                forks.append((parent, token))
            else:
                carried.add(beam.parent)
                tokens.append((parent, token))
        dropped = [line for index, line in enumerate(lines) if index not in carried]
        ended = [lines[parent] for parent, _ in self.search.ended]
        return Moves(ended, dropped, forks, tokens)

    def adopt(self, forked: list[Sequence]) -> None:
        """Takes the new sequences, in the order of the step's forks."""
        lines, new, carried = [], iter(forked), set()
        for beam in self.search.beams:
            if beam.parent in carried:
                lines.append(next(new))
            else:
                carried.add(beam.parent)
                lines.append(self.lines[beam.parent])
        self.lines = lines

    def news(self) -> Hypothesis | None:
        """The best line so far, if it is not the one that the last call returned."""
        best = self.search.best()
        if best is None or best.tokens == self._reported:
            return None
        self._reported = best.tokens
        return best

    def logprobs(self, result: Hypothesis) -> Logprobs | None:
        """The logprobs of a result's tokens, if they were asked for."""
        trail = self._ended.get(result.tokens)
        return None if trail is None else trail.whole()

    def _extend_trails(self, found: list[Found]) -> None:
        """Adds the logprobs of the token that each beam and result has got in this step."""
        search = self.search
        picks = [(beam.parent, beam.tokens) for beam in search.beams]
        picks += [(parent, result.tokens) for parent, result in search.ended]
        if not picks:  # nothing was left to choose
            return
        rows = [found[parent].raw for parent, _ in picks]
        raw = torch.stack([row for row in rows if row is not None])
        top = search.params.logprobs or 0
        made = of_tokens(raw, [tokens[-1] for _, tokens in picks], top)
        trails = [
            Trail(self._trails[parent], made[place : place + 1])
            for place, (parent, _) in enumerate(picks)
        ]
        self._trails = list(trails[: len(search.beams)])
        for (_, tokens), trail in zip(picks[len(search.beams) :], trails[len(search.beams) :],
                                      strict=True):  # fmt: skip
            self._ended[tokens] = trail
        held = {result.tokens for result in search.finished}
        self._ended = {tokens: trail for tokens, trail in self._ended.items() if tokens in held}


class BeamSearches:
    """The searches of all beam search requests, applied to their sequences."""

    def __init__(
        self,
        sequences: Sequences,
        paging: Paging,
        eos_token_ids: Seq[int],
        watch_lines: WatchLines | None,
    ) -> None:
        self._sequences = sequences
        self._paging = paging
        self._eos = tuple(eos_token_ids)
        self._watch_lines = watch_lines
        self._groups: dict[str, BeamGroup] = {}

    def check(self, params: BeamSearchParams) -> None:
        """Raises ValueError for stop strings if the engine has no `watch_lines` to find them."""
        if params.sampling.stop_strings and self._watch_lines is None:
            raise ValueError(
                f"stop must be token ids here (stop_token_ids), since the engine knows no text "
                f"and was given no watch_lines, got {params.stop!r}"
            )

    def begin(self, first: Sequence, params: BeamSearchParams) -> None:
        """Begins the search of a request with its first sequence."""
        request = first.request
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self._eos)
        watch = None
        if params.sampling.stop_strings and self._watch_lines is not None:
            watch = self._watch_lines(params, request.prompt_token_ids)
        room = request.max_length - len(request.prompt_token_ids)
        search = BeamSearch(params, stop_ids=stop_ids, max_tokens=room, watch=watch)
        self._groups[request.request_id] = BeamGroup(search, first)

    def num_results(self, request_id: str) -> int | None:
        """How many results a search returns; None if the request is not a search."""
        group = self._groups.get(request_id)
        return None if group is None else group.search.params.num_results

    def forget(self, request_id: str) -> None:
        """Drops a request's search before it is done; does nothing for other requests.

        Results that it has found stay in the tree.
        """
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._settle(group.lines[0].request, group.search.finished, keep=True)

    def _settle(self, request: Request, results: list[Hypothesis], *, keep: bool) -> None:
        for result in results:  # its last token has no KV
            line = request.prompt_token_ids + array("i", result.tokens[:-1])
            self._paging.settle(line, request, keep=keep)

    def score(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        """Hands each beam's best continuations to its search.

        `logits` float32 [R, vocabulary], which may be changed in place.
        """
        groups = [self._groups[each.request.request_id] for each in sequences]
        asked = any(group.search.params.logprobs is not None for group in groups)
        raw = log_probabilities(logits) if asked else None
        scores, errors = self._scores(logits, sequences, groups)
        most = min(scores.shape[1], max(group.search.continuations for group in groups))
        values, tokens = (found.tolist() for found in best_of_rows(scores, most))
        for row, (group, sequence) in enumerate(zip(groups, sequences, strict=True)):
            if row in errors or not values[row][0] < math.inf:  # a NaN is not less than anything
                group.error = errors.get(row) or (
                    "a logit is infinite or NaN: the model's own, or made so by one of the "
                    "logits_processors"
                )
                continue
            count = group.search.continuations
            best = zip(tokens[row][:count], values[row][:count], strict=True)
            allowed = [(token, value) for token, value in best if value > -math.inf]
            wanted = group.search.params.logprobs is not None
            group.take(sequence, Found(allowed, raw[row] if raw is not None and wanted else None))

    def _scores(
        self, logits: torch.Tensor, sequences: list[Sequence], groups: list[BeamGroup]
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """The score of each row's tokens, float32 [R, vocabulary], and errors by row.

        Penalties and other rules act on logprobs, as in transformers. With one beam they act on
        the logits, as in any greedy search.
        """
        temperatures = [group.search.params.temperature or 1.0 for group in groups]
        if any(each != 1 for each in temperatures):
            (column,) = send([np.array(temperatures, np.float32)], logits.device)
            logits = logits / column.unsqueeze(1)
        alone = [row for row, each in enumerate(groups) if each.search.params.beam_width == 1]
        if len(alone) == len(groups):
            errors, _ = change_logits(logits, sequences, self._eos)
            return log_probabilities(logits), errors
        scores = log_probabilities(logits)
        if alone:
            scores[alone] = logits[alone]
        errors, _ = change_logits(scores, sequences, self._eos)
        if alone:
            scores[alone] = log_probabilities(scores[alone])
        return scores, errors

    def advance(self) -> list[StepOutput]:
        """Takes a step of each search whose beams are all computed.

        Returns the results of searches that end, and the best lines so far where they are asked
        for. A search that fails ends with an error; the others continue.
        """
        outputs = []
        for request_id, group in list(self._groups.items()):
            if not group.complete:
                continue
            try:
                outputs += self._advance(request_id, group)
            except Exception as error:  # the caller's `watch_lines` may raise anything
                logger.exception("a beam search failed; its request ends")
                why = f"the search failed: {type(error).__name__}: {error}"
                outputs += self._fail(request_id, group, why)
        return outputs

    def _advance(self, request_id: str, group: BeamGroup) -> list[StepOutput]:
        search, first = group.search, group.lines[0]
        if group.error is not None:
            return self._fail(request_id, group, group.error)
        moves = group.advance()
        if search.done and not search.finished:
            why = (
                "allowed_token_ids, bad_words, min_tokens, structured_outputs and "
                "logits_processors rule them all out"
            )
            return self._fail(request_id, group, f"no token is left to choose: {why}")
        for sequence in moves.ended:
            self._paging.enter(sequence)
        reason = (search.done and search.results()[0].finish_reason) or "stop"
        for sequence in moves.dropped:
            self._sequences.end(sequence, reason, keep=False)
        self._settle(first.request, search.beaten, keep=False)
        if search.done:
            self._settle(first.request, search.results(), keep=True)
            del self._groups[request_id]
            return self._results(first, group)
        forked = [self._sequences.fork(parent, token) for parent, token in moves.forks]
        for sequence, token in moves.tokens:
            self._sequences.append(sequence, token)
        group.adopt(forked)
        if not search.params.best_so_far or (best := group.news()) is None:
            return []
        line = BestLine(
            best.tokens, best.score, best.cumulative_logprob, best.finish_reason, best.stop_reason
        )
        return [replace(StepOutput.of(first, (), None), best_so_far=line)]

    def _fail(self, request_id: str, group: BeamGroup, message: str) -> list[StepOutput]:
        """Ends a search with an error for each of its results."""
        first = group.lines[0]
        self.forget(request_id)
        for sequence in self._sequences.of(request_id):
            self._sequences.end(sequence, "error", keep=False)
        count = group.search.params.num_results
        error = StepOutput.of(first, (), "error", error=message)
        return [replace(error, index=index) for index in range(count)]

    @staticmethod
    def _results(first: Sequence, group: BeamGroup) -> list[StepOutput]:
        results = group.search.results()
        return [
            replace(
                StepOutput.of(first, result.tokens, result.finish_reason, result.stop_reason),
                index=index,
                score=result.score,
                cumulative_logprob=result.cumulative_logprob,
                num_results=len(results),
                logprobs=group.logprobs(result),
            )
            for index, result in enumerate(results)
        ]
