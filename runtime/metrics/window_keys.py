"""Counts the keys that layers with a sliding window did not read, since they are older than it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class WindowReport:
    """What the windows of a model's layers saved, and what freeing older keys would.

    A *key* is the key and value of a token in a layer. Each sequence of a step counts its own: for
    sequences that share a prefix a kernel may read a key once.

    Attributes:
        layers: of the model.
        windows: tokens of a window, and how many layers have it, the smallest first.
        keys_read: by these layers, in all steps since the start.
        keys_skipped: that they would have read without windows.
        bytes_skipped: of the latter.
        pages_old: pages of running sequences, as a share of their layers, whose tokens are older
            than the window of every sequence that has them: what could be freed now.
        bytes_old: of the latter.
    """

    layers: int
    windows: tuple[tuple[int, int], ...]
    keys_read: int
    keys_skipped: int
    bytes_skipped: int
    pages_old: float
    bytes_old: int


class Tabled(Protocol):
    """A sequence with its page table, and how many of its tokens have their KV."""

    @property
    def table(self) -> Sequence[int]: ...

    @property
    def computed(self) -> int: ...


class WindowKeys:
    """Counts for a model with windows.

    Args:
        windows: of each layer, in tokens; None: it has none.
        page_bytes: of a page in all layers.
        page_size: tokens of a page.
    """

    def __init__(self, windows: Sequence[int | None], page_bytes: int, page_size: int) -> None:
        self._layers = len(windows)
        self._windows = sorted(Counter(each for each in windows if each is not None).items())
        self._page_bytes, self._page_size = page_bytes, page_size
        self._seen = self.skipped = 0

    @staticmethod
    def of(windows: Sequence[int | None], page_bytes: int, page_size: int) -> WindowKeys | None:
        """None for a model without windows, which then counts nothing."""
        if all(window is None for window in windows):
            return None
        return WindowKeys(windows, page_bytes, page_size)

    @property
    def read(self) -> int:
        """Keys that were read within windows."""
        return self._seen - self.skipped

    def step(self, context_len: np.ndarray, query_start: np.ndarray) -> None:
        """Counts a step by its plan: tokens of each sequence, int ``[B]``, rows int ``[B + 1]``.

        The first row of a sequence sees farthest back. O(B) for each size of windows.
        """
        first = context_len - np.diff(query_start)
        tokens = int(context_len.sum(dtype=np.int64))
        for window, layers in self._windows:
            old = np.maximum(first + 1 - window, 0).sum(dtype=np.int64)
            self.skipped += layers * int(old)
            self._seen += layers * tokens

    def report(self, running: Iterable[Tabled], num_pages: int) -> WindowReport:
        """The counts, and what ``running`` sequences could free of a pool now.

        O(all page tables) at memory speed for each size of windows.
        """
        tables = [
            (np.frombuffer(each.table, np.int32), each.computed + 1)  # type: ignore[call-overload]
            for each in running
        ]
        pages = 0  # of a layer
        for window, layers in self._windows:
            old = np.zeros(num_pages, bool)
            cuts = [max(0, tokens - window) // self._page_size for _, tokens in tables]
            for (table, _), cut in zip(tables, cuts, strict=True):
                old[table[:cut]] = True
            for (table, _), cut in zip(tables, cuts, strict=True):
                old[table[cut:]] = False  # another sequence still sees it
            pages += layers * int(old.sum())
        key_bytes = self._page_bytes // self._page_size // self._layers
        return WindowReport(
            layers=self._layers,
            windows=tuple(self._windows),
            keys_read=self.read,
            keys_skipped=self.skipped,
            bytes_skipped=self.skipped * key_bytes,
            pages_old=pages / self._layers,
            bytes_old=pages * (self._page_bytes // self._layers),
        )
