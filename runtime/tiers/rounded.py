"""A tier that keeps pages with numbers of 8 bits: it has more room and reads less, at some loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from coppice.kernels.rounding import Rounding
from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.store import HotPage, Place, Store, Stored


class RoundedStore(Store):
    """Rounds pages on their way to another store, and restores them on their way back.

    Names say nothing of how pages are kept: engines that round differently need other names.
    """

    def __init__(self, store: Store, rounding: Rounding) -> None:
        """`store` keeps pages of `rounding.page_bytes`; it is closed with this."""
        self._store = store
        self._rounding = rounding
        self.name = store.name

    def kept_bytes(self, page_bytes: int) -> int:
        return self._rounding.page_bytes

    def find(self, keys: Sequence[PageKey]) -> list[Place | None]:
        return self._store.find(keys)

    def find_longest(self, key: PageKey) -> Place | None:
        return self._store.find_longest(key)

    def load(self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray) -> list[bool]:
        rows = self._rows(len(keys))
        return self._restored(self._store.load(keys, places, rows), rows, out)

    def load_ahead(
        self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray
    ) -> list[bool]:
        rows = self._rows(len(keys))
        return self._restored(self._store.load_ahead(keys, places, rows), rows, out)

    def _rows(self, count: int) -> np.ndarray:
        return np.empty((count, self._rounding.page_bytes), np.uint8)

    def _restored(self, right: list[bool], rows: np.ndarray, out: np.ndarray) -> list[bool]:
        """Restores to `out` the rows that are right, and returns which are."""
        if all(right):
            self._rounding.decode(rows, out)
        else:
            good = np.flatnonzero(right)
            restored = np.empty((len(good), out.shape[1]), np.uint8)
            self._rounding.decode(rows[good], restored)
            out[good] = restored
        return right

    def store(self, keys: Sequence[PageKey], pages: np.ndarray) -> Stored:
        # Only what is new is rounded: that takes longer than to look.
        there = self._store.find(keys)
        new = [at for at, place in enumerate(there) if place is None]
        if not new:
            return Stored(known=len(keys))
        done = self._store.store([keys[at] for at in new], self._rounding.encode(pages[new]))
        return Stored(done.written, done.known + len(keys) - len(new), done.gone)

    @property
    def capacity(self) -> int | None:
        return self._store.capacity

    @property
    def used(self) -> int | None:
        return self._store.used

    @property
    def damaged(self) -> int:
        return self._store.damaged

    def used_above(self, keys: Sequence[PageKey], times: int) -> list[PageKey]:
        return self._store.used_above(keys, times)

    def hottest(self, roots: Collection[bytes], most: int) -> list[HotPage]:
        return self._store.hottest(roots, most)

    def close(self) -> None:
        self._store.close()
