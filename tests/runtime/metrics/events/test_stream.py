"""When an engine's changes and load are put, by a clock that the tests set."""

from __future__ import annotations

import pytest
from sequences import serve

from coppice.radix import PagePool, RadixTree
from coppice.radix.mirror.changes import Change, Cleared, Opened, Stored, Translator
from coppice.radix.mirror.records import Records
from coppice.runtime.metrics.events import stream as module
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.metrics.events.stream import KvEvents


class Sink:
    """Keeps what is put."""

    def __init__(self) -> None:
        self.asks = True
        self.behind = self.broken = self.closed = False
        self.batches: list[list[Change]] = []
        self.loads: list[Load | None] = []
        self._translator = Translator()

    def put(self, records: Records, load: Load | None) -> None:
        assert not self.closed
        self.batches.append(self._translator.translate(records))
        self.loads.append(load)
        self.broken = False

    def close(self) -> None:
        self.closed = True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_changes_wait_until_the_sink_asks_for_them() -> None:
    tree, sink = RadixTree(PagePool(64, 4)), Sink()
    events = KvEvents(sink, tree, None)
    serve(tree, [1, 2])
    events.flush(idle=False)
    assert sink.batches.pop() == [Opened(1, None), Stored(2, 1, 0, bytes([1, 0, 0, 0, 2, 0, 0, 0]))]
    sink.asks = False
    for token in range(3, 8):
        serve(tree, [token])
        events.flush(idle=False)
    assert not sink.batches
    sink.asks = True
    events.flush(idle=False)
    assert len(sink.batches.pop()) == 5


def test_what_an_engine_did_last_is_put_at_once() -> None:
    tree, sink = RadixTree(PagePool(64, 4)), Sink()
    sink.asks = False
    events = KvEvents(sink, tree, None)
    for token in range(3):
        serve(tree, [token])
        events.flush(idle=True)
    assert [len(each) for each in sink.batches] == [2, 1, 1]


def test_what_waits_is_put_at_the_end() -> None:
    tree, sink = RadixTree(PagePool(64, 4)), Sink()
    events = KvEvents(sink, tree, None)
    sink.asks = False
    serve(tree, [1])
    events.flush(idle=False)
    assert not sink.batches
    events.close()
    assert len(sink.batches.pop()) == 2
    assert sink.closed
    serve(tree, [2])
    events.flush(idle=True)  # it does not listen any more


def test_a_broken_sink_gets_all_that_the_tree_holds() -> None:
    tree, sink = RadixTree(PagePool(64, 4)), Sink()
    events = KvEvents(sink, tree, None)
    serve(tree, [1])
    events.flush(idle=True)
    sink.broken = True
    serve(tree, [2])
    events.flush(idle=True)
    assert sink.batches[1][0] == Cleared()
    assert sum(isinstance(each, Stored) for each in sink.batches[1]) == 2


def test_one_that_is_behind_gets_nothing_until_it_has_caught_up() -> None:
    tree, sink = RadixTree(PagePool(64, 4)), Sink()
    events = KvEvents(sink, tree, None)
    sink.asks, sink.behind = False, True
    serve(tree, [1])
    events.flush(idle=True)
    events.flush(idle=False)
    assert not sink.batches
    sink.asks, sink.behind = True, False
    events.flush(idle=False)
    assert len(sink.batches.pop()) == 2


def test_the_load_is_put_when_it_changes_and_now_and_then(clock: Clock) -> None:
    tree, sink = RadixTree(PagePool(64, 4)), Sink()
    load = Load(1, 2, 3, 4, 5.0, 6.0)
    events = KvEvents(sink, tree, lambda: load)
    for _ in range(100):
        clock.now += 0.01
        events.flush(idle=False)
    assert len(sink.loads) == 2
    load = Load(2, 2, 3, 4, 5.0, 6.0)
    for _ in range(11):
        clock.now += 0.01
        events.flush(idle=False)
    assert sink.loads[2:] == [load]
