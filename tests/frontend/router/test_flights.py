"""When a request has ended, and where it is tried: replicas that only note what they are sent."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from coppice.frontend.router.calls import Calls
from coppice.frontend.router.choosing.policy import Router
from coppice.frontend.router.client_ends import Answers, Outputs
from coppice.frontend.router.flights import Flights
from coppice.frontend.router.members import Members
from coppice.runtime.process.messages import Lost, Ready, step_row
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.pooling_recipe import Recipe
from coppice.runtime.requests.request import QueueFull, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams

PROMPT = array("i", range(1, 20))
TWO = SamplingParams(n=2, max_tokens=5)


class Noting:
    """A replica that notes what it is sent."""

    def __init__(self, name: str) -> None:
        self.name, self.number, self.draining = name, -1, False
        self.ready = Ready("", 100, 50, Recipe(True, "", ""), max_num_seqs=8)
        self.flights: set[str] = set()
        self.sent: list[Any] = []

    def send(self, item: Any) -> None:
        self.sent.append(item)


class Place:
    """Requests with such replicas, by their names."""

    def __init__(self, *names: str) -> None:
        def clock() -> float:
            return 0.0

        self.router = Router(clock)
        self.members = Members(self.router, clock)
        self.answers, self.calls = Answers(), Calls()
        self.outputs = Outputs(lambda item: None, lambda: None)
        self.flights = Flights(
            self.router, self.members, self.calls, self.answers, self.outputs, clock
        )
        self.replicas = {name: self.join(name) for name in names}

    def join(self, name: str) -> Any:
        replica: Any = Noting(name)
        self.members.add(replica)
        return replica

    def leave(self, replica: Any) -> None:
        self.members.remove(replica)
        self.calls.drop(lambda whose, _: whose is replica)
        self.flights.leave(replica, "it ended")

    def refuse(self) -> str:
        """Has the replica that was asked last say that its queue is full; returns its name."""
        ((replica, flight),) = self.calls.drop(lambda *_: True)
        refusal = QueueFull("its queue is full")
        self.flights.take_verdict(flight, replica, True, refusal)  # type: ignore[arg-type]
        return replica.name


def row(index: int, reason: str | None, **more: Any) -> tuple[Any, ...]:
    return step_row(StepOutput("r", index, (3,), reason, None, None, 19, 0, **more))


@pytest.mark.parametrize("row_first", [True, False])
def test_an_end_that_replica_and_client_report_is_one(row_first: bool) -> None:
    place = Place("a")
    replica, flights = place.replicas["a"], place.flights
    flights.add(1, "add_request", ("r", PROMPT, TWO), {})
    if not row_first:
        flights.abort("r", 0)
    assert flights.take_rows(replica, [row(0, "length")])
    if row_first:
        flights.abort("r", 0)
    assert len(flights) == 1, "the other sequence runs"
    flights.abort("r", 0)
    assert flights.take_rows(replica, [row(1, None)])
    assert flights.take_rows(replica, [row(1, "length")])
    assert not len(flights)
    assert not replica.flights


def test_a_search_that_fails_ends_with_its_last_result() -> None:
    place = Place("a")
    replica, flights = place.replicas["a"], place.flights
    flights.add(1, "add_beam_search", ("r", PROMPT, BeamSearchParams(3, max_tokens=5)), {})
    for index in range(3):
        assert len(flights) == 1
        assert flights.take_rows(replica, [row(index, "error")])
    assert not len(flights)


def test_a_search_may_find_fewer_results_than_were_wanted() -> None:
    place = Place("a")
    replica, flights = place.replicas["a"], place.flights
    flights.add(1, "add_beam_search", ("r", PROMPT, BeamSearchParams(3, max_tokens=5)), {})
    for index in range(2):
        assert len(flights) == 1
        assert flights.take_rows(replica, [row(index, "stop", num_results=2)])
    assert not len(flights)


def lost() -> Place:
    """Two replicas, of which one has left, after the first row of a request with two results."""
    place = Place("a", "b")
    flights = place.flights
    flights.add(1, "add_request", ("r", PROMPT, TWO), {})
    ((replica, flight),) = place.calls.drop(lambda *_: True)
    flights.take_verdict(flight, replica, False, None)  # type: ignore[arg-type]
    assert flights.take_rows(replica, [row(0, None)])
    place.leave(replica)
    return place


def test_what_a_client_ends_of_lost_outputs_does_not_end_the_next_attempt() -> None:
    place = lost()
    flights = place.flights
    assert place.outputs.receive() == [Lost("r", "it ended", may_run_again=True)]
    flights.abort("r", 0)  # sent before the client has read that
    flights.again("r")
    (other,) = place.members.by_name.values()
    assert flights.take_rows(other, [row(0, "length"), row(1, "length")])
    assert not len(flights)


def test_what_a_client_has_aborted_does_not_run_again() -> None:
    """The client's event loop aborts it before its reader asks for another attempt."""
    place = lost()
    flights = place.flights
    flights.abort("r")
    flights.again("r")
    assert not len(flights)
    (other,) = place.members.by_name.values()
    assert not other.sent
    assert not other.flights


def test_a_request_is_tried_at_every_replica_though_numbers_are_used_again() -> None:
    place = Place("a", "b", "c")
    place.flights.add(1, "add_request", ("r", PROMPT, TWO), {})
    tried = [place.refuse(), place.refuse()]
    place.leave(place.replicas[tried[0]])
    place.join("d")  # with the number of the one that has left
    tried += [place.refuse(), place.refuse()]
    assert sorted(tried) == ["a", "b", "c", "d"]
    (answer,) = place.answers.receive()
    assert (answer[0], answer[1], type(answer[2])) == (1, True, QueueFull)


def test_a_full_replica_leaves_while_others_are_tried() -> None:
    place = Place("a", "b", "c")
    place.flights.add(1, "add_request", ("r", PROMPT, TWO), {})
    tried = [place.refuse()]
    place.leave(place.replicas[tried[0]])
    tried += [place.refuse(), place.refuse()]
    assert sorted(tried) == ["a", "b", "c"]
    assert place.answers.wait(0), "the two that are left are full"


def test_a_replica_that_drains_is_empty_once_it_has_refused_its_last_request() -> None:
    place = Place("a", "b")
    place.flights.add(1, "add_request", ("r", PROMPT, TWO), {})
    (first,) = (each for each in place.members.by_name.values() if each.flights)
    emptied: list[str] = []
    place.members.drain(first.name, lambda: emptied.append(first.name))
    assert not emptied
    assert place.refuse() == first.name
    assert emptied == [first.name]
    (other,) = place.members.taking
    assert other.flights == {"r"}
