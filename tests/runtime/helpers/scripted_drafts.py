"""Drafts for tests: right, wrong, partly right, branching, from texts that are known in advance."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from fake_model import VOCABULARY

from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.drafts.draft import NOTHING, Draft, DraftToken

#: What follows the tokens of a sequence, as far as it is known.
Known = Callable[[Sequence], Seq[int]]


class ScriptedDrafts:
    """Proposes what is known to follow, with mistakes and branches; checks what it is told.

    Attributes:
        drafted, accepted: tokens.
        branched: accepted paths that were not the first one of their draft.
    """

    def __init__(
        self,
        rng: random.Random,
        known: Known,
        *,
        right: float = 0.8,
        vocabulary: int = VOCABULARY,
        chains: bool = False,
        silent: float = 0.1,
    ) -> None:
        """`right`: the chance that a token is what follows; `silent`: that there is no draft."""
        self._rng, self._known = rng, known
        self._right, self._vocabulary, self._chains = right, vocabulary, chains
        self._silent = silent
        self.drafted = self.accepted = self.branched = self.steps = 0
        self._asked: dict[Sequence, int] = {}
        self._over: set[Sequence] = set()

    def skips(self, sequences: int) -> bool:
        assert sequences > 0
        return False

    def propose(self, sequences: Seq[tuple[Sequence, int]], rows: int) -> list[Draft]:
        assert rows >= 0
        self._asked = dict(sequences)
        for sequence, most in sequences:
            assert most > 0 and not sequence.late and sequence not in self._over
            assert sequence.remaining == 1
            assert not sequence.request.beam_search
            assert len(sequence.tokens) + most < sequence.request.max_length
        return [self._draft(*each) for each in sequences]

    def _draft(self, sequence: Sequence, most: int) -> Draft:
        rng = self._rng
        if rng.random() < self._silent:
            return NOTHING
        following = list(self._known(sequence))
        size = rng.choice([1, 2, 3, 5, 8, most, most + 2])
        tokens: list[DraftToken] = []
        right: list[int] = [-1]  # indices of the tokens that are right, in order
        for _ in range(size):
            depth = len(right) - 1
            true = following[depth] if depth < len(following) else None
            parent = right[-1] if len(tokens) == right[-1] + 1 else len(tokens) - 1
            if not self._chains:
                parent = rng.choice([right[-1], right[-1], parent, rng.randrange(-1, len(tokens))])
            token = rng.randrange(self._vocabulary)
            if parent == right[-1] and true is not None:
                if rng.random() < self._right:
                    token = true
                elif token == true:
                    token = (true + 1) % self._vocabulary
            if any(each.token == token and each.parent == parent for each in tokens):
                continue
            tokens.append(DraftToken(token, parent, rng.random(), "script"))
            if parent == right[-1] and token == true:
                right.append(len(tokens) - 1)
        return Draft(tuple(tokens))

    def verified(self, sequence: Sequence, draft: Draft, path: Seq[int]) -> None:
        assert len(draft) <= self._asked.pop(sequence)
        at = -1
        for index in path:
            assert draft.tokens[index].parent == at
            at = index
        self.drafted += len(draft)
        self.accepted += len(path)
        self.branched += list(path) != list(range(len(path)))
        if path:
            expected = [draft.tokens[index].token for index in path]
            # One more token follows, unless rules allow none.
            got = sequence.tokens[-1 - len(path) :].tolist()
            assert expected in (got[:-1], got[1:])

    def stepped(self, sequences: int, drafted: int, rows: int, seconds: float) -> None:
        assert sequences > 0 and drafted >= 0 and rows >= 0 and seconds >= 0
        self.steps += 1

    def ended(self, sequence: Sequence) -> None:
        assert sequence not in self._over
        self._over.add(sequence)
