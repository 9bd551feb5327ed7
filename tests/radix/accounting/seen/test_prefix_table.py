"""The table of what was seen, against a dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from coppice.radix.accounting.seen.hashes import MAX_ROWS
from coppice.radix.accounting.seen.prefix_table import PrefixTable


def see(
    table: PrefixTable,
    keys: list[int],
    pieces: list[int],
    times: list[int],
    writes: list[bool] | None = None,
) -> list[int]:
    # Keys are mixed, as hashes are.
    mixed = np.array(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    seen = table.see(
        mixed,
        np.array(pieces, np.int64),
        np.array(times, np.uint64),
        None if writes is None else np.array(writes),
    )
    return seen.tolist()


def test_a_key_is_seen_from_the_next_call_on() -> None:
    table = PrefixTable(100)
    assert see(table, [2, 4, 6], [0, 0, 1], [5, 5, 6]) == [0, 0, 0]
    assert see(table, [4, 6, 8], [0, 0, 0], [9, 9, 9]) == [5, 6, 0]
    assert see(table, [4, 6, 8], [0, 0, 0], [10, 10, 10], [False] * 3) == [9, 9, 9]
    assert see(table, [4, 6, 8], [0, 0, 0], [11, 11, 11]) == [9, 9, 9]
    table.clear()
    assert see(table, [4], [0], [12]) == [0]


def test_a_piece_finds_what_earlier_pieces_entered_but_not_its_own() -> None:
    table = PrefixTable(100)
    assert see(table, [2, 2, 4, 2, 4], [0, 0, 1, 2, 2], [5, 5, 6, 7, 7]) == [0, 0, 0, 5, 6]


def test_a_row_that_only_looks_enters_nothing() -> None:
    table = PrefixTable(100)
    found = see(table, [2, 2, 4, 2], [0, 1, 1, 2], [5, 6, 6, 7], [False, True, False, False])
    assert found == [0, 0, 0, 6]
    assert see(table, [2, 4], [0, 0], [8, 8]) == [6, 0]


@pytest.mark.parametrize("seed", range(5))
def test_against_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    table, model, time = PrefixTable(40_000), {}, 0
    for _ in range(20):
        keys, pieces, times, writes, expected = [], [], [], [], []
        for piece in range(rng.randint(1, 30)):
            time += rng.randint(0, 3)
            entered = {}
            for _ in range(rng.randint(0, 40)):
                key, write = rng.randrange(1000), rng.random() < 0.8
                keys.append(key)
                pieces.append(piece)
                times.append(time + 1)
                writes.append(write)
                expected.append(model.get(key, 0))
                if write:
                    entered[key] = time + 1
            model |= entered
        assert see(table, keys, pieces, times, writes) == expected


def test_the_oldest_entries_give_way() -> None:
    table = PrefixTable(64)
    assert table.nbytes == 64 * 8
    for key in range(1000):
        see(table, [key], [0], [key + 1])
    recent = see(table, list(range(1000)), [0] * 1000, [2000] * 1000, [False] * 1000)
    kept = [key for key, at in enumerate(recent) if at]
    assert len(kept) == 64
    assert kept == [at - 1 for at in recent if at]
    assert min(kept) > 1000 - 3 * 64


def test_keys_of_one_call_that_meet_in_a_set_are_all_entered() -> None:
    table = PrefixTable(4)
    assert see(table, [2, 4, 6, 8], [0] * 4, [1] * 4) == [0] * 4
    assert see(table, [2, 4, 6, 8], [0] * 4, [2] * 4) == [1] * 4


def test_keys_are_forgotten_if_nobody_saw_them_since() -> None:
    table = PrefixTable(100)
    see(table, [2, 4, 6], [0, 0, 1], [5, 5, 6])
    mixed = np.array([2, 4, 6, 8], np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    see(table, [4], [0], [7])
    table.forget(mixed, 5)
    assert see(table, [2, 4, 6, 8], [0] * 4, [9] * 4, [False] * 4) == [0, 7, 6, 0]
    table.forget(mixed[:0], 5)


def test_sizes_are_checked() -> None:
    for capacity in (0, 2**34):
        with pytest.raises(ValueError, match=f"capacity must be in .* got {capacity}"):
            PrefixTable(capacity)
    zeros = np.zeros(MAX_ROWS + 1, np.uint64)
    with pytest.raises(ValueError, match=f"keys: at most {MAX_ROWS} a call"):
        PrefixTable(4).see(zeros, zeros.view(np.int64), zeros)
