"""When the streams of a server are sent what waits for them: in rounds, to keep the cost low.

Sending a piece of a stream takes the server about the same time whether it holds one token or ten,
and where both share the cores, the engine loses that time. So the tokens of a step wait until a
round is due, which sends each stream all of its waiting tokens. The last round's cost determines
the delay before the next one:

    round .......... round .......... round       cost / (cost + delay) is SHARE of a core at most,
    cost   delay     cost   delay     cost        as long as the delay stays below the longest

A few streams cost so little that each token leaves within a millisecond or two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SHARE = 0.1  # of a core that sending may take


class Rounds:
    """Determines when a round is due. One thread begins rounds; another one may report their ends.

    Args:
        longest: seconds that a token waits at most.
        clock: returns seconds, from any point on.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        self._delay = 0.0  # seconds from the last round's end to the next one's beginning
        self._ended = -math.inf
        self._since: float | None = None  # when the first of what waits arrived
        self._sending = False

    def came(self) -> None:
        """Records that something waits."""
        if self._since is None:
            self._since = self._clock()

    @property
    def due(self) -> bool:
        """Whether a round may begin. Ask when something arrived, or the time `left` is over."""
        if self._since is None or self._sending:
            return False
        return self._clock() >= self._ended + self._delay

    def left(self) -> float | None:
        """Seconds until a round is due even if nothing more arrives; None: nothing waits.

        A round that begins with a step's outputs carries more than one that begins just before
        them. So the clock alone begins one only when something has waited for the whole delay.
        """
        if self._since is None:
            return None
        if self._sending:  # nothing wakes the caller at its end, so it asks again
            return max(self._delay, 0.001)
        return max(0.0, max(self._since, self._ended) + self._delay - self._clock())

    def begin(self) -> None:
        """Begins a round, which sends all that waits."""
        self._since, self._sending = None, True

    def end(self, cost: float) -> None:
        """Ends the round, which took `cost` seconds of processor time."""
        self._delay = min(self._longest, cost / SHARE)
        self._ended = self._clock()
        self._sending = False
