"""What is proposed for one sequence: a tree of tokens after its last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from coppice.runtime.requests.request import Sequence


class DraftToken(NamedTuple):
    """One token of a draft.

    Attributes:
        token: its id.
        parent: index of the draft's token before it; -1: the last token of the sequence.
        probability: that it is accepted once its parent was, as its source expects.
        source: what proposed it, as reports call it.
    """

    token: int
    parent: int
    probability: float
    source: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of tokens that may follow a sequence's last one.

    Attributes:
        tokens: each after its parent; children of one parent differ in their tokens.
    """

    tokens: tuple[DraftToken, ...]

    def __post_init__(self) -> None:
        """Raises ValueError if a token stands before its parent, or twice below it."""
        seen = set()
        for index, each in enumerate(self.tokens):
            if not -1 <= each.parent < index:
                raise ValueError(
                    f"parent of token {index} must be from -1 to {index - 1}, got {each.parent}"
                )
            if (key := (each.parent, each.token)) in seen:
                raise ValueError(f"token {each.token} stands twice below {each.parent}")
            seen.add(key)

    def __len__(self) -> int:
        return len(self.tokens)


NOTHING = Draft(())


class DraftSource(Protocol):
    """Proposes drafts, and learns what became of them. Called by the engine's thread."""

    def propose(self, sequence: Sequence, most: int) -> Draft:
        """At most `most` tokens that may follow a running sequence's last one."""
        ...

    def accepted(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """Notes that the first `accepted` tokens of one path of `draft` were the sequence's."""
        ...
