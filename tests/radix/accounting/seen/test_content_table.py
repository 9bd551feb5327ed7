"""The table of fingerprints, against a set."""

from __future__ import annotations

import random

import numpy as np
import pytest

from coppice.radix.accounting.seen.content_table import ContentTable
from coppice.radix.accounting.seen.hashes import MAX_ROWS


def mixed(keys: list[int]) -> np.ndarray:
    hashes = np.array(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> 31
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    return hashes ^ hashes >> 29


def see(table: ContentTable, keys: list[int], pieces: list[int] | None = None) -> list[bool]:
    numbers = np.array(pieces if pieces is not None else [0] * len(keys), np.int64)
    return table.see(mixed(keys), numbers).tolist()


def test_a_key_is_seen_from_the_next_piece_on() -> None:
    table = ContentTable(1000)
    assert see(table, [1, 2, 3, 1, 2, 1], [0, 0, 0, 0, 1, 2]) == [False] * 4 + [True] * 2
    assert see(table, [3, 4]) == [True, False]
    assert see(table, []) == []
    table.clear()
    assert see(table, [1, 2, 3, 4]) == [False] * 4


@pytest.mark.parametrize("seed", range(5))
def test_against_a_set(seed: int) -> None:
    rng = random.Random(seed)
    table, model = ContentTable(100_000), set()
    for _ in range(20):
        keys, pieces, answers = [], [], []
        for piece in range(rng.randint(1, 30)):
            own = [rng.randrange(3000) for _ in range(rng.randint(0, 40))]
            keys += own
            pieces += [piece] * len(own)
            answers += [key in model for key in own]
            model |= set(own)
        assert see(table, keys, pieces) == answers


def test_the_oldest_give_way() -> None:
    table = ContentTable(8000)
    assert table.nbytes == 16_000
    for first in range(0, 40_000, 100):
        see(table, list(range(first, first + 100)))
    known = see(table, list(range(40_000)))
    assert sum(known[-4000:]) > 0.93 * 4000
    assert sum(known[-8000:]) > 0.75 * 8000
    assert sum(known[:20_000]) < 0.02 * 20_000


def test_keys_of_one_call_that_meet_in_a_set_are_all_entered() -> None:
    table = ContentTable(8)
    assert not any(see(table, list(range(8))))
    assert all(see(table, list(range(8))))
    assert not any(see(table, list(range(10, 18))))
    assert all(see(table, list(range(10, 18))))


def test_keys_are_forgotten() -> None:
    table = ContentTable(1000)
    see(table, [1, 2, 3])
    table.forget(mixed([2, 9]))
    table.forget(mixed([]))
    assert see(table, [1, 2, 3]) == [True, False, True]


def test_few_keys_are_taken_for_others() -> None:
    table = ContentTable(20_000)
    see(table, list(range(20_000)))
    assert sum(see(table, list(range(10**6, 10**6 + 20_000)))) < 20


def test_sizes_are_checked() -> None:
    for capacity in (0, 2**34):
        with pytest.raises(ValueError, match=f"capacity must be in .* got {capacity}"):
            ContentTable(capacity)
    zeros = np.zeros(MAX_ROWS + 1, np.uint64)
    with pytest.raises(ValueError, match=f"keys: at most {MAX_ROWS} a call"):
        ContentTable(8).see(zeros, zeros.view(np.int64))
