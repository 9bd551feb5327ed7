"""The queue of waiting sequences, ordered by prefix hit without starving anyone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from coppice.runtime.request import Sequence


class WaitingQueue:
    """Sequences that wait for admission.

    First come those that were preempted, then those that were overtaken too often, both in order of
    arrival; then the longest hit first, first come first served among equals. A sequence counts as
    overtaken when one that arrived later is admitted before it, so at most `overtake_limit` can
    pass it: nothing waits for ever.
    """

    def __init__(self, hit: Callable[[Sequence], int], overtake_limit: int) -> None:
        self._hit = hit
        self._limit = overtake_limit
        self._waiting: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.request.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes it out without it having been admitted (an abort)."""
        del self._waiting[sequence.request.request_id]

    def admit(self, sequence: Sequence) -> None:
        """Takes it out for admission; whoever came earlier has been overtaken. O(waiting)."""
        self.remove(sequence)
        for other in self._waiting.values():
            if other.request.arrival < sequence.request.arrival:
                other.overtaken += 1

    def ordered(self) -> list[Sequence]:
        """All of them, next first, by their hits as of now. O(waiting x match)."""
        return sorted(self._waiting.values(), key=self._key)

    def _key(self, sequence: Sequence) -> tuple[int, int, int]:
        arrival = sequence.request.arrival
        if sequence.preempted:
            return 0, 0, arrival
        if sequence.overtaken >= self._limit:
            return 1, 0, arrival
        return 2, -self._hit(sequence), arrival
