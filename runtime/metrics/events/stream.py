"""What an engine tells other processes of its tree and its load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from coppice.radix import RadixTree
from coppice.radix.mirror.changes import attached
from coppice.runtime.metrics.events.load import Load

# Seconds between two reports of the load while it changes, and while it does not.
_SOON, _LATER = 0.1, 0.5


class Sink(Protocol):
    """Who gets a stream, such as a `Publisher`; its own thread does the work.

    `behind`: so much waits that more should be kept back. `broken`: something was lost, or somebody
    is new, so that all that the tree holds should be put.
    """

    @property
    def behind(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    def put(self, records: Sequence[tuple[Any, ...]], load: Load | None, /) -> None: ...
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
        """Has published what has changed since the last call; between two steps.

        `idle`: whether no request runs or waits, so that the next call may be far away.
        """
        anew = self.sink.broken
        if anew:
            self._load = None  # somebody may not know it
        load = self._due(idle or anew)
        if self.sink.behind:
            return  # the log bounds what waits
        records = self._log.drain()
        if anew:
            records = self._log.everything()
        if records or load is not None:
            self.sink.put(records, load)

    def _due(self, idle: bool) -> Load | None:
        """The load, if it is to be reported now."""
        now = time.monotonic()
        if self._measure is None or (now - self._measured < _SOON and not idle):
            return None
        load = self._measure()
        self._measured = now
        if self._load is not None and load[:4] == self._load[:4] and now - self._sent < _LATER:
            return None
        self._load, self._sent = load, now
        return load

    def move_to(self, tree: RadixTree) -> None:
        """Follows a new tree, which is empty."""
        self._tree.remove_listener(self._log)
        self.sink.put([()], None)
        self._tree, self._log = tree, attached(tree)

    def close(self) -> None:
        """Ends it; what waits is sent."""
        self._tree.remove_listener(self._log)
        self.sink.close()
