"""A tier whose calls fail, kill the thread that makes them, and find the store opened anew."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.store import HotPage, Place, Store, Stored, TierFailed


class Killed(SystemExit):
    """What ends a thread, and nothing else that notices."""


class UnsteadyStore(Store):
    """Calls another store, which `opened` opens.

    From time to time a call fails before it has done anything or after it has done all, in a way
    that stores have or in one that ends its thread; and the store is left as it is, as by a process
    that is killed, and opened anew.

    Attributes:
        operations: pages that were asked for, found, loaded, stored or counted.
        kills, reopenings: how often that was done.
    """

    def __init__(
        self, opened: Callable[[], Store], left: Callable[[Store], None], rng: random.Random
    ) -> None:
        """`left` ends a store as the end of its process does."""
        self._opened, self._left, self._rng = opened, left, rng
        self._store = opened()
        self.name = self._store.name  # type: ignore[misc]
        self._lock = threading.RLock()
        self.operations = self.kills = self.reopenings = 0

    @contextmanager
    def _called(self, pages: int) -> Iterator[Store]:
        with self._lock:
            self.operations += pages
            chance, after = self._rng.random(), self._rng.random() < 0.5
            if chance < 0.02:
                self.reopenings += 1
                self._left(self._store)
                self._store = self._opened()
            if after:
                yield self._store
            if chance < 0.01:
                self.kills += 1
                raise Killed
            if chance > 0.99:
                raise TierFailed("on purpose")
            if not after:
                yield self._store

    def find(self, keys: Sequence[PageKey]) -> list[Place | None]:
        with self._called(len(keys)) as store:
            return store.find(keys)

    def find_longest(self, key: PageKey) -> Place | None:
        with self._called(1) as store:
            return store.find_longest(key)

    def load(self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray) -> list[bool]:
        with self._called(len(keys)) as store:
            return store.load(keys, places, out)

    def load_ahead(
        self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray
    ) -> list[bool]:
        with self._called(len(keys)) as store:
            return store.load_ahead(keys, places, out)

    def store(self, keys: Sequence[PageKey], pages: np.ndarray) -> Stored:
        with self._called(len(keys)) as store:
            return store.store(keys, pages)

    def used_above(self, keys: Sequence[PageKey], times: int) -> list[PageKey]:
        with self._called(len(keys)) as store:
            return store.used_above(keys, times)

    def hottest(self, roots: Collection[bytes], most: int) -> list[HotPage]:
        with self._called(1) as store:
            return store.hottest(roots, most)

    @property
    def capacity(self) -> int | None:
        return self._store.capacity

    @property
    def used(self) -> int | None:
        return self._store.used

    @property
    def damaged(self) -> int:
        return self._store.damaged

    def close(self) -> None:
        with self._lock:
            self._store.close()
