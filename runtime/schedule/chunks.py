"""What one step computes: pieces of sequences, with drafts, after copies of pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from coppice.runtime.requests.request import Sequence, Status
from coppice.runtime.sampling.drafts.draft import Draft
from coppice.runtime.schedule.paging import PageCopy


class Chunk:
    """The next `count` tokens of a sequence from `start` on, to be computed in this step.

    `decode`: whether it is the one token that was sampled last, and not a piece of a prefill.
    `draft`: what is proposed to follow it, and computed with it; None: nothing.
    """

    __slots__ = ("sequence", "count", "start", "decode", "draft")

    # Written out, not a dataclass, for speed: one is made for each sequence in each step.
    def __init__(self, sequence: Sequence, count: int) -> None:
        self.sequence = sequence
        self.count = count
        self.start = start = sequence.computed
        self.decode = (
            count == 1
            and start + 1 == len(sequence.tokens)
            and start >= len(sequence.request.prompt_token_ids)
        )
        self.draft: Draft | None = None


@dataclass(slots=True)
class Schedule:
    """What one step does: copy pages, in order, then compute the chunks in one mixed batch.

    `short`: pages were missing, and no sequence was preempted for them since tokens were late.
    `failure`: some copies had to be made at once, and this is why they could not be.
    `asked`: how many of the sequences could have had a draft; `drafted`: tokens of drafts.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    short: bool = False
    failure: BaseException | None = None
    asked: int = 0
    drafted: int = 0

    def prefills(self) -> list[Chunk]:
        """The chunks that are not decodes: most steps have few of them, or none."""
        return [chunk for chunk in self.chunks if not chunk.decode]

    def running(self) -> list[Chunk]:
        """The chunks whose sequences have not ended since they were scheduled."""
        return [chunk for chunk in self.chunks if chunk.sequence.status is Status.RUNNING]

    def rows(self) -> int:
        """Tokens that the step computes, drafted ones included."""
        prefills = self.prefills()
        decodes = len(self.chunks) - len(prefills) + self.drafted
        return decodes + sum(chunk.count for chunk in prefills)
