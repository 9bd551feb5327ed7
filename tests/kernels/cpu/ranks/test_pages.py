"""Memory that ranks share for pages: who has which rows, and when they are free again."""

from __future__ import annotations

import gc
import os
import random

import pytest
import torch

from coppice.kernels.cpu.ranks.pages import SharedPages, SharedRoom, shared_pages

WIDTHS = [24, 40, 8]


def opened(room: int) -> list[SharedPages]:
    """What three ranks see of one memory."""
    descriptor, secret = shared_pages(len(WIDTHS), room)
    ranks = [SharedPages(descriptor, rank, len(WIDTHS), room, secret) for rank in range(3)]
    with pytest.raises(ValueError, match="is another one"):
        SharedPages(descriptor, 1, len(WIDTHS), room, bytes(16))
    os.close(descriptor)
    for rank, (each, width) in enumerate(zip(ranks, WIDTHS, strict=True)):
        assert each.done() == (rank > 2)
        each.describe(width, bytes([rank]) * 16)
    return ranks


def test_each_rank_has_its_columns() -> None:
    first, *others = opened(1 << 16)
    assert first.page_bytes == sum(WIDTHS) and first.mark(2) == bytes([2]) * 16
    room = SharedRoom(first, lambda: 1)
    rows = [room.take(count) for count in (3, 5)]
    for rank, each in enumerate([first, *others]):
        for taken in rows:
            part = each.part(first.begin_of(taken), len(taken))
            assert part.shape == (len(taken), WIDTHS[rank])
            part.fill_(rank + 1)
    right = torch.cat([torch.full((width,), at + 1) for at, width in enumerate(WIDTHS)])
    for taken in rows:
        assert (taken == right).all()


def test_rows_are_free_when_nobody_has_them_and_all_tasks_are_done() -> None:
    shared = opened(1 << 20)
    first, others, given = shared[0], shared[1:], 1
    width = sum(WIDTHS)
    room = SharedRoom(first, lambda: given)
    whole = room.free
    rows = room.take(100)
    view, size = rows[7:9], -(-100 * width // 64) * 64
    del rows
    gc.collect()
    assert room.free == whole - size, "a view has them"
    given += 1  # a task that may read them
    del view
    gc.collect()
    others[0].did()
    assert room.free == whole - size, "the other rank has not done its task"
    others[1].did()
    assert room.free == whole


def test_rows_never_overlap_and_all_room_comes_back() -> None:
    rng, shared = random.Random(3), opened(1 << 18)
    room = SharedRoom(shared[0], lambda: 1)
    whole, held, failed = room.free, dict[int, torch.Tensor](), 0
    for step in range(4000):
        if held and rng.random() < 0.5:
            number = rng.choice(list(held))
            assert (held.pop(number) == number % 251).all(), "somebody else has written there"
            continue
        try:
            rows = room.take(rng.choice([1, 2, 30, rng.randint(1, 900)]))
        except MemoryError:
            failed += 1
            continue
        held[step] = rows.fill_(step % 251)
        del rows
    assert 10 < failed < 3000
    held.clear()
    gc.collect()
    assert room.free == whole
    assert room.take(whole // sum(WIDTHS) - 1) is not None


def test_memory_is_given_back_when_nobody_has_any() -> None:
    size = 100 << 20
    first = opened(size)[0]
    room = SharedRoom(first, lambda: 1)
    first.mark(1)
    rows = room.take(size // sum(WIDTHS) - 10).fill_(5)
    begin = first.begin_of(rows)
    del rows
    gc.collect()
    assert room.free >= size
    assert not first.memory(begin, 1000).any()
    assert first.page_bytes == sum(WIDTHS), "what ranks said of their parts stays"
