"""Counts what drafts came to, by what proposed them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SourceCounts:
    """What the drafts of one source came to.

    Attributes:
        drafted: tokens that were computed.
        accepted: of them, those that the text went on with.
        seconds_saved: an estimate: the time of the steps that the accepted tokens would have taken,
            less what the drafted ones added to steps.
    """

    drafted: int = 0
    accepted: int = 0
    seconds_saved: float = 0.0


class SpeculationCounts:
    """Counts of one engine, since its start.

    Attributes:
        sources: by their names.
        rows: tokens of sequences, one a step, that were computed with a draft or could have been.
    """

    def __init__(self) -> None:
        self.sources: dict[str, SourceCounts] = {}
        self.rows = 0

    def of(self, source: str) -> SourceCounts:
        """The counts of a source."""
        return self.sources.setdefault(source, SourceCounts())

    @property
    def drafted(self) -> int:
        """Tokens that were computed."""
        return sum(each.drafted for each in self.sources.values())

    @property
    def accepted(self) -> int:
        """Tokens that the text went on with."""
        return sum(each.accepted for each in self.sources.values())
