"""The requests of a hub, from their arrival to their end, wherever they are sent meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coppice.frontend.errors import EngineStopped
from coppice.frontend.router.calls import Calls
from coppice.frontend.router.choosing.namespaces import place_of
from coppice.frontend.router.choosing.policy import Router
from coppice.frontend.router.client_ends import Answers, Outputs
from coppice.frontend.router.members import Members
from coppice.frontend.router.replica import Replica
from coppice.runtime.process.messages import Lost, is_short, step_output
from coppice.runtime.requests.request import QueueFull

PATIENCE = 60.0  # seconds for which a request without an answer waits while there is no replica

#: Calls that begin a request.
ADDING = ("add_request", "add_pooling", "add_beam_search")


@dataclass(slots=True)
class Flight:
    """A request that has not ended.

    Attributes:
        number: of the client's call, until it is answered.
        results: sequences that are to end; of a search, results that are to come.
        ended: those that have, by their index: the replica and the client may both say so.
        replica: where it is; None: it waits for one.
        since: when it began to wait for a replica.
        moved: whether it has been sent to another replica since its first one ended.
        full: replicas whose queues are full.
    """

    number: int | None
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: int = 1
    ended: set[int] = field(default_factory=set)
    replica: Replica | None = None
    since: float = 0.0
    began: bool = False
    moved: bool = False
    full: set[Replica] = field(default_factory=set)

    @property
    def name(self) -> str:
        return str(self.args[0])

    def begin(self) -> None:
        """Nothing of it has ended; a search may yet say that it has fewer results than wanted."""
        self.began, self.ended = False, set()
        match self.method:
            case "add_request":
                self.results = self.args[2].num_sequences
            case "add_beam_search":
                self.results = self.args[2].num_results


class Flights:
    """Sends each request to a replica, and to another one if that one ends or is full.

    A request that a replica has not answered when it ends goes to another one, once; if some of its
    answer has been shown, it fails. Not thread-safe.
    """

    def __init__(
        self,
        router: Router,
        members: Members,
        calls: Calls,
        answers: Answers,
        outputs: Outputs,
        clock: Callable[[], float],
    ) -> None:
        self._router, self._members, self._calls = router, members, calls
        self._answers, self._outputs, self._clock = answers, outputs, clock
        self._flights: dict[str, Flight] = {}
        self._parked: dict[str, Flight] = {}  # without a replica
        self._lost: dict[str, Flight] = {}  # of which the client has been told

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    @property
    def parked(self) -> int:
        """Requests that wait for a replica."""
        return len(self._parked)

    # -- what the client wants ---------------------------------------------------------------

    def add(
        self, number: int | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begins a request, by one of the calls `ADDING`."""
        flight = Flight(number, method, args, kwargs)
        flight.begin()
        self._flights[flight.name] = flight
        self._send(flight)

    def again(self, name: str) -> None:
        """Runs a request again of which the client was told that it is lost.

        Nothing happens if it was aborted since: one thread of the client may do that while another
        one, which has just read of the loss, asks for this.
        """
        flight = self._lost.pop(name, None)
        if flight is None:
            return
        self._flights[flight.name] = flight
        flight.begin()
        flight.moved = True
        self._send(flight)

    def abort(self, name: str, index: int | None = None) -> None:
        """Ends a request, or one of its sequences; if it is not there, nothing happens."""
        flight = self._flights.get(name)
        if index is not None:
            # Of a request that is to run again, the client asks this for outputs that are void.
            if flight is not None and flight.replica is not None and index not in flight.ended:
                flight.replica.send((None, "abort", (name, index), {}))
                self._note_end(flight, index)
            return
        self._lost.pop(name, None)
        if flight is None:
            return
        if flight.replica is not None:
            flight.replica.send((None, "abort", (name,), {}))
        self._end(flight)

    # -- what replicas say -------------------------------------------------------------------

    def take_rows(self, replica: Replica, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Takes rows of outputs; returns those that are for the client."""
        kept = []
        for row in rows:
            flight = self._flights.get(row[0])
            if flight is None or flight.replica is not replica:
                continue
            kept.append(row)
            if not flight.began:
                flight.began = True
                self._router.began(flight.name)
            if is_short(row):
                continue
            output = step_output(row)
            if output.num_results is not None:
                flight.results = output.num_results
            if output.finish_reason is not None:
                self._note_end(flight, output.index)
        return kept

    def take_verdict(self, flight: Flight, replica: Replica, failed: bool, result: Any) -> None:
        """Takes whether a replica has accepted a request."""
        if flight.replica is not replica or self._flights.get(flight.name) is not flight:
            return
        if failed and isinstance(result, QueueFull):
            flight.full.add(replica)
            if any(each not in flight.full for each in self._members.taking):
                self._router.end(flight.name)
                replica.flights.discard(flight.name)
                self._send(flight)
                self._members.check_emptied(replica)
                return
        number, flight.number = flight.number, None
        if failed:
            self._end(flight)
            if number is None:  # the client believes that it runs: a replica before had taken it
                self._outputs.put(Lost(flight.name, str(result)))
                return
        self._answers.answer(number, failed, result)

    # -- replicas that come and go -----------------------------------------------------------

    def send_parked(self) -> None:
        """Sends what waits for a replica, as one has come."""
        for flight in list(self._parked.values()):
            self._send(flight)

    def leave(self, replica: Replica, reason: str) -> None:
        """Sends what a replica that ended had not answered to others; the client hears of the rest.

        `reason` says why it ended.
        """
        for name in sorted(replica.flights):
            flight = self._flights.get(name)
            if flight is None:
                continue
            flight.replica, flight.full = None, set()
            if not flight.began and not flight.moved:
                flight.moved = True
                self._send(flight)
            else:
                self._lose(flight, reason)
        replica.flights.clear()

    def check_patience(self, now: float) -> None:
        """Fails requests that have waited for a replica for too long."""
        for flight in [f for f in self._parked.values() if now - f.since > PATIENCE]:
            self._lose(flight, f"no replica took requests for {PATIENCE:.0f} s")

    # -- one request -------------------------------------------------------------------------

    def _send(self, flight: Flight) -> None:
        """Sends a request to the replica that the router chooses; without one it waits."""
        tokens, more = flight.args[1], flight.kwargs
        place, priority = place_of(more), more.get("priority", 0)
        full = {each.number for each in flight.full if each in self._members}
        choice = self._router.choose(tokens, place, priority=priority, without=full)
        if choice is None:
            if flight.name not in self._parked:
                flight.replica, flight.since = None, self._clock()
                flight.full = set()
                self._parked[flight.name] = flight
            return
        self._parked.pop(flight.name, None)
        replica = flight.replica = self._members.by_number[choice.replica]
        self._router.send(flight.name, choice, tokens, place, priority=priority)
        replica.flights.add(flight.name)
        if choice.elsewhere > choice.hit:
            more = more | {"held_elsewhere": choice.elsewhere}
        self._calls.send(replica, flight, flight.method, flight.args, more)

    def _note_end(self, flight: Flight, index: int) -> None:
        flight.ended.add(index)
        if len(flight.ended) >= flight.results:
            self._end(flight)

    def _end(self, flight: Flight) -> None:
        self._flights.pop(flight.name, None)
        self._parked.pop(flight.name, None)
        self._router.end(flight.name)
        replica = flight.replica
        if replica is not None:
            replica.flights.discard(flight.name)
            self._members.check_emptied(replica)

    def _lose(self, flight: Flight, reason: str) -> None:
        """Fails a request, unless the client has it run again."""
        del self._flights[flight.name]
        self._parked.pop(flight.name, None)
        if flight.number is not None:
            number, flight.number = flight.number, None
            self._answers.answer(number, True, EngineStopped(reason))
            return
        if not flight.moved:
            self._lost[flight.name] = flight
        self._outputs.put(Lost(flight.name, reason, may_run_again=not flight.moved))
