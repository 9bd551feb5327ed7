"""Answers that replicas owe, though nobody waits for them any more."""

from __future__ import annotations

import math

import numpy as np

# Seconds after the last request was given up, from which on a replica that has not been heard of
# gets another one: it may work again and have nothing to report.
_TRIED_AGAIN = 20.0


class Debts:
    """Replicas that have not been heard of since a client gave up a request without an answer.

    A replica that is stuck has nobody in its queue once all clients have given up. It would look
    like an idle one, and each client would lose its request there.
    """

    def __init__(self) -> None:
        self._owed: dict[int, tuple[float, float]] = {}  # due since, given up last

    def give_up(self, replica: int, due: float, now: float) -> None:
        """Notes that a request is given up; `due`: when its replica should have answered it."""
        since, _ = self._owed.get(replica, (math.inf, now))
        self._owed[replica] = min(since, due), now

    def forget(self, replica: int) -> None:
        """Notes that a replica works, or is gone."""
        self._owed.pop(replica, None)

    def raise_overdue(self, seconds: np.ndarray, queued: np.ndarray, now: float) -> None:
        """Raises a replica's number in `seconds` to how long it has owed an answer.

        `queued`: how many requests wait for one there. One that is tried again gets a single one.
        """
        for replica, (due, given_up) in self._owed.items():
            if now - given_up < _TRIED_AGAIN or queued[replica]:
                seconds[replica] = max(seconds[replica], now - due)
