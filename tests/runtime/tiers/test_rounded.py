"""A tier that keeps pages in 8 bits, over one that is memory, lies and forgets."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fake_tiers import MemoryStore

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.pages.packing import pack, packed_bytes
from coppice.kernels.rounding import Rounding
from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.rounded import RoundedStore
from coppice.runtime.tiers.store import TierFailed


@pytest.fixture(scope="module")
def caches():
    return [LayerCache(*torch.randn(2, 20, 4, 2, 16)) for _ in range(2)]


@pytest.fixture(scope="module")
def pages(caches):
    out = torch.empty(20, packed_bytes(caches), dtype=torch.uint8)
    pack(caches, range(20), out)
    return out.numpy()


KEYS = [PageKey(b"parent", bytes([number] * 16)) for number in range(20)]


def test_pages_come_back_as_they_were_but_for_rounding(caches, pages):
    inner = MemoryStore()
    store = RoundedStore(inner, Rounding(caches, "int8"))
    done = store.store(KEYS[:5], pages[:5])
    assert (done.written, done.known) == (5, 0)
    done = store.store(KEYS[:8], pages[:8])
    assert (done.written, done.known) == (3, 5)
    done = store.store(KEYS[:8], pages[:8])
    assert (done.written, done.known) == (0, 8)
    assert store.used == inner.used == 8 * store.kept_bytes(pages.shape[1])
    assert store.kept_bytes(pages.shape[1]) < 0.3 * pages.shape[1]
    assert store.name == inner.name and store.capacity is None and store.damaged == 0
    hottest = store.hottest([b"parent"], 9)
    assert {each.key for each in hottest} == set(KEYS[:8])
    ahead = np.empty_like(pages[:8])
    keys, hot = [each.key for each in hottest], [each.place for each in hottest]
    assert store.load_ahead(keys, hot, ahead) == [True] * 8
    places = store.find(KEYS)
    assert [place is not None for place in places] == [True] * 8 + [False] * 12
    out = np.empty_like(pages[:8])
    assert store.load(KEYS[:8], places[:8], out) == [True] * 8
    assert out.view(np.float32) == pytest.approx(pages[:8].view(np.float32), abs=0.03)
    part = store.find_longest(PageKey(b"parent", KEYS[3].tokens[:8] + bytes(8)))
    assert part is not None and part.tokens == 2
    store.close()
    assert inner.closed


def test_rows_that_are_wrong_are_said_to_be_and_the_others_are_right(caches, pages):
    inner = MemoryStore()
    store = RoundedStore(inner, Rounding(caches, "fp8"))
    store.store(KEYS, pages)
    places = store.find(KEYS)
    inner.rng = random.Random(1)
    wrong = failed = 0
    for _ in range(60):
        out = np.full_like(pages, 255)
        try:
            right = store.load(KEYS, places, out)
        except TierFailed:
            failed += 1
            continue
        wrong += right.count(False)
        good = np.flatnonzero(right)
        found = out[good].view(np.float32)
        assert found == pytest.approx(pages[good].view(np.float32), abs=0.3)
    assert wrong and failed
