"""When the streams of a server are sent what waits for them: in rounds, so that it costs little.

To send a piece of a stream takes the server about the same time whether it is one token or ten, and
that time is the engine's too where both share the cores. So what a step made waits until a round is
due, and a round sends every stream all that it has. The last round's cost says how long the next
one is put off:

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
    """Says when a round is due. One thread asks and begins rounds; another may say how they ended.

    Args:
        longest: seconds that a token waits at most.
        clock: seconds from any point on.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        self._delay = 0.0
        self._ended = -math.inf
        self._since: float | None = None  # when the first of what waits came
        self._sending = False

    @property
    def delay(self) -> float:
        """Seconds from the last round's end to the next one's beginning."""
        return self._delay

    def came(self) -> None:
        """Something came that waits."""
        if self._since is None:
            self._since = self._clock()

    @property
    def due(self) -> bool:
        """Whether a round may begin; for when something came or the time `left` is over."""
        if self._since is None or self._sending:
            return False
        return self._clock() >= self._ended + self._delay

    def left(self) -> float | None:
        """Seconds until a round is due though nothing more comes; None: nothing waits.

        A round that begins with a step's outputs carries more than one that begins just before
        them. So the clock alone begins one only when something has waited for the whole delay.
        """
        if self._since is None:
            return None
        if self._sending:  # nobody tells when that ends: look again
            return max(self._delay, 0.001)
        return max(0.0, max(self._since, self._ended) + self._delay - self._clock())

    def begin(self) -> None:
        """All that waits is going to be sent."""
        self._since, self._sending = None, True

    def end(self, cost: float) -> None:
        """It was sent, which took `cost` seconds of processor time."""
        self._delay = min(self._longest, cost / SHARE)
        self._ended = self._clock()
        self._sending = False
