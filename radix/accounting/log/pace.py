"""How many requests may be settled one by one: as many as take a small part of the time."""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.005
"""The part of the time that settling may take."""

BURST: Final = 0.01
"""Seconds of settling that may be spent at once, after a time with few requests."""

# What settling takes, about, on a slow core.
_REQUEST_SECONDS: Final = 30e-6
_TOKEN_SECONDS: Final = 20e-9


class Pace:
    """An allowance that grows with time, and from which each request that is settled takes."""

    def __init__(self, now: float) -> None:
        """`now` and all later times are seconds of one clock."""
        self._seconds = BURST
        self._now = now

    def allows(self, tokens: int, now: float) -> bool:
        """Whether a request with `tokens` tokens to be hashed may be settled; takes its part."""
        seconds = self._seconds + (now - self._now) * SHARE
        self._now = now
        if seconds <= 0.0:
            self._seconds = seconds
            return False
        if seconds > BURST:
            seconds = BURST
        self._seconds = seconds - _REQUEST_SECONDS - tokens * _TOKEN_SECONDS
        return True
