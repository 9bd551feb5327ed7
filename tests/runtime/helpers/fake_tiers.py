"""Tiers that are memory, lie, fail and forget, and threads that work when a test says so."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np

from coppice.kernels.pages.transfers import PageTransfers
from coppice.radix.mirror.names import PageKey
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.engine.core import Engine
from coppice.runtime.schedule.step_times import StepTimes
from coppice.runtime.tiers.exchange import Tiers
from coppice.runtime.tiers.store import HotPage, Place, Store, Stored, TierFailed


class MemoryStore(Store):
    """Keeps pages in a dictionary.

    With `rng` it forgets pages, gives rows that are damaged, which it says, and fails, each from
    time to time.
    """

    name = "host"

    def __init__(self, rng: random.Random | None = None, name: str = "host") -> None:
        self.pages: dict[PageKey, np.ndarray] = {}
        self.rng = rng
        self.name = name  # type: ignore[misc]
        self.closed = False
        self.loaded = 0

    def _stumble(self) -> None:
        if self.rng is not None and self.rng.random() < 0.03:
            raise TierFailed("on purpose")

    def find(self, keys: Sequence[PageKey]) -> list[Place | None]:
        self._stumble()
        return [Place(key.length, key) if key in self.pages else None for key in keys]

    def find_longest(self, key: PageKey) -> Place | None:
        self._stumble()
        best = None
        for other in self.pages:
            if other.parent == key.parent:
                same = common_prefix(other.tokens, 0, key.tokens) // TOKEN_BYTES
                if same > (best.tokens if best else 0):
                    best = Place(same, other)
        return best

    def load(self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray) -> list[bool]:
        self._stumble()
        right = []
        for place, row in zip(places, out, strict=True):
            page = self.pages.get(place.at)
            if page is not None and self.rng is not None and self.rng.random() < 0.1:
                del self.pages[place.at]
                page = None
            row[:] = 255 if page is None else page
            right.append(page is not None)
            self.loaded += page is not None
        return right

    def store(self, keys: Sequence[PageKey], pages: np.ndarray) -> Stored:
        self._stumble()
        done = Stored()
        for key, page in zip(keys, pages, strict=True):
            if key in self.pages:
                done.known += 1
            else:
                self.pages[key] = page.copy()
                done.written += 1
        return done

    def hottest(self, roots: Collection[bytes], most: int) -> list[HotPage]:
        """In any order that gives each page after the one before it."""
        self._stumble()
        rng, found = self.rng or random.Random(1), list[HotPage]()
        names = dict.fromkeys(roots, -1)
        chains = {name: name for name in roots}
        waiting = [key for key in self.pages if key.parent in names]
        while waiting and len(found) < most:
            key = waiting.pop(rng.randrange(len(waiting)))
            root = chains[key.parent]
            found.append(HotPage(key, Place(key.length, key), root, names[key.parent]))
            names[key.name], chains[key.name] = len(found) - 1, root
            waiting += [each for each in self.pages if each.parent == key.name]
        return found

    @property
    def capacity(self) -> int | None:
        return None

    @property
    def used(self) -> int:
        return sum(page.nbytes for page in self.pages.values())

    def close(self) -> None:
        self.closed = True


class HandThreads:
    """Stands for a ThreadPoolExecutor: tasks wait until `work` does some of them, in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tasks: list[tuple[Future[None], Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, task: Callable[..., None], *arguments: Any) -> Future[None]:
        future: Future[None] = Future()
        self.tasks.append((future, task, arguments))
        return future

    def work(self, most: int | None = None) -> None:
        for _ in range(len(self.tasks) if most is None else most):
            if self.tasks:
                future, task, arguments = self.tasks.pop(self.rng.randrange(len(self.tasks)))
                if future.set_running_or_notify_cancel():
                    with suppress(SystemExit):  # as a thread ends with it and no other notices
                        task(*arguments)
                    future.set_result(None)

    def shutdown(self, **_: bool) -> None:
        self.tasks.clear()


def add_tiers(
    engine: Engine,
    stores: Sequence[Store],
    rng: random.Random,
    compute_seconds: Callable[[int, int], float | None] = lambda tokens, context: None,
    *,
    hand: bool = True,
    transfers: PageTransfers | None = None,
) -> HandThreads:
    """Gives an engine tiers; returns the threads that read, which the caller has work.

    Without `hand` they are real ones.
    """
    scheduler = engine.scheduler
    if transfers is None:
        transfers = engine.runner.use_transfers(2**28)
    engine.runner.transfers = transfers
    tiers = Tiers(
        stores,
        tree=engine.tree,
        transfers=transfers,
        copy=engine.runner.copy_pages,
        digest=b"fake",
        compute_seconds=compute_seconds,
        vocabulary=engine.model_config.vocab_size,
    )
    tiers._writer.share = 1.0
    tiers.marks = engine.adapters.named.marks
    threads = HandThreads(rng)
    if hand:
        for pools in (tiers.loads.finding.threads, tiers.loads.reading):
            for pool in pools:
                pool.shutdown()
            pools[:] = [threads] * len(pools)  # type: ignore[list-item]
        tiers._warming._threads = threads  # type: ignore[assignment]
        tiers.wait = lambda seconds: threads.work(1)  # type: ignore[method-assign]
    engine.tiers = engine._steps.tiers = tiers
    tiers.know(engine.intake.namespace(None))
    scheduler.use(tiers, scheduler.times or StepTimes(2.0))
    return threads


def written(engine: Engine) -> None:
    """Waits until all that was given to the writer is stored."""
    assert engine.tiers is not None
    writer = engine.tiers._writer
    while writer.waiting_bytes:
        writer.poll()
        time.sleep(0.0005)
