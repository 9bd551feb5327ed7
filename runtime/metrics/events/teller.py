"""Tells those who are connected to an engine what its tree holds and how busy it is."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from coppice.radix.mirror.changes import Change, Translator
from coppice.radix.mirror.records import Records, begin_anew
from coppice.runtime.metrics.events.load import Load

logger = logging.getLogger(__name__)

_WAITING = 10_000  # batches
# Seconds between two looks for changes, longer the longer there are none, as in `publisher`.
_PAUSE, _LONGEST_PAUSE = 0.005, 0.05


_Batch: TypeAlias = tuple[Records, Load | None]
Tell: TypeAlias = Callable[[list[Change], Load | None], None]


@dataclass(frozen=True, slots=True)
class _Listener:
    """One that comes, or leaves: in the queue, so that neither overtakes the other."""

    tell: Tell
    leaves: bool = False


class Teller:
    """Gives the changes of one tree to any number of listeners, in a thread of its own."""

    def __init__(self) -> None:
        self._queue: deque[_Batch | _Listener] = deque()
        self._translator = Translator()
        self._listeners: list[Tell] = []
        self._new: list[Tell] = []  # have not been told anything yet
        self._somebody_new = self._lost = False
        #: Whether what was put is told, and more is wanted.
        self.asks = True
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coppice-teller", daemon=True)
        self._thread.start()

    @property
    def behind(self) -> bool:
        """Whether so much waits that more should be kept back."""
        return len(self._queue) > _WAITING

    @property
    def broken(self) -> bool:
        """Whether all that the tree holds is to be put: something was lost, or somebody is new."""
        return self._somebody_new or self._lost

    def put(self, records: Records, load: Load | None) -> None:
        """Has the records of a `TreeLog`, in order, and a load told; from the engine's thread."""
        self.asks = False
        if self._somebody_new and begin_anew(records):
            self._somebody_new = False
        self._queue.append((records, load))

    def add(self, tell: Tell) -> None:
        """Has `tell` called in the thread from now on; from the engine's thread.

        The first changes that it gets are `Cleared` and all that the tree holds; the others get
        them, too.
        """
        self._queue.append(_Listener(tell))
        self._somebody_new = self.asks = True

    def remove(self, tell: Tell) -> None:
        """Ends that, soon; from any thread."""
        self._drop(tell)
        self._queue.append(_Listener(tell, leaves=True))  # it may be in the queue itself

    def close(self) -> None:
        """Tells what waits, and ends."""
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        pause, ending = _PAUSE, False
        while not ending:
            ending = self._closing.wait(pause)  # then what has come before is still told
            pause = min(2 * pause, _LONGEST_PAUSE)
            while self._queue:
                pause = _PAUSE
                item = self._queue.popleft()
                if isinstance(item, _Listener):
                    if item.leaves:
                        self._drop(item.tell)
                    else:
                        self._new.append(item.tell)
                    continue
                try:
                    self._tell(*item)
                except Exception:
                    logger.exception("changes of the cache were lost; all are told again")
                    self._lost = True
            self.asks = True

    def _drop(self, tell: Tell) -> None:
        for listeners in (self._listeners, self._new):
            with suppress(ValueError):
                listeners.remove(tell)

    def _tell(self, records: Records, load: Load | None) -> None:
        changes: list[Change] = []
        if begin_anew(records):
            self._lost = False
            self._listeners += self._new
            self._new = []
        if not self._lost:  # else they follow what was lost
            changes = self._translator.translate(records)
        if changes or load is not None:
            for tell in list(self._listeners):
                tell(changes, load)
