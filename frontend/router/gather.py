"""Calls that concern every replica, and how their answers become one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice.frontend.errors import EngineStopped
from coppice.frontend.router.calls import Calls
from coppice.frontend.router.client_ends import Answers
from coppice.frontend.router.members import Members
from coppice.frontend.router.replica import Replica
from coppice.runtime.report.merged import merged_pins, merged_report, merged_stats
from coppice.runtime.report.snapshot import EngineStats, PinState

log = logging.getLogger(__name__)

GATHER_SECONDS = 10.0  # for the answers of all replicas
STATS_SECONDS = 3.0  # for their counts, which /metrics reports after 5 s, come what may


@dataclass(slots=True)
class Gathering:
    """The answers of one call, as they come.

    Attributes:
        number: of the client's call; None: nobody waits for the answer.
        waits: replicas that have not answered.
        deadline: until when they may.
    """

    number: int | None
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    waits: set[str]
    deadline: float
    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)

    def take(self, replica: str, failed: bool, result: Any) -> None:
        """Takes the answer of one replica."""
        if replica in self.waits:
            self.waits.discard(replica)
            (self.errors if failed else self.results)[replica] = result

    def answer(self, left: Sequence[EngineStats]) -> Any:
        """The one answer; `left`: the counts of replicas that are gone.

        Raises the error of a replica, and EngineStopped if none has answered.
        """
        if self.errors:
            raise min(self.errors.items())[1]
        if not self.results:
            raise EngineStopped("no replica has answered")
        if self.method == "stats":
            return merged_stats(self.results, left=left)
        if self.method == "cache_report":
            return merged_report(self.results, left=left)
        return COMBINED[self.method](list(self.results.values()))


def _first(results: list[Any]) -> Any:
    return results[0]


def _pin(results: list[PinState]) -> PinState:
    return merged_pins(results)[0]


def _pins(results: list[Sequence[PinState]]) -> tuple[PinState, ...]:
    return merged_pins(pin for pins in results for pin in pins)


#: By the name of the call.
COMBINED: Mapping[str, Callable[[list[Any]], Any]] = {
    "has_unfinished": any,
    "put_pin": _pin,
    "list_pins": _pins,
    "unpin": any,
    "load_lora": _first,
    "unload_lora": _first,
    "list_loras": _first,
    "reset_cache": _first,
    "sleep": _first,
    "wake_up": _first,
    "is_sleeping": all,
    "check": _first,
}

#: Calls that every replica gets.
GATHERED = {*COMBINED, "stats", "cache_report"}


@dataclass(slots=True)
class Kept:
    """What replicas have been told that one that joins must be told, too."""

    pins: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    adapters: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    asleep: tuple[Any, ...] | None = None

    def note(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a call that every replica has answered without an error."""
        call = (None, method, args, dict(kwargs))
        match method:
            case "put_pin":
                self.pins[args[0]] = call
            case "unpin":
                self.pins.pop(args[0], None)
            case "reset_cache":
                self.pins.clear()
            case "load_lora":
                self.adapters[args[0].lora_name] = call
            case "unload_lora":
                self.adapters.pop(args[0], None)
            case "sleep":
                self.asleep = call
            case "wake_up":
                self.asleep = None

    def undone(self, gathering: Gathering) -> tuple[Any, ...] | None:
        """What undoes a call that some replicas refused, for those that did not; None: nothing.

        All replicas are to be alike.
        """
        args = gathering.args
        match gathering.method:
            case "put_pin" if args[0] not in self.pins:
                return None, "unpin", (args[0],), {}
            case "load_lora":
                before = self.adapters.get(args[0].lora_name)
                if before is None:
                    return None, "unload_lora", (args[0].lora_name,), {}
                if gathering.kwargs.get("replace"):
                    return (*before[:3], {**before[3], "replace": True})
            case "sleep" if self.asleep is None:
                return None, "wake_up", (), {}
        return None

    def calls(self) -> list[tuple[Any, ...]]:
        """For a replica that joins."""
        last = [] if self.asleep is None else [self.asleep]
        return [*self.adapters.values(), *self.pins.values(), *last]


class Gatherings:
    """Asks every replica, and answers the client once all have answered. Not thread-safe.

    Attributes:
        kept: what one that joins must be told.
    """

    def __init__(
        self, members: Members, calls: Calls, answers: Answers, clock: Callable[[], float]
    ) -> None:
        self.kept = Kept()
        self._members, self._calls, self._answers, self._clock = members, calls, answers, clock
        self._left = list[EngineStats]()  # the counts of replicas that are gone

    def begin(
        self, number: int | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Sends a call to all replicas."""
        replicas = self._members.by_name
        deadline = self._clock() + (STATS_SECONDS if method == "stats" else GATHER_SECONDS)
        gathering = Gathering(number, method, args, kwargs, set(replicas), deadline)
        for replica in replicas.values():
            self._calls.send(replica, gathering, method, args, kwargs)
        self._check(gathering)

    def take(self, gathering: Gathering, replica: Replica, failed: bool, result: Any) -> None:
        """Takes the answer of one replica."""
        gathering.take(replica.name, failed, result)
        if isinstance(result, EngineStats):
            replica.stats = result
        self._check(gathering)

    def keep_counts(self, replica: Replica) -> None:
        """Keeps the counts of a replica that is gone, for later reports."""
        if replica.stats is not None:
            self._left = [merged_stats({}, [*self._left, replica.stats])]

    def do_without(self, gathering: Gathering, replica: Replica) -> None:
        """Waits no more for the answer of one replica."""
        gathering.waits.discard(replica.name)
        self._check(gathering)

    def check_deadlines(self, now: float) -> None:
        """Does without those that are late; what they counted last stays, so that no sum falls."""
        late = self._calls.drop(
            lambda _, waits: isinstance(waits, Gathering) and waits.deadline < now
        )
        for replica, gathering in late:
            assert isinstance(gathering, Gathering)
            log.warning("replica %s has not answered %s", replica.name, gathering.method)
            if gathering.method == "stats" and replica.stats is not None:
                gathering.take(replica.name, False, replica.stats)
            self.do_without(gathering, replica)

    def _check(self, gathering: Gathering) -> None:
        if gathering.waits:
            return
        try:
            result = gathering.answer(self._left)
        except Exception as error:
            undoing = self.kept.undone(gathering)
            for name in gathering.results if undoing is not None else ():
                if name in self._members.by_name:
                    self._members.by_name[name].send(undoing)
            self._answers.answer(gathering.number, True, error)
            return
        self.kept.note(gathering.method, gathering.args, gathering.kwargs)
        self._answers.answer(gathering.number, False, result)
