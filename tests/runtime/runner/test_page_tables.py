"""What a step sends of page tables, and that the device then has what the step reads."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.runtime.runner.page_tables import PADDING, PageTables, entries_for


class Device:
    """The line of entries as a device has it, after everything that was to be written."""

    def __init__(self, entries: int) -> None:
        self.tables = PageTables(entries)
        self.line = np.full(entries, -1, np.int32)
        self.sent = 0

    def step(self, sequences, tables) -> bool:
        """Writes what a step sends; whether it had room. The device has its tables then."""
        placed = self.tables.place(sequences, [np.array(t, np.int32).tobytes() for t in tables])
        if placed is None:
            return False
        assert len(set(placed.places.tolist())) == len(placed.places) == len(placed.pages)
        assert PADDING not in placed.places
        self.line[placed.places] = placed.pages
        self.sent = len(placed.pages)
        for start, table in zip(placed.start, tables, strict=True):
            assert self.line[start : start + len(table)].tolist() == list(table)
        return True


def names(count):
    return [object() for _ in range(count)]


def test_a_step_sends_what_has_changed():
    device, (a, b, c) = Device(2000), names(3)
    assert device.step([a, b], [range(5), range(10, 30)])
    assert device.sent == 25
    assert device.step([a, b], [range(5), range(10, 30)])
    assert device.sent == 0
    assert device.step([a, b], [range(6), range(10, 30)])
    assert device.sent == 1
    # Others come and go, and the order changes: what is there stays.
    assert device.step([c, b, a], [[7], range(10, 31), range(6)])
    assert device.sent == 2
    assert device.step([b], [range(10, 31)])
    assert device.step([a, b, c], [range(6), range(10, 31), [7]])
    assert device.sent == 0
    # Of a table that differs in between, the rest is sent.
    assert device.step([a, b, c], [[0, 1, 2, 99, 4, 5], range(10, 31), [7]])
    assert device.sent == 3
    assert device.step([a, b, c], [[0, 1], range(10, 31), [7]])
    assert device.sent == 0


def test_places_grow_and_are_used_again():
    device, (a, b) = Device(1 + 64 + 128 + 64), names(2)
    assert device.step([a], [range(64)])
    assert device.step([a], [range(65)]), "in a place of 128"
    assert device.sent == 65
    assert device.step([a, b], [range(66), range(500, 540)])
    assert device.sent == 41


def test_places_of_sequences_that_have_gone_are_taken():
    device = Device(1 + 3 * 64)
    running = names(3)
    for number in range(40):
        running = [*running[1:], object()]
        assert device.step(running, [[number, each] for each in range(3)])
    assert len(device.tables._places) <= 3


def test_what_has_no_room_is_not_placed():
    device, (a, b, c) = Device(1 + 3 * 64), names(3)
    assert device.step([a, b], [range(10), range(20)])
    assert not device.step([a, b, c], [range(10), range(70), range(65)])
    assert not device.step([a], [range(1000)])
    assert device.step([a, b], [range(11), range(21)])
    assert device.sent == 32, "nothing is taken for written"
    assert device.step([], [])


def test_places_are_put_together_again_when_there_is_room_between_them():
    """Two places of 64 that are free are no place of 128, until all are placed anew."""
    device, (a, b, c) = Device(1 + 4 * 64), names(3)
    assert device.step([a, b, c], [range(10)] * 3)
    assert device.step([b], [range(200)])
    assert device.step([a, b], [range(60), range(70)])
    assert device.step([a, b, c], [range(60), range(70), range(60)])


def test_forgetting_sends_all_again():
    device, (a,) = Device(200), names(1)
    assert device.step([a], [range(9)])
    device.tables.forget()
    assert device.step([a], [range(9)])
    assert device.sent == 9


def test_random_steps():
    rng = np.random.default_rng(0)
    device = Device(1 + 12 * 128)
    waiting = {object(): [] for _ in range(14)}
    placed = 0
    for _ in range(400):
        chosen = rng.permutation(14)[: rng.integers(1, 7)]
        sequences = [list(waiting)[each] for each in chosen]
        for sequence in sequences:
            table = waiting[sequence]
            if rng.random() < 0.1 or len(table) > 120:
                table = table[: rng.integers(0, len(table) + 1)]
            new = rng.integers(0, 99, rng.integers(0, 9)).tolist()
            waiting[sequence] = [*table, *new] or [1]
        placed += device.step(sequences, [waiting[each] for each in sequences])
    assert placed > 390


@pytest.mark.parametrize(
    ("rows", "pages", "entries"), [(1, 1, 129), (256, 2560, 1 + 512 * 4096), (512, 8192, 2**22)]
)
def test_room_follows_from_the_engine(rows, pages, entries):
    assert entries_for(rows, pages) == entries


def test_tables_of_a_long_context_have_room():
    """256 sequences of 128k tokens in pages of 16."""
    tables = PageTables(entries_for(256, 8192))
    assert tables.place(names(256), [np.zeros(8192, np.int32).tobytes()] * 256) is not None
