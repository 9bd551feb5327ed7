"""What is proposed for one sequence: a tree of tokens after its last one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
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

    @property
    def is_chain(self) -> bool:
        """Whether no token has two that may follow it."""
        return all(each.parent == index - 1 for index, each in enumerate(self.tokens))

    def first(self, count: int) -> Draft:
        """Its first `count` tokens."""
        return self if count >= len(self.tokens) else Draft(self.tokens[:count])

    def likeliest(self) -> Draft:
        """The path of the most probable token after each token. O(tokens)."""
        best: dict[int, int] = {}
        for index, each in enumerate(self.tokens):
            other = best.get(each.parent)
            if other is None or each.probability > self.tokens[other].probability:
                best[each.parent] = index
        path: list[DraftToken] = []
        at = -1
        while (following := best.get(at)) is not None:
            path.append(self.tokens[following]._replace(parent=len(path) - 1))
            at = following
        return Draft(tuple(path))

    def depths(self) -> list[int]:
        """How many tokens lead to each token, itself included."""
        depths: list[int] = []
        for each in self.tokens:
            depths.append(1 if each.parent < 0 else depths[each.parent] + 1)
        return depths

    def after(self, parent: int, token: int) -> int | None:
        """The index of that token after the one at `parent`; None: it was not drafted."""
        for index in range(parent + 1, len(self.tokens)):
            each = self.tokens[index]
            if each.parent == parent and each.token == token:
                return index
        return None


NOTHING = Draft(())

#: Tokens of a sequence's draft: with the token before them they are what attention takes as a tree.
MOST_DRAFTED = 62


class Speculation(Protocol):
    """What the step asks for drafts, for all of its sequences together: rows cost the more, the
    more of them a step has. Called by the engine's thread."""

    def skips(self, sequences: int) -> bool:
        """Whether a step, in which so many sequences decode, goes without drafts unseen.

        If so, `propose` is not called for it; `stepped` is.
        """
        ...

    def propose(self, sequences: Seq[tuple[Sequence, int]], rows: int) -> list[Draft]:
        """A draft for each sequence that decodes in a step, `NOTHING` where none pays.

        Args:
            sequences: each with the most tokens that its draft may have; its last token is known.
            rows: of the step that are neither these sequences' last tokens nor drafts.
        """
        ...

    def verified(self, sequence: Sequence, draft: Draft, path: Seq[int]) -> None:
        """Notes that the tokens of `draft` at the indices `path` are the sequence's, in order.

        Called for each draft that was computed, an empty `path` included, when the sequence has got
        its tokens; they may have ended it.
        """
        ...

    def stepped(self, sequences: int, drafted: int, rows: int, seconds: float) -> None:
        """Notes the time of a step that drafts could have been in.

        It computed the last tokens of `sequences`, `drafted` tokens of drafts and `rows` others.
        """
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forgets what it keeps for a sequence that has finished, not for one that is preempted."""
        ...
