"""The beams of searches as sequences: who goes on, who is forked, who ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from coppice.runtime.beam_search import BeamSearch
from coppice.runtime.request import Sequence, StepOutput
from coppice.runtime.sequences import Sequences

Continuations = list[tuple[int, float]]
"""A beam's best next tokens with their logprobs, best first."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What a step of the search asks for; the tokens are to be appended after the forks."""

    ended: list[Sequence]  # sequences on which a result ended; they may go on as well
    dropped: list[Sequence]  # sequences that no beam continues
    forks: list[tuple[Sequence, int]]  # (parent, next token) of each beam that needs a new sequence
    tokens: list[tuple[Sequence, int]]  # next token of each sequence that goes on


class BeamGroup:
    """The search of one request, and the sequence that carries each of its beams.

    All beams of a step have the same length. One whose sequence was computed earlier than the
    others' (they may have been preempted) waits for them.
    """

    def __init__(self, search: BeamSearch, first: Sequence) -> None:
        self.search = search
        self.lines = [first]  # in the order of `search.beams`
        self._found: dict[int, Continuations] = {}  # by id of the sequence

    def take(self, sequence: Sequence, continuations: Continuations) -> None:
        """The next tokens of one of its sequences are known."""
        self._found[id(sequence)] = continuations

    @property
    def complete(self) -> bool:
        """Whether they are known for all."""
        return all(id(line) in self._found for line in self.lines)

    def advance(self) -> Moves:
        """Takes a step of the search; afterwards `adopt` the sequences that carry its beams."""
        lines, found = self.lines, self._found
        beams = self.search.advance([found[id(line)] for line in lines])
        self._found = {}
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
        ended = [lines[parent] for parent in self.search.ended]
        return Moves(ended, dropped, forks, tokens)

    def adopt(self, forked: list[Sequence]) -> None:
        """`forked` are the new sequences, in the order of the step's forks."""
        lines, new, carried = [], iter(forked), set()
        for beam in self.search.beams:
            if beam.parent in carried:
                lines.append(next(new))
            else:
                carried.add(beam.parent)
                lines.append(self.lines[beam.parent])
        self.lines = lines


class BeamSearches:
    """The searches of all requests that are beam searches, and what they do to their sequences."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._groups: dict[str, BeamGroup] = {}

    def begin(self, request_id: str, search: BeamSearch) -> None:
        """The request's first sequence exists already."""
        (first,) = self._sequences.of(request_id)
        self._groups[request_id] = BeamGroup(search, first)

    def results(self, request_id: str) -> int | None:
        """How many results a search is to give; None if the request is none."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        params = group.search.params
        return params.beam_width if params.n is None else params.n

    def forget(self, request_id: str) -> None:
        """The request has ended; nothing if it was none of these."""
        self._groups.pop(request_id, None)

    def score(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        """Hands each beam's best continuations to its search. `logits` float32 [R, vocabulary]."""
        groups = [self._groups[each.request.request_id] for each in sequences]
        temperatures = [group.search.params.temperature or 1.0 for group in groups]
        scale = torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        logprobs = (logits / scale).log_softmax(dim=-1)
        most = min(logits.shape[1], max(group.search.continuations for group in groups))
        values, tokens = (found.tolist() for found in logprobs.topk(most, dim=-1))
        for row, (group, sequence) in enumerate(zip(groups, sequences, strict=True)):
            count = group.search.continuations
            best = zip(tokens[row][:count], values[row][:count], strict=True)
            group.take(sequence, list(best))

    def advance(self) -> list[StepOutput]:
        """Takes a step of each search whose beams are all computed; results of those that end."""
        outputs = []
        for request_id, group in list(self._groups.items()):
            if not group.complete:
                continue
            first = group.lines[0]
            moves = group.advance()
            for sequence in moves.ended:
                self._sequences.scheduler.paging.enter(sequence)  # results stay in the tree
            for sequence in moves.dropped:
                self._sequences.end(sequence, keep=False)
            if group.search.done:
                self.forget(request_id)
                outputs += self._results(first, group.search)
                continue
            forked = [self._sequences.fork(parent, token) for parent, token in moves.forks]
            for sequence, token in moves.tokens:
                self._sequences.append(sequence, token)
            group.adopt(forked)
        return outputs

    @staticmethod
    def _results(first: Sequence, search: BeamSearch) -> list[StepOutput]:
        return [
            replace(
                StepOutput.of(first, result.tokens, result.finish_reason),
                index=index,
                score=result.score,
                cumulative_logprob=result.cumulative_logprob,
            )
            for index, result in enumerate(search.results())
        ]
