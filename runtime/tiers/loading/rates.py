"""How fast tiers read, measured; and whether loading or computing is faster."""

from __future__ import annotations

import math
from dataclasses import dataclass

_KEPT = 0.8  # of the weight of older measurements
_PATIENCE = 4.0  # a tier may take so many times its usual time
_LEAST_PATIENCE = 0.2  # and so many seconds in any case: threads start late on a busy machine
_FIRST_PATIENCE = 1.0  # for a tier of which nothing is known: it may have to connect, or to wake up

_HOPE = 1.1  # a tier that is not read is expected to be so much faster, each time it was too slow

#: From this ratio of loading's speed to computing's, computing beside it gains too little.
TOGETHER = 8.0


class Rate:
    """Bytes a second that a tier reads, of pieces of similar size.

    Only reading measures it. So that a tier that was slow once, since the machine was busy, is not
    left alone for ever, `declined` raises what is expected of it little by little.
    """

    __slots__ = ("_bytes", "_seconds", "_expected", "_hope")

    def __init__(self, expected: float) -> None:
        """`expected`: bytes a second until something was measured."""
        self._expected = expected
        self._bytes = self._seconds = 0.0
        self._hope = 1.0

    @property
    def value(self) -> float:
        """Bytes a second."""
        if not self._seconds:
            return self._expected
        measured = self._bytes / self._seconds
        return max(measured, min(measured * self._hope, self._expected))

    def observe(self, size: int, seconds: float) -> None:
        """Learns from a read of `size` bytes."""
        self._bytes = _KEPT * self._bytes + size
        self._seconds = _KEPT * self._seconds + max(seconds, 1e-9)
        self._hope = 1.0

    def declined(self) -> None:
        """Notes that nothing was read since computing was faster."""
        if self.value < self._expected:
            self._hope *= _HOPE

    def patience(self, size: int) -> float:
        """Seconds after which a read of `size` bytes is slower than can be expected."""
        least = _LEAST_PATIENCE if self._seconds else max(_LEAST_PATIENCE, _FIRST_PATIENCE)
        return max(least, _PATIENCE * size / self.value)


@dataclass(frozen=True, slots=True)
class Worth:
    """Whether pages are loaded, and how.

    Attributes:
        loads: it is faster than computing them.
        together: the beginning is computed while the end is loaded, until they meet.
        seconds: that it saves.
    """

    loads: bool
    together: bool
    seconds: float


def worth(load_seconds: float, compute_seconds: float | None) -> Worth:
    """Compares loading some tokens with computing them; None: it is not known how long that takes.

    Done together, both need `1 / (1 / load + 1 / compute)` seconds. Loading alone is preferred from
    `TOGETHER` on: a step has a cost of its own, and others need the processor.
    """
    if compute_seconds is None:
        return Worth(True, False, 0.0)
    if compute_seconds >= TOGETHER * load_seconds:
        return Worth(True, False, compute_seconds - load_seconds)
    both = 1 / (1 / max(load_seconds, 1e-9) + 1 / max(compute_seconds, 1e-9))
    saved = compute_seconds - both
    # Less than a tenth is lost again where the two meet, a page or a chunk too far.
    return Worth(saved > 0.1 * compute_seconds, True, saved)


def meeting(gap: int, load_rate: float, compute_rate: float) -> int:
    """Of `gap` tokens, the first ones that are computed while the others are loaded from the end.

    Rates are in tokens a second.
    """
    return math.ceil(gap * compute_rate / (load_rate + compute_rate))
