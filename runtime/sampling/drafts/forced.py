"""Drafts from grammars: tokens that a schema or an expression leaves no choice about."""

from __future__ import annotations

from itertools import takewhile

from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.drafts.source import Proposed
from coppice.runtime.sampling.logit_rules import LogitRules

SOURCE = "grammar"

_FIRST = 0.97  # the same text may be written with other tokens, too


class ForcedDrafts:
    """Proposes what the grammar of a request forces, as tokens that its tokenizer would write."""

    def __init__(self, vocabulary: int) -> None:
        """`vocabulary` is the model's: a tokenizer may have further tokens, which it can't take."""
        self._vocabulary = vocabulary

    def propose(self, sequence: Sequence, most: int) -> list[Proposed]:
        """The tokens that are forced next."""
        rules = sequence.logit_rules
        if not isinstance(rules, LogitRules) or rules.grammar is None:
            return []
        grammar = rules.grammar
        grammar.update(sequence)
        if grammar.matcher.is_error() or grammar.matcher.is_stopped():
            return []
        tokens = grammar.matcher.compute_ff_tokens()[:most]
        known = takewhile(lambda token: token < self._vocabulary, tokens)
        return [
            Proposed(token, number - 1, (SOURCE, min(number, 7)), _FIRST)
            for number, token in enumerate(known)
        ]

    def forget(self) -> None:
        """It keeps no text of finished sequences."""

    def forget_adapter(self, identity: str, mark: int | None) -> None:
        """Nor of adapters."""

    def ended(self, sequence: Sequence) -> None:
        """It keeps nothing."""
