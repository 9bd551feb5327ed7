"""The thread that writes: what it could not store is told, and when it dies another one goes on."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pytest
import torch
from fake_tiers import MemoryStore
from tier_pages import PAGE_BYTES, numbered

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.store import Stored
from coppice.runtime.tiers.told import TierCounts, TiersTold
from coppice.runtime.tiers.writer import Batch, Hits, Writer


class Fragile(MemoryStore):
    """Ends the thread that calls it, as often as `deaths` says; drops pages, and forgets some."""

    def __init__(self) -> None:
        super().__init__()
        self.deaths = 0
        self.drops: list[bytes] = []
        self.told: list[tuple[int, int]] = []

    def store(self, keys, pages) -> Stored:
        if self.deaths:
            self.deaths -= 1
            raise SystemExit
        done = super().store(keys, pages)
        done.gone, self.drops = self.drops, []
        return done

    def used_above(self, keys, times: int) -> list[PageKey]:
        self.told.append((len(keys), times))
        return [key for key in keys if key not in self.pages]


def batch(keys: list[PageKey]) -> Batch:
    pages = torch.from_numpy(np.zeros((len(keys), PAGE_BYTES), np.uint8))
    return Batch(keys, [key.name for key in keys], pages, None)


@pytest.fixture
def parts():
    store, unstored = Fragile(), list[bytes]()
    writer = Writer([store], TiersTold({"host": TierCounts()}), unstored.append, 2**20)
    writer.share = 1.0
    yield store, writer, unstored
    writer.hurry(time.monotonic() + 60)
    writer.close()
    assert writer.waiting_bytes == 0


def written(writer: Writer) -> None:
    while writer.waiting_bytes:
        writer.poll()
        time.sleep(0.001)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_has_a_successor(parts):
    store, writer, unstored = parts
    keys = numbered(9)
    for deaths in (1, 2):
        store.deaths = deaths
        for begin in range(0, 9, 3):
            writer.add(batch(keys[begin : begin + 3]))
        written(writer)
        lost, unstored[:] = list(unstored), []
        assert lost == [key.name for key in keys[: 3 * deaths]], "these are not kept"
    assert set(store.pages) == set(keys[3:])
    assert writer.room() == 2**20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_at_the_end_has_one_as_well(parts):
    store, writer, _ = parts
    store.deaths = 1
    for key in numbered(3):
        writer.add(batch([key]))
    writer.hurry(time.monotonic() + 60)
    writer.close()
    assert len(store.pages) == 2
    assert writer.waiting_bytes == 0


def test_what_a_tier_gave_up_may_be_written_again(parts):
    store, writer, unstored = parts
    keys = numbered(4)
    store.drops = [keys[1].name]
    writer.add(batch(keys[:3]))
    written(writer)
    assert unstored == [keys[1].name]
    writer.tell(Hits(keys, [key.name for key in keys], 7))
    while len(unstored) < 2:
        writer.poll()
    assert unstored[1:] == [keys[3].name], "it does not have it"
    assert store.told == [(4, 7)]


@pytest.mark.skipif(sys.platform != "linux", reason="threads of other systems have no niceness")
def test_its_thread_leaves_the_processor_to_those_that_compute(parts):
    store, writer, _ = parts
    nice = []
    store.used_above = lambda keys, times: nice.append(priority()) or []
    keys = numbered(2)
    writer.tell(Hits(keys, [key.name for key in keys], 1))
    while not nice:
        time.sleep(0.001)
    assert nice == [min(19, priority() + 10)]


def priority() -> int:
    """The niceness of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_no_hits_are_told_after_the_deadline(parts):
    store, writer, _ = parts
    writer.hurry(time.monotonic() - 1)
    keys = numbered(2)
    writer.tell(Hits(keys, [key.name for key in keys], 1))
    writer.close()
    assert not store.told
