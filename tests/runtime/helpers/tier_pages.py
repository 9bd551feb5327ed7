"""Pages for stores: keys of random chains, and the content that each key always has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from coppice.radix.mirror.names import PageKey, chain
from coppice.runtime.tiers.store import Store

PAGE_BYTES = 1000  # no multiple of the alignment
PAGE_TOKENS = 4
ROOT = b"root of a chain!"


def content(key: PageKey, page_bytes: int = PAGE_BYTES) -> np.ndarray:
    """The only right content of a page: uint8 ``[page_bytes]``, another for each key."""
    seed = xxhash.xxh3_64_intdigest(key.parent + key.tokens)
    return np.random.default_rng(seed).integers(0, 256, page_bytes, dtype=np.uint8)


def contents(keys: Sequence[PageKey], page_bytes: int = PAGE_BYTES) -> np.ndarray:
    return np.stack([content(key, page_bytes) for key in keys])


def line(*tokens: int, root: bytes = ROOT) -> list[PageKey]:
    """The pages of one prompt."""
    return chain(root, np.array(tokens, np.int32).tobytes(), 4 * PAGE_TOKENS)


def numbered(count: int, root: bytes = ROOT) -> list[PageKey]:
    """Full pages of as many prompts, which begin differently."""
    return [line(i, 1, 2, 3, root=root)[0] for i in range(count)]


def put(store: Store, keys: Sequence[PageKey]) -> int:
    """Stores pages with their right content; returns how many were written."""
    return store.store(keys, contents(keys)).written


def right(store: Store, keys: Sequence[PageKey]) -> list[bool]:
    """Which pages are found and load; fails if one loads with a wrong byte."""
    found = [(i, place) for i, place in enumerate(store.find(keys)) if place is not None]
    out = np.zeros((len(found), PAGE_BYTES), np.uint8)
    loaded = store.load([keys[i] for i, _ in found], [place for _, place in found], out)
    good = [False] * len(keys)
    for (i, place), row, good_row in zip(found, out, loaded, strict=True):
        assert place.tokens == keys[i].length
        if good_row:
            assert np.array_equal(row, content(keys[i])), "a wrong page"
        good[i] = good_row
    return good
