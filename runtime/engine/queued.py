"""A step on its way: its forward pass is queued on the device, and its tokens have not come."""

from __future__ import annotations

from coppice.runtime.engine.verifying import Verification
from coppice.runtime.requests.request import Sequence, Status
from coppice.runtime.runner.batch import LateTokens
from coppice.runtime.sampling.sampler import Sampled, Sampling
from coppice.runtime.schedule.chunks import Schedule


class Step:
    """A step whose forward pass is queued, and the tokens that it will give.

    `sequences` are those that get a token, `pooled` those that get a vector or a score. Until
    `settle` the last token of each of the former is `LATE`.
    """

    __slots__ = ("schedule", "started", "sequences", "late", "pooled", "verification",
                 "_sampled", "_sampling")  # fmt: skip

    def __init__(
        self,
        schedule: Schedule,
        started: float,
        sequences: list[Sequence],
        sampling: Sampling,
        pooled: list[Sequence],
        verification: Verification | None = None,
    ) -> None:
        self.schedule = schedule
        self.started = started
        self.sequences = sequences
        self.late = LateTokens(
            sampling.tokens, {sequence: row for row, sequence in enumerate(sequences)}
        )
        self.pooled = pooled
        self.verification = verification
        self._sampling = sampling
        self._sampled: Sampled | None = None

    @property
    def abandoned(self) -> bool:
        """Whether all its sequences have ended meanwhile."""
        live = any(sequence.status is not Status.FINISHED for sequence in self.sequences)
        return not (live or self.schedule.running())

    def settle(self) -> Sampled:
        """Waits for the tokens and gives them to their sequences."""
        if self._sampled is None:
            sampled = self._sampling.read()
            # The tokens of drafts come after those of sequences.
            for sequence, token in zip(self.sequences, sampled.tokens, strict=False):
                if sequence.late:  # else it has ended meanwhile
                    sequence.tokens[-1] = token
            self._sampled = sampled
        return self._sampled
