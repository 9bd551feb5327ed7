"""Calls that concern every replica, and how their answers become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice.frontend.errors import EngineStopped
from coppice.runtime.report.merged import merged_pins, merged_report, merged_stats
from coppice.runtime.report.snapshot import EngineStats, PinState


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
            case "load_lora" if args[0].lora_name not in self.adapters:
                return None, "unload_lora", (args[0].lora_name,), {}
            case "sleep" if self.asleep is None:
                return None, "wake_up", (), {}
        return None

    def calls(self) -> list[tuple[Any, ...]]:
        """For a replica that joins."""
        last = [] if self.asleep is None else [self.asleep]
        return [*self.adapters.values(), *self.pins.values(), *last]
