"""What the policy of drafts makes of given texts where a drafted token has a given cost.

No model runs and no clock is read, so rows are the same on every machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from coppice.radix.mirror.suffixes.index import SuffixIndex
from coppice.runtime.requests.request import Request, Sequence, Status
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.drafts.costs import StepCosts
from coppice.runtime.sampling.drafts.draft import NOTHING
from coppice.runtime.sampling.drafts.policy import TreeSpeculation
from coppice.runtime.sampling.drafts.suffixes import SuffixDrafts
from drafts.encoded import Text

MOST = 48
"""Drafted tokens of a step, at most."""


class _Known(StepCosts):
    """Steps of which each drafted token takes the share `row`, as is known from the start."""

    def __init__(self, row: float) -> None:
        super().__init__()
        self._known = 1 + row * np.arange(MOST + 1)

    def observe(self, tokens: int, drafted: int, seconds: float) -> None:
        """It knows."""

    def curve(self, tokens: int) -> np.ndarray:
        return self._known

    def drafting(self, tokens: int) -> int:
        return 0  # no step is needed to know the time without drafts


@dataclass(frozen=True, slots=True)
class Followed:
    """What came of texts, one at a time.

    Attributes:
        tokens_a_step: accepted ones, and one more.
        drafted_a_step: drafted ones.
        gain: steps without drafts over the time with them, in such steps.
    """

    tokens_a_step: float
    drafted_a_step: float
    gain: float


def follow_alone(texts: Seq[Text], row: float) -> Followed:
    """Drafts for one text after another, where a drafted token takes the share `row` of a step.

    Later texts find those before.
    """
    speculation = TreeSpeculation([SuffixDrafts(SuffixIndex(1 << 19))], MOST, clock=lambda: 0.0)
    speculation.costs = _Known(row)
    steps = tokens = drafted = 0
    for number, text in enumerate(texts):
        length, answer = len(text.answer), text.answer
        params = SamplingParams(max_tokens=length)
        whole = len(text.prompt) + length
        request = Request(str(number), array("i", text.prompt), params, None, number, 0, whole)
        sequence = Sequence(request)
        sequence.status = Status.RUNNING
        sequence.tokens.append(answer[0])
        at = 1
        while at < length:
            room, draft = length - at - 1, NOTHING
            if room and not speculation.skips(1):
                (draft,) = speculation.propose([(sequence, room)], 0)
            path: list[int] = []
            last = -1
            while (found := draft.after(last, answer[at + len(path)])) is not None:
                path.append(found)
                last = found
            new = answer[at : at + len(path) + 1]
            sequence.tokens.extend(new)
            at += len(new)
            if draft:
                speculation.verified(sequence, draft, path)
            speculation.stepped(1, len(draft), 0, 1 + row * len(draft))
            steps, tokens, drafted = steps + 1, tokens + len(new), drafted + len(draft)
        speculation.ended(sequence)
    return Followed(tokens / steps, drafted / steps, tokens / (steps + row * drafted))
