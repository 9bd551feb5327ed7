"""Who calls an engine: the process that started it, and others that connect to it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coppice.radix.mirror.changes import Change
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.process.channel import Channel
from coppice.runtime.process.messages import Told, step_row
from coppice.runtime.requests.request import StepOutput

logger = logging.getLogger(__name__)

#: Calls whose first argument is the name of a request.
_NAMING = frozenset({"add_request", "add_pooling", "add_beam_search", "abort"})
#: Calls that leave something to the caller, which nobody would get who has gone.
_LEAVING = (_NAMING - {"abort"}) | {"subscribe"}
#: Messages that may wait for a caller before it counts as one that does not read.
_MOST_WAITING = 20_000


class Caller:
    """One of them. Requests of a caller have `prefix` before their names within the engine.

    Attributes:
        channel: brings its calls, and takes the outputs of its requests.
        answers: takes the answers of its calls.
        name: as it has introduced itself; empty before.
    """

    name = ""

    def __init__(self, channel: Channel, answers: Channel, prefix: str = "") -> None:
        self.channel, self.answers, self.prefix = channel, answers, prefix
        self._cut_off = False

    def within(self, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of its call, with names as the engine knows them."""
        if self.prefix and method in _NAMING and args:
            return (f"{self.prefix}{args[0]}", *args[1:])
        return args

    def tell(self, changes: list[Change], load: Load | None) -> None:
        """Sends it what has changed; from any thread."""
        self.send(Told(changes, load))

    def send(self, item: Any) -> None:
        """Sends it something by its channel, or ends that if it does not read."""
        if self.channel.waiting <= _MOST_WAITING:
            self.channel.send(item)
        elif not self._cut_off:
            self._cut_off = True
            logger.error("a caller does not read what the engine sends it; it is cut off")
            self.channel.cut()


class Callers:
    """All who call one engine. The engine's thread uses it, but for `parent`."""

    def __init__(self, parent: Caller) -> None:
        self.parent = parent
        self._others: dict[str, Caller] = {}  # by prefix
        self._numbers = 0

    def add(self, channel: Channel) -> Caller:
        """Another caller, whose answers come by the same channel as its outputs."""
        self._numbers += 1
        caller = Caller(channel, channel, f"{self._numbers}/")
        self._others[caller.prefix] = caller
        return caller

    def in_vain(self, caller: Caller, method: str) -> bool:
        """Whether a call would leave something to one that has gone."""
        gone = caller is not self.parent and caller.prefix not in self._others
        return gone and method in _LEAVING

    @property
    def names(self) -> list[str]:
        """Those that are connected and have introduced themselves."""
        return [each.name for each in self._others.values() if each.name]

    def remove(self, caller: Caller, abort: Callable[[str], Any], names: Iterable[str]) -> None:
        """Ends one that has gone, and those of the requests `names` that are its."""
        if self._others.pop(caller.prefix, None) is not None:
            for name in names:
                if name.startswith(caller.prefix):
                    abort(name)

    def send(self, outputs: Sequence[StepOutput]) -> None:
        """Sends each output to the one whose request it is."""
        rows = [step_row(output) for output in outputs]
        if not self._others:
            self.parent.channel.send(rows)
            return
        parts: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for row in rows:
            prefix, slash, name = row[0].partition("/")
            if slash and prefix + slash in self._others:
                parts[prefix + slash].append((name, *row[1:]))
            else:
                parts[""].append(row)
        for prefix, part in parts.items():
            self._others.get(prefix, self.parent).send(part)

    def close(self) -> None:
        """Closes all channels, those of the parent last."""
        for caller in self._others.values():
            caller.channel.close()
        self.parent.answers.close()
        self.parent.channel.close()
