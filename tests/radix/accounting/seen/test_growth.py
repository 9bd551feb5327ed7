"""Tables that grow keep what they have, and stay small while little was seen."""

from __future__ import annotations

import numpy as np

from coppice.radix.accounting.seen.content_table import ContentTable
from coppice.radix.accounting.seen.growth import doublings, split_sets
from coppice.radix.accounting.seen.prefix_table import PrefixTable


def some_keys(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 2**64, count, np.uint64) | np.uint64(1)


def test_prefixes_stay_known_with_their_stamps_through_all_doublings() -> None:
    table = PrefixTable(1 << 19)
    full = 8 << 19
    assert table.nbytes == full >> 6
    keys = some_keys(150_000)
    sizes = set()
    for begin in range(0, len(keys), 5000):
        part = keys[begin : begin + 5000]
        stamps = np.full(len(part), begin + 1, np.uint64)
        assert not table.see(part, np.arange(len(part)), stamps).any()
        sizes.add(table.nbytes)
    assert len(sizes) >= 5
    assert max(sizes) <= full
    known = table.known(keys)
    expected = np.arange(len(keys)) // 5000 * 5000 + 1
    assert (known == expected).mean() > 0.97
    assert set(known[known != expected].tolist()) <= {0}
    assert table.known(some_keys(50_001)).max() == 0


def test_content_stays_known_through_all_doublings() -> None:
    table = ContentTable(1 << 18)
    full = 2 << 18
    assert table.nbytes == full >> 3
    keys = some_keys(120_000)
    for begin in range(0, len(keys), 5000):
        table.see(keys[begin : begin + 5000], np.arange(5000))
    assert full >> 3 < table.nbytes <= full
    assert table.known(keys).mean() > 0.95
    assert table.known(some_keys(50_001)).mean() < 0.004


def test_a_small_table_never_grows() -> None:
    assert doublings(1000, 6) == 0
    assert doublings(1 << 11, 6) == 1
    assert doublings(1 << 30, 6) == 6
    table = PrefixTable(4000)
    before = table.nbytes
    for begin in range(0, 50_000, 5000):
        table.see(some_keys(50_000)[begin : begin + 5000], np.arange(5000),
                  np.full(5000, 1, np.uint64))  # fmt: skip
    assert table.nbytes == before


def test_entries_keep_their_order_when_a_set_becomes_two() -> None:
    entries = np.array([[1, 2, 3, 4], [5, 0, 6, 0]], np.uint64)
    grown = split_sets(entries, entries % 2 == 0)
    assert grown.tolist() == [[1, 3, 0, 0], [2, 4, 0, 0], [5, 0, 0, 0], [6, 0, 0, 0]]
