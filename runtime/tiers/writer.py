"""Stores pages in the background, in one thread, at a bounded share of its time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.store import Store, TierFailed
from coppice.runtime.tiers.told import TiersTold

logger = logging.getLogger(__name__)

_REST_SECONDS = 10.0  # for which a tier that failed is not written to


class Batch(NamedTuple):
    """Packed pages that are to be stored; `ready` waits until the device has copied them."""

    keys: list[PageKey]
    names: list[bytes]
    pages: torch.Tensor
    ready: Callable[[], None] | None


class Writer:
    """Writes batches to all tiers, in the order in which they came.

    After a write it pauses for as long as that took, so that reads and steps have at least half of
    the disk's and the memory's time; not when it is about to end. What can't be stored is not tried
    again: `unstored` gets its names.

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
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Batch, list[str | None]]] = SimpleQueue()
        self._hurry = threading.Event()
        self._deadline = math.inf
        self._rested = [0.0 for _ in stores]
        self._waiting = 0  # bytes; changed by the engine's thread alone
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

    def poll(self) -> None:
        """Takes over what was done since the last call."""
        while True:
            try:
                batch, failed = self._done.get_nowait()
            except Empty:
                return
            self._waiting -= batch.pages.nbytes
            if any(each is not None for each in failed):
                for name in batch.names:
                    self._unstored(name)

    def hurry(self, deadline: float) -> None:
        """Pauses no more, and writes nothing that is not begun by then (`time.monotonic`)."""
        self._deadline = deadline
        self._hurry.set()

    def close(self) -> None:
        """Ends the thread after what waits; call `hurry` before."""
        self._batches.put(None)
        self._thread.join()
        self.poll()

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            start = time.perf_counter()
            failed: list[str | None] = ["it ends"]
            if time.monotonic() < self._deadline:
                if batch.ready is not None:
                    batch.ready()
                failed = [self._write(tier, batch) for tier in range(len(self._stores))]
            self._done.put((batch, failed))
            taken = time.perf_counter() - start
            del batch
            self._hurry.wait(taken * (1 / self.share - 1))

    def _write(self, tier: int, batch: Batch) -> str | None:
        """Writes a batch to one tier; returns why it could not, or None."""
        store = self._stores[tier]
        if time.monotonic() < self._rested[tier]:
            return "it rests"
        counts = self._told.tiers[store.name]
        start = time.perf_counter()
        try:
            done = store.store(batch.keys, batch.pages.numpy())
        except TierFailed as error:
            logger.warning("%s; it is left alone for %.0f s", error, _REST_SECONDS)
        except Exception:
            logger.exception("pages could not be stored")
        else:
            counts.written_pages += done.written
            counts.written_bytes += done.written * store.kept_bytes(batch.pages.shape[1])
            counts.write_seconds += time.perf_counter() - start
            return None
        counts.failures += 1
        self._rested[tier] = time.monotonic() + _REST_SECONDS
        return "it failed"
