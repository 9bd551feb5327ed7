"""Sequences that are made to follow given texts, so that policies of drafts can be compared."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from coppice.runtime.requests.request import Request, Sequence, Status
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.drafts.draft import NOTHING
from coppice.runtime.sampling.drafts.policy import TreeSpeculation

Text = tuple[list[int], list[int]]
"""A prompt and its output."""


def weights_once(n: int, drafted: int) -> float:
    """A step that reads weights: rows cost little until they are many."""
    return 0.020 + 0.0005 * (n + drafted) + 0.004 * max(0, n + drafted - 32)


def all_rows_alike(n: int, drafted: int) -> float:
    """A step whose time is that of its rows."""
    return 0.010 * (n + drafted)


class FollowedTexts:
    """Steps of sequences that follow texts; each takes a given time, and that of making drafts.

    Attributes:
        time, plain: seconds that all took, and would have taken without drafts.
        tokens, rows: that came out, and that could have had a draft.
        drafted: tokens that each step drafted.
    """

    def __init__(
        self,
        seconds: Callable[[int, int], float],
        speculation: TreeSpeculation,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`seconds` of a step by its sequences and drafted tokens; `clock` is that of drafts."""
        self.seconds, self.speculation, self._clock = seconds, speculation, clock
        self.time = self.plain = 0.0
        self.tokens = self.rows = 0
        self.drafted: list[int] = []
        self._arrivals = 0

    def begins(self, sequence: Sequence, output: list[int]) -> None:
        """Hears which output a sequence will have."""

    def run(self, texts: list[Text], **params: object) -> None:
        """Follows texts of (prompt, output) together."""
        running = []
        for prompt, output in texts:
            request = Request(
                str(self._arrivals), array("i", prompt),
                SamplingParams(max_tokens=len(output), **params),  # type: ignore[arg-type]
                None, self._arrivals, 0, len(prompt) + len(output),
            )  # fmt: skip
            self._arrivals += 1
            sequence = Sequence(request)
            sequence.status = Status.RUNNING
            sequence.tokens.append(output[0])
            self.begins(sequence, output)
            running.append((sequence, output))
        while running:
            self._step(running)
            for sequence, _ in [r for r in running if r[0].num_generated == len(r[1])]:
                self.speculation.ended(sequence)
            running = [each for each in running if each[0].num_generated < len(each[1])]

    def _step(self, running: list[tuple[Sequence, list[int]]]) -> None:
        asked = [(s, len(o) - s.num_generated - 1) for s, o in running]
        asked = [each for each in asked if each[1] > 0]
        others = len(running) - len(asked)
        begun = self._clock()
        drafts = [NOTHING] * len(asked)
        if asked and not self.speculation.skips(len(asked)):
            drafts = self.speculation.propose(asked, others)
        given = dict(zip((s for s, _ in asked), drafts, strict=True))
        drafted = sum(map(len, drafts))
        seconds = self.seconds(len(running), drafted) + self._clock() - begun
        self.time += seconds
        self.drafted.append(drafted)
        self.rows += len(running)
        for sequence, output in running:
            draft, path = given.get(sequence), []
            number, at = sequence.num_generated, -1
            if draft:
                assert len(draft) <= len(output) - number - 1
                for index, each in enumerate(draft.tokens):
                    if each.parent == at and each.token == output[number + len(path)]:
                        path.append(index)
                        at = index
            new = output[number : number + len(path) + 1]
            sequence.tokens.extend(new)
            self.tokens += len(new)
            self.plain += len(new) * self.seconds(len(running), 0) / len(running)
            if draft:
                self.speculation.verified(sequence, draft, path)
        if given:
            self.speculation.stepped(len(given), drafted, others, seconds)

    @property
    def gain(self) -> float:
        """How much faster than without drafts."""
        return self.plain / self.time
