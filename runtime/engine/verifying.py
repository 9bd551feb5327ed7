"""Which tokens of a step's drafts are those that their sequences would have got one by one.

The logits of a draft's token are those that the sequence would have after it. So the next token is
chosen from them as ever: with the random number of its position, by rules that have seen all tokens
before it. A drafted token is accepted if it is the one that was chosen at its place, and the first
that was not drafted is the sequence's last one.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from coppice.kernels.transfer import take
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.request import Sequence, Status
from coppice.runtime.runner.drafts import DraftRows
from coppice.runtime.sampling.logit_rules import may_have_rules
from coppice.runtime.sampling.sampler import Sampled, Sampler


@dataclass(slots=True)
class Followed:
    """What a sequence with a draft has got in a step.

    Attributes:
        rows: of its draft.
        tokens: the chosen ones, which have been appended to the sequence.
        reason, stop: why the last of them ends it, as `Sequence.ending`.
        path: indices of the draft's tokens that were accepted; the last token is not among them.
        error: why no token could be chosen after these.
    """

    rows: DraftRows
    tokens: list[int]
    reason: str | None
    stop: int | None
    logprobs: list[Logprobs] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    error: str | None = None


class Verification:
    """The drafts of one step, with the logits of their rows.

    Tokens of sequences without rules are chosen for all rows of the step at once. Rules depend on
    the tokens before, so where there are any the rows of the accepted path are taken one by one.
    """

    __slots__ = ("_begins", "_drafts", "_logits")

    def __init__(self, drafts: Seq[DraftRows], logits: torch.Tensor) -> None:
        """`logits` [R + D, vocabulary]: of the step's sequences, then of all drafts."""
        self._drafts = drafts
        self._logits = logits
        self._begins: dict[Sequence, int] = {}  # rows of the choice, for those without rules

    def with_drafts(
        self, logits: torch.Tensor, sequences: list[Sequence]
    ) -> tuple[torch.Tensor, list[Sequence], list[int]]:
        """Adds rows of drafts to those of `sequences`, whose tokens are to be chosen.

        Returns the logits, the sequence of each row, and how far the row is ahead of it.
        """
        chosen, ahead, rows = list(sequences), [0] * len(sequences), list[int]()
        for each in self._drafts:
            if may_have_rules(each.sequence):
                continue
            self._begins[each.sequence] = len(chosen)
            rows += range(each.first, each.first + len(each.draft))
            chosen += [each.sequence] * len(each.draft)
            ahead += each.draft.depths()
        if logits.data_ptr() == self._logits.data_ptr() and len(chosen) == len(self._logits):
            return self._logits, chosen, ahead  # all rows, in their order
        if rows:
            logits = torch.cat((logits, take(self._logits, rows)))
        return logits, chosen, ahead

    def follow(
        self, sampled: Sampled, sequences: Seq[Sequence], sampler: Sampler, eos: Container[int]
    ) -> dict[Sequence, Followed]:
        """Follows each draft along the tokens that are chosen, and appends these.

        `sampled` has the tokens of `sequences`, which are the last of theirs already, and of the
        rows that `with_drafts` added. `sampler` chooses the others.
        """
        row_of = {sequence: row for row, sequence in enumerate(sequences)}
        found = {}
        for rows in self._drafts:
            sequence = rows.sequence
            row = row_of[sequence]
            if sequence.status is not Status.RUNNING or row in sampled.errors:
                continue
            followed = Followed(rows, [sampled.tokens[row]], *sequence.ending(eos))
            if (logprobs := sampled.logprobs[row]) is not None:
                followed.logprobs.append(logprobs)
            self._extend(followed, sampled, sampler, eos)
            found[sequence] = followed
        return found

    def _extend(
        self, followed: Followed, sampled: Sampled, sampler: Sampler, eos: Container[int]
    ) -> None:
        rows, tokens, path = followed.rows, followed.tokens, followed.path
        sequence, begin = rows.sequence, self._begins.get(rows.sequence)
        at = -1
        while followed.reason is None:
            accepted = rows.draft.after(at, tokens[-1])
            if accepted is None:
                return
            at = accepted
            path.append(at)
            chosen, row = sampled, at
            if begin is None:
                logits = self._logits[rows.first + at : rows.first + at + 1]
                chosen, row = sampler.sample(logits, [sequence]).read(), 0
            else:
                row += begin
            if (error := chosen.errors.get(row)) is not None:
                followed.error = error
                return
            tokens.append(chosen.tokens[row])
            sequence.tokens.append(tokens[-1])
            if (logprobs := chosen.logprobs[row]) is not None:
                followed.logprobs.append(logprobs)
            followed.reason, followed.stop = sequence.ending(eos)
