"""Which replicas there are, as Ray Serve tells the process of the ingress."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Told the names of all replicas that take requests, whenever they change, in any thread.
Watch = Callable[[frozenset[str]], None]


class Membership:
    """The replicas of one deployment, as this process knows them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()
        self._watch: Watch | None = None

    def watch(self, watch: Watch) -> None:
        """Has `watch` told of them now and whenever they change."""
        with self._lock:
            self._watch, names = watch, self._names
        watch(names)

    def changed(self, names: frozenset[str]) -> None:
        """Takes them."""
        with self._lock:
            self._names, watch = names, self._watch
        if watch is not None:
            watch(names)


#: Of this process, in which there is one handle of the replicas.
MEMBERSHIP = Membership()
