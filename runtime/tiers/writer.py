"""Stores pages in the background, in one thread, at a bounded share of its time."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.store import Store, TierFailed
from coppice.runtime.tiers.told import TiersTold

logger = logging.getLogger(__name__)

_REST_SECONDS = 10.0  # for which a tier that failed is not written to
_NICE = 10  # by which the thread is nicer than others: a tenth of the scheduler's weight


class Batch(NamedTuple):
    """Packed pages that are to be stored; `ready` waits until the device has copied them."""

    keys: list[PageKey]
    names: list[bytes]
    pages: torch.Tensor
    ready: Callable[[], None] | None


class Hits(NamedTuple):
    """Pages that were hit so many times where they are needed, with their names."""

    keys: list[PageKey]
    names: list[bytes]
    times: int


class Writer:
    """Writes batches to all tiers, in the order in which they came, and tells them of hits.

    After a write it pauses for as long as that took, so that reads and steps have at least half of
    the disk's and the memory's time; not when it is about to end. Its thread leaves the processor
    to those that compute, where both want it (Linux). What can't be stored is not tried
    again: `unstored` gets its names, and those of pages that a tier does not have any more.

    Attributes:
        share: of its time in which it writes.
    """

    share = 0.5

    def __init__(
        self,
        stores: Seq[Store],
        told: TiersTold,
        unstored: Callable[[bytes], None],
        most_bytes: int,
    ) -> None:
        """`unstored` is called by `poll`; at most `most_bytes` wait at any time."""
        self._stores, self._told, self._unstored = stores, told, unstored
        self._most = most_bytes
        self._batches: SimpleQueue[Batch | Hits | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, list[bytes]]] = SimpleQueue()  # bytes; unstored
        self._hurry = threading.Event()
        self._closed = False
        self._deadline = math.inf
        self._rested = [0.0 for _ in stores]
        self._waiting = 0  # bytes; changed by the engine's thread alone
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="coppice-tier-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._waiting

    def room(self) -> int:
        """Bytes that may be added now."""
        return max(0, self._most - self._waiting)

    def add(self, batch: Batch) -> None:
        """Has a batch written; its memory belongs to the writer from now on."""
        self._waiting += batch.pages.nbytes
        self._batches.put(batch)

    def tell(self, hits: Hits) -> None:
        """Has tiers told that pages were hit."""
        self._batches.put(hits)

    def poll(self) -> None:
        """Takes over what was done since the last call; a thread that died has a successor."""
        if not (self._thread.is_alive() or self._closed):
            logger.error("the thread that writes to tiers has ended; another one continues")
            self._start()
        while True:
            try:
                size, unstored = self._done.get_nowait()
            except Empty:
                return
            self._waiting -= size
            for name in unstored:
                self._unstored(name)

    def hurry(self, deadline: float) -> None:
        """Pauses no more, and writes nothing that is not begun by then (`time.monotonic`)."""
        self._deadline = deadline
        self._hurry.set()

    def close(self) -> None:
        """Ends the thread after what waits; call `hurry` before."""
        self._batches.put(None)
        self._thread.join()
        while not self._batches.empty():  # it has died before
            self._start()
            self._thread.join()
        self._closed = True
        self.poll()

    def _run(self) -> None:
        if sys.platform == "linux":
            thread = threading.get_native_id()
            with suppress(OSError):
                nice = min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
                os.setpriority(os.PRIO_PROCESS, thread, nice)
        while (task := self._batches.get()) is not None:
            start = time.perf_counter()
            tiers = range(len(self._stores))
            size, unstored = 0, list[bytes]()
            try:
                if isinstance(task, Hits):
                    if time.monotonic() < self._deadline:
                        unstored = [name for tier in tiers for name in self._tell(tier, task)]
                else:
                    size, unstored = task.pages.nbytes, task.names
                    if time.monotonic() < self._deadline and self._is_there(task):
                        unstored = [name for tier in tiers for name in self._write(tier, task)]
            finally:  # whatever ends this thread, `poll` knows what became of the task
                self._done.put((size, unstored))
            taken = time.perf_counter() - start
            del task
            self._hurry.wait(taken * (1 / self.share - 1))

    def _is_there(self, batch: Batch) -> bool:
        """Waits until the pages of a batch were copied; returns whether they were."""
        try:
            if batch.ready is not None:
                batch.ready()
        except Exception as error:  # the device has failed, or another rank: steps will tell
            logger.error("pages could not be copied to memory, and are not kept: %s", error)
            return False
        return True

    def _write(self, tier: int, batch: Batch) -> list[bytes]:
        """Writes a batch to one tier; returns the names of pages that it does not have then."""
        store, counts = self._stores[tier], self._told.tiers[self._stores[tier].name]
        start = time.perf_counter()
        with self._left_alone(tier) as awake:
            if awake:
                done = store.store(batch.keys, batch.pages.numpy())
                counts.written_pages += done.written
                counts.written_bytes += done.written * store.kept_bytes(batch.pages.shape[1])
                counts.write_seconds += time.perf_counter() - start
                return done.gone
        return batch.names

    def _tell(self, tier: int, hits: Hits) -> list[bytes]:
        """Tells a tier of hits; returns the names of pages that it does not have any more."""
        with self._left_alone(tier) as awake:
            if awake:
                names = dict(zip(hits.keys, hits.names, strict=True))
                return [names[key] for key in self._stores[tier].used_above(hits.keys, hits.times)]
        return []

    @contextmanager
    def _left_alone(self, tier: int) -> Iterator[bool]:
        """Gives whether a tier may be called; leaves one alone for a while that fails."""
        try:
            yield time.monotonic() >= self._rested[tier]
        except TierFailed as error:
            logger.warning("%s; it is left alone for %.0f s", error, _REST_SECONDS)
        except Exception:
            logger.exception("a tier could not be written to")
        else:
            return
        self._told.tiers[self._stores[tier].name].failures += 1
        self._rested[tier] = time.monotonic() + _REST_SECONDS
