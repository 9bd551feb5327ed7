"""Which replicas a hub has: who may join, who drains, and since when there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from coppice.frontend.router.choosing.policy import Router
from coppice.frontend.router.replica import Replica
from coppice.runtime.process.messages import Ready

GRACE = 10.0  # seconds without a replica after which new requests are refused

# What all replicas must have in common.
_ALIKE = "model_digest", "weights_digest", "max_model_len", "recipe", "caching", "model_impl"


class Members:
    """The replicas of a hub. Not thread-safe.

    Attributes:
        by_name: all that are connected.
        by_number: the same, by their places in the router.
        model: what the first of those that take requests has said of its engine, without its door;
            None while none does.
    """

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self.by_name: dict[str, Replica] = {}
        self.by_number: dict[int, Replica] = {}
        self.model: Ready | None = None
        self._router, self._clock = router, clock
        self._absent_since: float | None = None
        self._emptied: dict[str, Callable[[], object]] = {}  # of those that drain

    def __contains__(self, replica: Replica) -> bool:
        return self.by_name.get(replica.name) is replica

    @property
    def taking(self) -> list[Replica]:
        """Those that take requests."""
        return [each for each in self.by_name.values() if not each.draining]

    @property
    def trouble(self) -> str | None:
        """Why none takes requests; None if one does, or did a moment ago."""
        since = self._absent_since
        if since is None or self._clock() - since < GRACE:
            return None
        return "no replica takes requests at present"

    def add(self, replica: Replica) -> None:
        """Has it take requests. Raises ValueError if it is not like the others."""
        self._check(replica)
        replica.number = next(number for number in count() if number not in self.by_number)
        self.by_name[replica.name] = self.by_number[replica.number] = replica
        self._note_absence()
        ready = replica.ready
        self._router.join(replica.number, places=ready.max_num_seqs, caching=ready.caching)
        if self.model is None:
            self.model = replace(ready, door=None)

    def drain(self, name: str, emptied: Callable[[], object]) -> bool:
        """Has it take no more requests, and calls `emptied` once it has none.

        Returns whether it is there.
        """
        replica = self.by_name.get(name)
        if replica is None:
            return False
        if not replica.draining:
            replica.draining = True
            self._router.leave(replica.number)
            self._emptied[name] = emptied
            self.check_emptied(replica)
            self._note_absence()
        return True

    def check_emptied(self, replica: Replica) -> None:
        """Tells who drains a replica if its last request has ended."""
        if replica.draining and not replica.flights:
            emptied = self._emptied.pop(replica.name, None)
            if emptied is not None:
                emptied()

    def remove(self, replica: Replica) -> None:
        """Takes note that it is gone."""
        del self.by_name[replica.name], self.by_number[replica.number]
        self._router.leave(replica.number)
        self._note_absence()

    def remove_all(self) -> list[Replica]:
        """Forgets all, when the hub is closed; returns them."""
        replicas = list(self.by_name.values())
        self.by_name.clear()
        return replicas

    def _note_absence(self) -> None:
        if self.taking:
            self._absent_since = None
            return
        self.model = None  # those that come next may all be another one: they were updated
        if self._absent_since is None:
            self._absent_since = self._clock()

    def _check(self, replica: Replica) -> None:
        if replica.name in self.by_name:
            raise ValueError(f"name must be new, got {replica.name!r}, which is there already")
        if self.model is None:
            return
        for each in _ALIKE:
            ours, theirs = getattr(self.model, each), getattr(replica.ready, each)
            if ours != theirs:
                raise ValueError(
                    f"replica {replica.name} must be of the same model as the others: its "
                    f"{each} is {theirs}, theirs is {ours}"
                )
