"""Drafts from earlier text: what followed where the last tokens occurred before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from typing import NamedTuple

from coppice.radix.mirror.suffixes.branches import grow
from coppice.radix.mirror.suffixes.index import Line, SuffixIndex
from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.drafts.recent import recent
from coppice.runtime.sampling.drafts.source import Proposed

SOURCE = "text"
"""What reports call it: text of the request itself, and of others of its namespace."""

DEEPEST = 48
"""Tokens of a path; there are more of them in the next step."""

_LENGTHS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)  # equal tokens from which others are as likely
_SHARES = (0.0, 0.1, 0.3, 0.6, 0.9, 1.0)
_RECENT = len(_LENGTHS) * len(_SHARES)  # the first kind of those with one equal token
# How often a small model's answers had the token, by equal tokens, where all places agree.
_FIRST = (0.45, 0.65, 0.75, 0.8, 0.83, 0.88, 0.9, 0.93, 0.96, 0.98, 0.99)
_DIVIDED = 0.8  # the same of a token's share where they do not


class _Marked(NamedTuple):
    """Where the text of an invoked adapter is, whose KV shares a namespace with the base model."""

    namespace: Hashable
    mark: int


class SuffixDrafts:
    """Keeps the text of all sequences in a `SuffixIndex`, and proposes what followed in it.

    The index finds places with two equal tokens or more. Where it finds none, what followed on the
    last token alone is taken from the sequence itself.

    Sequences of one namespace and adapter find each other's text; others find none of it.
    """

    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self._lines: dict[Sequence, Line] = {}

    def propose(self, sequence: Sequence, most: int) -> list[Proposed]:
        """What followed on its last tokens, after its new ones have been entered."""
        line = self._entered(sequence)
        places = self.index.find(line, sequence.tokens, min(most, DEEPEST))
        made = []
        if not places:
            for token, parent, number, first in recent(sequence.tokens, most):
                made.append(Proposed(token, parent, (SOURCE, _RECENT + number), first))
            return made
        for token, parent, length, share in grow(places, most):
            at = bisect_right(_LENGTHS, length) - 1
            agree = bisect_right(_SHARES, share) - 1
            first = _FIRST[at] if share == 1.0 else _DIVIDED * share * _FIRST[at]
            kind = (SOURCE, at * len(_SHARES) + agree)
            made.append(Proposed(token, parent, kind, first))
        return made

    def _entered(self, sequence: Sequence) -> Line:
        """The line of a sequence, with all its tokens."""
        line = self._lines.get(sequence)
        if line is None:
            request = sequence.request
            space = request.namespace
            if request.adapter is not None and request.adapter.mark is not None:
                space = _Marked(space, request.adapter.mark)
            line = self._lines[sequence] = self.index.begin(space)
        self.index.enter(line, sequence.tokens)
        return line

    def forget(self) -> None:
        """Forgets all text."""
        self.index.clear()

    def forget_adapter(self, identity: str, mark: int | None) -> None:
        """Forgets the text of an adapter that is removed."""
        found: list[Hashable] = []
        for space in self.index.text.named:
            namespace, own_mark = space if isinstance(space, _Marked) else (space, None)
            of_mark = mark is not None and own_mark == mark
            if of_mark or getattr(namespace, "adapter", None) == identity:
                found.append(space)
        self.index.forget_all(found)

    def ended(self, sequence: Sequence) -> None:
        """Enters its last tokens, which others may repeat; not of beams, which share theirs."""
        request = sequence.request
        if sequence.num_generated and not (sequence.late or request.beam_search):
            self._entered(sequence)
        line = self._lines.pop(sequence, None)
        if line is not None:
            self.index.end(line)
