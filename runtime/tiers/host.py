"""The tier in main memory, beside the pages of a GPU."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from coppice.kernels.pages.packing import host_rows
from coppice.radix.mirror.names import PageKey
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.tiers.store import Place, Store, Stored

_BLOCK_BYTES = 64 * 2**20  # memory is taken, and for a GPU pinned, in blocks of about this size


class HostStore(Store):
    """Pages in memory of this process; the one that was used longest ago gives way (LRU)."""

    name = "host"

    def __init__(self, capacity: int, page_bytes: int, device: torch.device) -> None:
        """Takes no memory yet. Raises ValueError if `capacity` is less than a page."""
        if capacity < page_bytes:
            raise ValueError(
                f"host_cache must be at least a page of the KV cache, {page_bytes} bytes, "
                f"got {capacity}"
            )
        self._capacity, self._page_bytes, self._device = capacity, page_bytes, device
        self._most = capacity // page_bytes
        self._block = max(1, min(self._most, _BLOCK_BYTES // page_bytes))
        self._blocks: list[np.ndarray] = []
        self._keep: list[torch.Tensor] = []  # the blocks' owners
        self._places: OrderedDict[PageKey, int] = OrderedDict()  # the last used one last
        self._children: dict[bytes, list[bytes]] = {}  # tokens after a parent, sorted
        self._free: list[int] = []
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def used(self) -> int:
        return len(self._places) * self._page_bytes

    def find(self, keys: Sequence[PageKey]) -> list[Place | None]:
        with self._lock:
            return [Place(key.length, key) if key in self._places else None for key in keys]

    def find_longest(self, key: PageKey) -> Place | None:
        with self._lock:
            lines = self._children.get(key.parent, [])
            at = bisect_left(lines, key.tokens)
            best: Place | None = None
            for tokens in lines[max(0, at - 1) : at + 1]:
                same = common_prefix(tokens, 0, key.tokens) // TOKEN_BYTES
                if same > (best.tokens if best is not None else 0):
                    best = Place(same, PageKey(key.parent, tokens))
            return best

    def load(self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray) -> list[bool]:
        right = []
        for place, row in zip(places, out, strict=True):
            with self._lock:  # for each page, so that the engine's calls wait for one at most
                slot = self._places.get(place.at)
                if slot is not None:
                    self._places.move_to_end(place.at)
                    row[:] = self._row(slot)
            right.append(slot is not None)
        return right

    def store(self, keys: Sequence[PageKey], pages: np.ndarray) -> Stored:
        done = Stored()
        for key, page in zip(keys, pages, strict=True):
            with self._lock:
                if key in self._places:
                    done.known += 1
                    continue
                slot = self._slot(done.gone)
                self._row(slot)[:] = page
                self._places[key] = slot
                insort(self._children.setdefault(key.parent, []), key.tokens)
                done.written += 1
        return done

    def _row(self, slot: int) -> np.ndarray:
        row: np.ndarray = self._blocks[slot // self._block][slot % self._block]
        return row

    def _slot(self, gone: list[bytes]) -> int:
        """Room for a page; adds the name of the one that had it to `gone`."""
        if self._free:
            return self._free.pop()
        if len(self._places) >= self._most:
            key, slot = self._places.popitem(last=False)
            gone.append(key.name)
            lines = self._children[key.parent]
            lines.remove(key.tokens)
            if not lines:
                del self._children[key.parent]
            return slot
        first = len(self._blocks) * self._block
        block = host_rows(self._block, self._page_bytes, self._device)
        self._keep.append(block)
        self._blocks.append(block.numpy())
        self._free = list(range(first + self._block - 1, first, -1))
        return first

    def close(self) -> None:
        with self._lock:
            self._places.clear()
            self._children.clear()
            self._blocks.clear()
            self._keep.clear()
