"""Calls that concern every replica, and how their answers become one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from coppice.frontend.errors import EngineStopped
from coppice.frontend.router.calls import Calls
from coppice.frontend.router.client_ends import Answers
from coppice.frontend.router.members import Members
from coppice.frontend.router.replica import Replica
from coppice.runtime.report.merged import merged_pins, merged_report, merged_stats
from coppice.runtime.report.snapshot import EngineStats, PinState
from coppice.runtime.requests.lora_request import LoRARequest

log = logging.getLogger(__name__)

GATHER_SECONDS = 10.0  # for the answers of all replicas
STATS_SECONDS = 3.0  # for their counts, which /metrics reports after 5 s, come what may
PIN_SECONDS = 1.5  # for those of the others once one has answered, where requests wait for it
_SOON, _LOOK = 15.0, 5.0  # before a pin's end replicas are asked whether it was used, so often

# Requests wait for these (cache_control), and another call may follow each: see `Gatherings.begin`.
_PINNING = ("put_pin", "unpin")
# What these change, `Kept` knows. A replica that joins before they are answered gets them, too.
_CHANGING = (*_PINNING, "load_lora", "unload_lora", "reset_cache", "sleep", "wake_up")


@dataclass(slots=True, eq=False)
class Gathering:
    """The answers of one call, as they come.

    Attributes:
        number: of the client's call; None: nobody waits for the answer.
        waits: replicas that have not answered.
        begun: when it was sent.
        serial: greater than those of all before.
        void: whether a later call, answered before, has undone it.
    """

    number: int | None
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    waits: set[str]
    begun: float
    serial: int
    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    void: bool = False

    @property
    def deadline(self) -> float:
        """Until when replicas may answer."""
        seconds = STATS_SECONDS if self.method == "stats" else GATHER_SECONDS
        if self.method in _PINNING and (self.results or self.errors):
            seconds = PIN_SECONDS
        return self.begun + seconds

    def take(self, replica: str, failed: bool, result: Any) -> None:
        """Takes the answer of one replica."""
        if replica in self.waits:
            self.waits.discard(replica)
            (self.errors if failed else self.results)[replica] = result

    def forget(self, replica: str) -> None:
        """Forgets a replica that is gone, and its answer: its counts are kept elsewhere."""
        self.waits.discard(replica)
        self.results.pop(replica, None)
        self.errors.pop(replica, None)

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


def _adapters(results: list[list[LoRARequest]]) -> list[LoRARequest]:
    """Those that any replica has: one that was started again has none while no ingress is there."""
    return list({each.lora_name: each for listed in results for each in listed}.values())


#: By the name of the call.
COMBINED: Mapping[str, Callable[[list[Any]], Any]] = {
    "has_unfinished": any,
    "put_pin": _pin,
    "list_pins": _pins,
    "unpin": any,
    "load_lora": _first,
    "unload_lora": _first,
    "list_loras": _adapters,
    "reset_cache": _first,
    "sleep": _first,
    "wake_up": _first,
    "is_sleeping": all,
    "check": _first,
}

#: Calls that every replica gets.
GATHERED = {*COMBINED, "stats", "cache_report"}


@dataclass(slots=True)
class _Pin:
    """A pin that replicas have.

    Attributes:
        call: what makes it.
        serial: that of the call.
        ends: when its TTL ends, as far as is known here: replicas notice each use, and say so only
            when they are asked for pins or a report. It is forgotten once they don't list it any
            more. None: never.
    """

    call: tuple[Any, ...]
    serial: int
    ends: float | None

    def ended(self, now: float) -> bool:
        """Whether its TTL has ended, as far as is known here."""
        return self.ends is not None and self.ends <= now

    def called(self, now: float) -> tuple[Any, ...]:
        """What makes it on another replica, for the time that is left."""
        if self.ends is None:
            return self.call
        return (*self.call[:3], {**self.call[3], "ttl": self.ends - now})


@dataclass(slots=True)
class Kept:
    """What replicas have been told that one that joins must be told, too.

    `now` is the time in seconds.
    """

    pins: dict[str, _Pin] = field(default_factory=dict)
    adapters: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    asleep: tuple[Any, ...] | None = None

    def note(self, gathering: Gathering, result: Any, now: float) -> None:
        """Notes the answer, which is no error, of a call to every replica."""
        args, kwargs = gathering.args, gathering.kwargs
        call = (None, gathering.method, args, kwargs)
        match gathering.method:
            case "put_pin":
                ttl = kwargs.get("ttl")
                there = self.pins.get(args[0])
                if there is None or there.serial < gathering.serial:
                    ends = None if ttl is None else now + ttl
                    self.pins[args[0]] = _Pin(call, gathering.serial, ends)
            case "unpin":
                self._forget(args[:1], gathering.serial)
            case "list_pins":
                self._renew(result, now)
            case "cache_report":
                self._renew(result.pins, now)
            case "reset_cache":
                self._forget(list(self.pins), gathering.serial)
            case "load_lora":
                name = args[0].lora_name
                self.adapters[name] = call
                if kwargs.get("replace"):  # with the same files replicas keep its pins
                    for pin in self._pins_of(name).values():
                        pin.ends = now
                        pin.call = (*pin.call[:3], {**pin.call[3], "lora_request": args[0]})
            case "list_loras":
                for asked in result:  # they are not unloaded where they can't be loaded again
                    self.adapters.setdefault(
                        asked.lora_name, (None, "load_lora", (asked,), {"replace": True})
                    )
            case "unload_lora":
                self._unload(args[0])
            case "sleep":
                self.asleep = call
            case "wake_up":
                self.asleep = None

    def doubts(self, now: float) -> bool:
        """Whether replicas should be asked for pins: the TTL of one seems to end."""
        return any(pin.ends is not None and pin.ends < now + _SOON for pin in self.pins.values())

    def undone(self, gathering: Gathering, now: float) -> list[tuple[Any, ...]]:
        """What undoes a call that some replicas have refused, for those that have not.

        All replicas are to be alike.
        """
        args = gathering.args
        match gathering.method:
            case "put_pin":
                there = self.pins.get(args[0])
                if there is None or there.ended(now):
                    self.pins.pop(args[0], None)
                    return [(None, "unpin", (args[0],), {})]
            case "unload_lora":  # refused where it is not there
                self._unload(args[0])
            case "load_lora":
                before = self.adapters.get(args[0].lora_name)
                if before is None:
                    return [(None, "unload_lora", (args[0].lora_name,), {})]
                if gathering.kwargs.get("replace"):
                    return [(*before[:3], {**before[3], "replace": True})]
            case "reset_cache":
                return self._pin_calls(now)
            case "sleep" if self.asleep is None:
                return [(None, "wake_up", (), {})]
        return []

    def calls(self, now: float) -> list[tuple[Any, ...]]:
        """For a replica that joins."""
        last = [] if self.asleep is None else [self.asleep]
        return [*self.adapters.values(), *self._pin_calls(now), *last]

    def _pin_calls(self, now: float) -> list[tuple[Any, ...]]:
        return [pin.called(now) for pin in self.pins.values() if not pin.ended(now)]

    def _forget(self, names: Iterable[str], serial: int) -> None:
        """Forgets pins that were made before the call with this serial, which ends them."""
        for name in names:
            pin = self.pins.get(name)
            if pin is not None and pin.serial < serial:
                del self.pins[name]

    def _unload(self, adapter: str) -> None:
        self.adapters.pop(adapter, None)
        for name in self._pins_of(adapter):
            del self.pins[name]

    def _renew(self, pins: Iterable[PinState], now: float) -> None:
        """Takes over how long pins have left, which is longer if they were used."""
        left = {pin.name: pin.seconds_left for pin in pins}
        for name, pin in list(self.pins.items()):
            if name in left:
                seconds = left[name]
                pin.ends = None if seconds is None else now + seconds
            elif pin.ended(now):
                del self.pins[name]

    def _pins_of(self, adapter: str) -> dict[str, _Pin]:
        found = {}
        for name, pin in self.pins.items():
            lora = pin.call[3].get("lora_request")
            if lora is not None and lora.lora_name == adapter:
                found[name] = pin
        return found


class Gatherings:
    """Asks every replica, and answers the client once all have answered. Not thread-safe."""

    def __init__(
        self, members: Members, calls: Calls, answers: Answers, clock: Callable[[], float]
    ) -> None:
        self._members, self._calls, self._answers, self._clock = members, calls, answers, clock
        self._kept = Kept()
        self._serials = count()
        self._open: list[Gathering] = []  # that are not answered, the first one first
        self._left: list[EngineStats] = []  # the counts of replicas that are gone
        self._asked = -math.inf  # when replicas were asked for pins last

    def begin(
        self, number: int | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Sends a call to all replicas.

        Where requests wait for it, those that have not answered an earlier call in time get it and
        are not waited for, unless that is true of all.
        """
        waits = set(self._members.by_name)
        if method in _PINNING:
            late = {each.name for each in self._members.by_name.values() if each.late}
            waits = waits - late or waits
        gathering = Gathering(
            number, method, args, kwargs, waits, self._clock(), next(self._serials)
        )
        self._open.append(gathering)
        for replica in self._members.by_name.values():
            self._ask(gathering, replica)
        self._check(gathering)

    def take(self, gathering: Gathering, replica: Replica, failed: bool, result: Any) -> None:
        """Takes the answer of one replica."""
        gathering.take(replica.name, failed, result)
        if isinstance(result, EngineStats):
            replica.stats = result
        self._check(gathering)

    def join(self, replica: Replica) -> None:
        """Tells a replica that joins what others were told, and what they have not answered yet."""
        for call in self._kept.calls(self._clock()):
            replica.send(call)
        for gathering in self._open:
            if gathering.method in _CHANGING and not gathering.void:
                gathering.waits.add(replica.name)
                self._ask(gathering, replica)

    def leave(self, replica: Replica) -> None:
        """Does without a replica that is gone, whose counts are kept for later reports."""
        if replica.stats is not None:
            try:
                self._left = [merged_stats({}, [*self._left, replica.stats])]
            except Exception:  # no report is worth the thread of the hub, which calls this
                log.exception("what replica %s has counted can't be kept", replica.name)
        for gathering in list(self._open):
            gathering.forget(replica.name)
            self._check(gathering)

    def check_deadlines(self, now: float) -> None:
        """Does without those that are late; what they counted last stays, so that no sum falls."""
        late = self._calls.drop(
            lambda _, waits: isinstance(waits, Gathering) and waits.deadline < now
        )
        for replica, gathering in late:
            assert isinstance(gathering, Gathering)
            log.warning("replica %s has not answered %s", replica.name, gathering.method)
            replica.late = True
            if gathering.method == "stats" and replica.stats is not None:
                gathering.take(replica.name, False, replica.stats)
            gathering.waits.discard(replica.name)
            self._check(gathering)
        if self._members.by_name and now - self._asked >= _LOOK and self._kept.doubts(now):
            self._asked = now
            self.begin(None, "list_pins", (), {})

    def _ask(self, gathering: Gathering, replica: Replica) -> None:
        waits = gathering if replica.name in gathering.waits else None
        self._calls.send(replica, waits, gathering.method, gathering.args, gathering.kwargs)

    def _check(self, gathering: Gathering) -> None:
        """Answers the client if all have answered; undoes what only some have done."""
        if gathering.waits:
            return
        place = self._open.index(gathering)
        del self._open[place]
        try:
            result = gathering.answer(self._left)
        except Exception as error:
            undoing = self._kept.undone(gathering, self._clock())
            for replica in self._members.by_name.values():
                if replica.name not in gathering.errors:  # it has done it, or is late and will
                    for call in undoing:
                        replica.send(call)
            self._answers.answer(gathering.number, True, error)
            return
        for earlier in self._open[:place] if gathering.method in ("unpin", "reset_cache") else ():
            named = gathering.args[:1] in ((), earlier.args[:1])
            earlier.void |= earlier.method == "put_pin" and named
        if not gathering.void:
            self._kept.note(gathering, result, self._clock())
        self._answers.answer(gathering.number, False, result)
