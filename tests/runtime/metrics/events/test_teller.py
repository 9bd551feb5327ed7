"""Whoever listens to an engine's tree, from whenever on, has a copy that agrees with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from coppice.radix.mirror.changes import Change, Cleared, attached
from coppice.radix.mirror.copy import TreeCopy
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.metrics.events.stream import KvEvents
from coppice.runtime.metrics.events.teller import Teller
from tests.radix.mirror.test_copy import paths
from tests.radix.test_fuzz import Fuzz


class Listener:
    """Has a copy of the tree, made of what it is told."""

    def __init__(self) -> None:
        self.copy = TreeCopy()
        self.changes = 0
        self.loads: list[Load] = []

    def tell(self, changes: list[Change], load: Load | None) -> None:
        if not self.changes and changes:
            assert changes[0] == Cleared()
        self.changes += len(changes)
        for change in changes:
            self.copy.apply(change)
        if load is not None:
            self.loads.append(load)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_listeners_come_and_go_while_the_tree_changes() -> None:
    fuzz = Fuzz("lru", 4, seed=5)
    for _ in range(40):
        fuzz.step()
    teller = Teller()
    stream = KvEvents(teller, fuzz.tree, lambda: Load(1, 2, 3, 4, 5.0, 6.0))
    listeners: list[Listener] = []
    gone: list[tuple[Listener, int]] = []
    for turn in range(60):
        for _ in range(20):
            fuzz.step()
            stream.flush(idle=True)
        if turn % 6 == 0:
            listeners.append(Listener())
            teller.add(listeners[-1].tell)
        if turn % 10 == 9:
            leaves = listeners.pop(0)
            teller.remove(leaves.tell)
            gone.append((leaves, leaves.changes))
        stream.flush(idle=True)
        if turn % 5 == 0:
            until(lambda: not teller._queue)
            for each in listeners:
                until(lambda each=each: set(each.copy) == paths(fuzz.tree))  # type: ignore[misc]
    assert listeners
    assert all(each.loads[-1].waiting_requests == 1 for each in listeners)
    for leaves, changes in gone:
        assert leaves.changes <= changes + 100, "it was told no more, but for what was on its way"
    stream.close()


def test_an_error_of_the_thread_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fuzz = Fuzz("lru", 4, seed=6)
    teller, listener = Teller(), Listener()
    stream = KvEvents(teller, fuzz.tree, None)  # type: ignore[arg-type]
    teller.add(listener.tell)
    stream.flush(idle=True)
    translate = teller._translator.translate
    for turn in range(30):
        fuzz.step()
        if turn == 10:
            teller._translator.translate = lambda records: translate((b"odd", [], []))  # type: ignore
            with caplog.at_level(logging.ERROR):
                while not teller.broken:
                    fuzz.step()
                    stream.flush(idle=True)
                    time.sleep(0.01)
            teller._translator.translate = translate  # type: ignore[method-assign]
        stream.flush(idle=True)
    until(lambda: not teller.broken and set(listener.copy) == paths(fuzz.tree))
    assert "all are told again" in caplog.text
    stream.close()


def test_it_keeps_back_what_is_too_much() -> None:
    fuzz = Fuzz("lru", 4, seed=7)
    log = attached(fuzz.tree)
    teller = Teller()
    teller._closing.set()
    teller._thread.join()
    for _ in range(10_001):
        teller.put(log.drain(), None)
    assert teller.behind
