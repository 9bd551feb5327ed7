"""How much time may go into looking for drafts, where few are found that pay."""

from __future__ import annotations

import math

_OF_STEPS = 0.005  # of the time of all steps
_OF_SAVED = 0.2  # of the time that drafts have saved: where they pay it is worth looking for more
_MOST = 64  # sequences for which it is saved up
_LEAST = 1e-6  # seconds that to ask for one sequence's draft is supposed to take at least
_AT_ONCE = 4  # sequences that it waits for: to look at all of them takes as long as asking a few


class AskingBudget:
    """Seconds that asking for drafts may take.

    A step fills the caches with weights, so what comes after it takes many times as long as in a
    loop: to ask 16 sequences of a model whose step takes 10 ms may take 1.5 ms, where nothing says
    that one of them will ever have a draft that pays. So what asking takes is counted, and it may
    take a small share of the steps' time and a larger one of what drafts save.

    Attributes:
        each: seconds that it takes to ask for one sequence's draft, about.
    """

    def __init__(self, each: float = 50e-6) -> None:
        self.each = each
        self._seconds = _MOST * each

    @property
    def allowed(self) -> int:
        """Sequences that may be asked now."""
        return max(int(self._seconds / self.each), 0)

    @property
    def scarce(self) -> bool:
        """Whether so little is left that sequences that were asked in vain have to wait."""
        return self._seconds < _MOST / 2 * self.each

    def stepped(self, seconds: float) -> None:
        """Adds what a step of so many seconds gives."""
        self._earn(_OF_STEPS * seconds)

    def saved(self, seconds: float) -> None:
        """Adds what a draft gives that has saved so many seconds; it may be negative."""
        self._earn(_OF_SAVED * seconds)

    def _earn(self, seconds: float) -> None:
        most = _MOST * self.each
        self._seconds = max(min(self._seconds + seconds, most), -most)

    def asked(self, sequences: int, doubtful: int, seconds: float) -> None:
        """Takes off what it took to ask `sequences`, of which only `doubtful` are to be paid.

        The others' drafts have just paid. That a whole prompt is entered at the first time is not
        the rule, so no time counts as more than twice the usual one.
        """
        took = min(seconds / sequences, 2 * self.each)
        self.each = max(self.each + 0.1 * (took - self.each), _LEAST)
        self._seconds -= took * doubtful

    def wait(self, sequences: int, seconds: float) -> int:
        """Steps of so many `seconds` until it is worth while to look at `sequences` again."""
        lacking = min(sequences, _AT_ONCE) * self.each - self._seconds
        return max(math.ceil(lacking / (_OF_STEPS * seconds)), 0)
