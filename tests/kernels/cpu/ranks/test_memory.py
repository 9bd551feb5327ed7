"""Ranks that share memory: sums, gathered columns, messages, and an end that nobody waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from coppice.kernels.cpu.ranks.errors import RanksEnded
from coppice.kernels.cpu.ranks.meeting import ARRIVED, SENT, TAKEN
from coppice.kernels.cpu.ranks.memory import RankMemory, region_bytes, shared_file

Start = Callable[..., list[Any]]


@pytest.fixture
def memories() -> Iterator[Callable[[int, int], list[RankMemory]]]:
    """Makes the memories of some ranks, with regions for so many numbers."""
    descriptors = []

    def make(size: int, numbers: int) -> list[RankMemory]:
        room = region_bytes(numbers)
        descriptors.append(shared_file(size, room))
        return [RankMemory(descriptors[-1], rank, size, room) for rank in range(size)]

    yield make
    for each in descriptors:
        os.close(each)


def on_all(memories: list[RankMemory], call: Callable[[int, RankMemory], Any]) -> list[Any]:
    """What the ranks, a thread each, return."""
    with ThreadPoolExecutor(len(memories)) as pool:
        return list(pool.map(call, range(len(memories)), memories))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("numbers", [1, 1024, 5000])
def test_sums_are_equal_on_all_ranks(memories: Any, size: int, numbers: int) -> None:
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(size, numbers)).astype(np.float32)
    ranks = memories(size, 1500)  # so that 5000 take several meetings

    def call(rank: int, memory: RankMemory) -> np.ndarray:
        mine = parts[rank].copy()
        for _ in range(3):
            memory.sum(mine)
            mine /= np.float32(size)
        return mine

    found = on_all(ranks, call)
    expected = parts[0].copy()
    for part in parts[1:]:
        expected += part
    np.testing.assert_allclose(found[0], expected / size, rtol=1e-5, atol=1e-6)
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])


def test_columns_are_gathered_on_the_first_rank(memories: Any) -> None:
    widths, rows = [3, 4, 2], 700  # more rows than a region holds
    whole = np.arange(rows * 9, dtype=np.float32).reshape(rows, 9)
    begins = np.cumsum([0, *widths])

    def call(rank: int, memory: RankMemory) -> np.ndarray | None:
        return memory.gather(whole[:, begins[rank] : begins[rank + 1]], widths)

    first, *others = on_all(memories(3, 1024), call)
    np.testing.assert_array_equal(first, whole)
    assert others == [None, None]


def test_the_least_number_and_what_the_first_rank_shares(memories: Any) -> None:
    def call(rank: int, memory: RankMemory) -> tuple[int, list[int]]:
        numbers = np.arange(5) + 100 * rank
        memory.share(numbers)
        return memory.least(7 - rank), numbers.tolist()

    assert on_all(memories(3, 10), call) == [(5, [0, 1, 2, 3, 4])] * 3


def test_messages_come_in_order_whatever_their_length(memories: Any) -> None:
    messages = [b"", b"a", os.urandom(1 << 18), os.urandom((1 << 18) * 3 + 5), b"z" * 100]

    def call(rank: int, memory: RankMemory) -> list[bytes]:
        if rank == 0:
            for each in messages:
                memory.send(each)
            return messages
        return [memory.receive() for _ in messages]

    assert on_all(memories(3, 10), call) == [messages] * 3


def test_nobody_waits_after_the_end(memories: Any) -> None:
    ranks = memories(3, 10)
    waits = [
        lambda memory: memory.sum(np.ones(4, np.float32)),
        lambda memory: memory.receive(),
        lambda memory: memory.least(1),
    ]
    ended = []

    def call(memory: RankMemory, wait: Callable[[RankMemory], Any]) -> None:
        with pytest.raises(RanksEnded):
            wait(memory)
        ended.append(memory)

    for wait in waits:
        memory = ranks[1]
        thread = threading.Thread(target=call, args=(memory, wait))
        thread.start()
        if not ranks[0].ended:
            ranks[0].end()
        thread.join(20)
        assert not thread.is_alive()
    assert len(ended) == 3 and all(each.ended for each in ranks)
    with pytest.raises(RanksEnded):
        ranks[2].send(b"plan")


def test_the_end_changes_what_sleepers_compare(memories: Any) -> None:
    """A thread that is about to sleep looks at the low half of a count only."""
    ranks = memories(2, 10)
    counts = ranks[0]._places[[ARRIVED, SENT, TAKEN]]
    ranks[0].end()
    after = ranks[0]._places[[ARRIVED, SENT, TAKEN]]
    assert ((counts ^ after) & 0xFFFFFFFF).all()
    for each in [*ranks, *ranks]:  # more ends than a count has room for
        each.end()
    assert (ranks[0]._places[[ARRIVED, SENT, TAKEN]] == after).all()


def test_a_region_has_whole_pages(memories: Any) -> None:
    with pytest.raises(ValueError, match="region_bytes must be a multiple of 4096, got 100"):
        RankMemory(0, 0, 2, 100)
