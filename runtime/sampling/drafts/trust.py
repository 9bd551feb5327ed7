"""Learns how often what a source proposes is accepted."""

from __future__ import annotations

_PRIOR = 12.0  # tokens that the first estimate counts as
_LATELY = 400.0  # tokens after which earlier ones count half


class Trust:
    """The share of tokens that were accepted once those before them were, by kind.

    A kind is any hashable value that a source gives to tokens that are as likely. Nothing in it
    belongs to a text, so namespaces learn from each other only how well drafts do.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[float, float]] = {}  # tried, accepted

    def probability(self, kind: tuple[str, int], first: float) -> float:
        """Of a token of this kind; `first` is supposed before any was seen."""
        tried, accepted = self._seen.get(kind, (0.0, 0.0))
        return (accepted + _PRIOR * first) / (tried + _PRIOR)

    def learn(self, kind: tuple[str, int], accepted: bool) -> None:
        """Notes what became of a token of this kind, all tokens before which were accepted."""
        tried, yes = self._seen.get(kind, (0.0, 0.0))
        kept = 1 - 1 / _LATELY if tried > _LATELY else 1.0
        self._seen[kind] = kept * tried + 1, kept * yes + accepted


class Luck:
    """How much better or worse drafts of one sequence do than others."""

    __slots__ = ("accepted", "expected")

    _SURE = 1.5
    _KEPT = 0.9

    def __init__(self) -> None:
        self.accepted = self.expected = 0.0

    @property
    def factor(self) -> float:
        """Of the probability that the first token of a draft is accepted."""
        return (self.accepted + self._SURE) / (self.expected + self._SURE)

    def learn(self, expected: float, accepted: bool) -> None:
        """Notes whether the first token was accepted, which was `expected` with this chance."""
        self.expected = self._KEPT * self.expected + expected
        self.accepted = self._KEPT * self.accepted + accepted
