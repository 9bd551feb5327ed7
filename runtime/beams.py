"""The beams of one request as sequences: who goes on, who is forked, who ends."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.runtime.beam_search import BeamSearch
from coppice.runtime.request import Sequence

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
