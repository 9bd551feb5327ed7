"""What a source of drafts asks of a draft model: its next tokens, a pass at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from coppice.runtime.requests.request import Sequence


class Begun(NamedTuple):
    """How far a draft model is with a sequence.

    Attributes:
        missing: tokens that it has to compute before it can propose the next one; at least 1.
        room: tokens that it can propose.
    """

    missing: int
    room: int


class Guess(NamedTuple):
    """What a draft model expects next.

    Attributes:
        token: what it would choose with the sequence's parameters and random number.
        probability: that it gives to this token.
        others: likely tokens beside it, each with its probability, the most probable first.
    """

    token: int
    probability: float
    others: tuple[tuple[int, float], ...]


class DraftNetwork(Protocol):
    """A draft model with its own KV cache. Called by the engine's thread.

    Attributes:
        most_rows: tokens that one pass computes at most.
    """

    most_rows: int

    def begin(self, sequence: Sequence) -> Begun | None:
        """Follows a sequence to its last token, and forgets what was drafted after it.

        Returns None for one that it cannot follow: it is too long, or has tokens that the draft
        model lacks. O(new tokens); for a new sequence O(tokens), to find them in its tree.
        """
        ...

    def run(self, parts: Seq[tuple[Sequence, int]]) -> list[Guess | None]:
        """Computes the next `count` tokens of each sequence, which has begun, in one pass.

        A guess for each that has no more of them; None for the others, and for those that found no
        pages. Raises what the device raises.
        """
        ...

    def append(self, sequence: Sequence, token: int) -> bool:
        """Goes on with a drafted token; returns whether more could follow it."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Leaves a sequence; what was computed of its text stays in the tree."""
        ...

    def forget(self) -> None:
        """Empties its KV cache."""
        ...
