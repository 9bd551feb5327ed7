"""When something that only grows passed a mark: a logical clock, or how far eviction has come."""

from __future__ import annotations

from bisect import bisect_left


class Timeline:
    """Pairs of a mark and the time it was reached, both growing; at most `limit` are kept.

    When it is full, every second one of the older half is dropped: the past gets coarser with age.
    """

    def __init__(self, limit: int = 4096) -> None:
        if limit < 4:
            raise ValueError(f"limit must be at least 4, got {limit}")
        self._limit = limit
        self._marks: list[float] = []
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._marks)

    def record(self, mark: float, time: float) -> None:
        """`mark` was reached at `time`; nothing if that mark was passed before. O(1), amortised.

        Raises ValueError if time went backwards.
        """
        if self._times and time < self._times[-1]:
            raise ValueError(f"time must not go backwards, got {time} after {self._times[-1]}")
        if self._marks and mark <= self._marks[-1]:
            return
        self._marks.append(mark)
        self._times.append(time)
        if len(self._marks) > self._limit:
            older = self._limit // 2
            del self._marks[0:older:2], self._times[0:older:2]

    def time_of(self, mark: float) -> float | None:
        """When `mark` was reached or first passed; None if it was not yet. O(log limit)."""
        at = bisect_left(self._marks, mark)
        return self._times[at] if at < len(self._times) else None
