"""What sources of drafts give to the policy: tokens with what they are alike to."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from coppice.runtime.requests.request import Sequence


class Proposed(NamedTuple):
    """One token that a source proposes.

    Attributes:
        token: its id.
        parent: index of the proposed token before it; -1: the last token of the sequence.
        kind: the source, and a number that it gives to tokens that are as likely.
        first: how likely it is, supposed before any of its kind was seen.
    """

    token: int
    parent: int
    kind: tuple[str, int]
    first: float


class DraftSource(Protocol):
    """Proposes tokens for one sequence at a time. Called by the engine's thread."""

    def propose(self, sequence: Sequence, most: int) -> list[Proposed]:
        """At most `most` tokens that may follow the last one, which is known; parents first."""
        ...

    def forget(self) -> None:
        """Forgets all text that it keeps of sequences that have finished."""
        ...

    def forget_adapter(self, identity: str, mark: int | None) -> None:
        """Forgets the text of an adapter that is removed.

        `mark` as in `AdapterUse`; None for one that has namespaces of its own.
        """
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forgets what it keeps for a sequence that has finished."""
        ...
