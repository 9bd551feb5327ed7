"""What an engine tells other processes of its tree and its load."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

from coppice.radix import RadixTree
from coppice.radix.mirror.changes import attached
from coppice.radix.mirror.records import EMPTY_TREE, Records
from coppice.runtime.metrics.events.load import Load

# Seconds between two reports of the load while it changes, and while it does not.
_SOON, _LATER = 0.1, 0.5


class Sink(Protocol):
    """Who gets a stream, such as a `Publisher`; its own thread does the work.

    `asks`: what was put is on its way, and more is wanted; a batch for each step would cost very
    short ones a few percent. `behind`: so much waits that more should be kept back; then it does
    not ask. `broken`: something was lost, or somebody is new, so that all that the tree holds
    should be put; then it asks.
    """

    @property
    def asks(self) -> bool: ...
    @property
    def behind(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    def put(self, records: Records, load: Load | None, /) -> None: ...
    def close(self) -> None: ...


class KvEvents:
    """Publishes what the tree of an engine stores and removes, and how busy the engine is."""

    def __init__(
        self, publisher: Sink, tree: RadixTree, measure: Callable[[], Load] | None
    ) -> None:
        """Takes over the publisher; `measure` gives the load, None: it is not reported."""
        self.sink, self._measure = publisher, measure
        self._load: Load | None = None  # as it was reported last
        self._measured = self._sent = 0.0
        self._tree, self._log = tree, attached(tree)

    def flush(self, *, idle: bool) -> None:
        """Has published what has changed lately; between two steps.

        `idle`: whether no request runs or waits, so that the next call may be far away. Else the
        changes wait until the sink asks for them.
        """
        # Most calls return here, and the others take a short way: beside a step of a few requests
        # each call of a function counts.
        sink = self.sink
        if not sink.asks and (not idle or sink.behind):
            return  # the log bounds what waits
        anew, load = sink.broken, None
        if self._measure is not None:
            if anew:
                self._load = None  # somebody may not know it
            load = self._due(self._measure, idle or anew)
        records = self._log.everything() if anew else self._log.drain()
        if records[0] or load is not None:
            sink.put(records, load)

    def _due(self, measure: Callable[[], Load], always: bool) -> Load | None:
        """The load, if it is to be reported now."""
        now = monotonic()
        if now - self._measured < _SOON and not always:
            return None
        load = measure()
        self._measured = now
        if self._load is not None and load[:4] == self._load[:4] and now - self._sent < _LATER:
            return None
        self._load, self._sent = load, now
        return load

    def move_to(self, tree: RadixTree) -> None:
        """Follows a new tree, which is empty."""
        self._tree.remove_listener(self._log)
        self.sink.put(EMPTY_TREE, None)
        self._tree, self._log = tree, attached(tree)

    def close(self) -> None:
        """Ends it; what waits is sent."""
        self._tree.remove_listener(self._log)
        if not self.sink.behind and (records := self._log.drain())[0]:
            self.sink.put(records, None)
        self.sink.close()
