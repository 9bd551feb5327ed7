"""Parts of pages of three ranks on simulated devices, whose streams run as late as they may."""

from __future__ import annotations

import random
from collections import deque
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from simulated_streams import SimulatedStreams

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.cpu.ranks.errors import RanksEnded
from coppice.kernels.pages.transfers import Copied, DeviceTransfers, PageTransfers, StagedRows
from coppice.runtime.runner.ranks.pages import DividedTransfers, PagesPart

PAGES = 12


class Group:
    """In the place of a group: who its members are, and whether it has ended."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.ended: str | None = None

    def end(self, reason: str) -> None:
        self.ended = reason


class Ranks:
    """A first rank, which gives tasks, and others, which do them when `work` is called.

    Attributes:
        caches: of each rank; their widths differ.
    """

    def __init__(self, rng: random.Random, size: int, *, devices: bool) -> None:
        self.rng = rng
        self.caches = [
            [LayerCache(*torch.randn(2, PAGES, 4, 1 + rank, 8)) for _ in range(2)]
            for rank in range(size)
        ]
        self.streams = [SimulatedStreams(rng, steps_late=False) for _ in range(size)]
        moved = [self._transfers(rank, devices) for rank in range(size)]
        self.tasks: deque[tuple[str, Any]] = deque()
        self.groups = [Group(rank, size) for rank in range(size)]
        self.parts: list[PagesPart] = []
        self._others = moved[1:]
        self.group, self.followers = self.groups[0], self
        self.first = DividedTransfers(self, moved[0], 1 << 20)

    def _transfers(self, rank: int, device: bool) -> PageTransfers:
        def caches() -> list[LayerCache]:
            return self.caches[rank]

        return DeviceTransfers(caches, self.streams[rank]) if device else PageTransfers(caches)

    def together(self) -> Any:
        return nullcontext()

    def tell(self, method: str, name: str, *args: Any) -> None:
        assert method == "pages_task"
        if name == "join":
            for group, moved in zip(self.groups[1:], self._others, strict=True):
                self.parts.append(PagesPart(moved, group, *args))
        else:
            self.tasks.append((name, args))

    def work(self) -> None:
        """Has the others do one task."""
        name, args = self.tasks.popleft()
        for each in self.parts:
            getattr(each, name)(*args)

    def settle(self) -> None:
        while self.tasks:
            self.work()
        for moved, streams in zip([self.first, *self._others], self.streams, strict=True):
            streams.finish()
            moved.needed(range(PAGES))

    def content(self) -> np.ndarray:
        """What all ranks have of the pages, as packed."""
        return np.concatenate(
            [
                each.reshape(PAGES, -1).view(torch.uint8).numpy()
                for caches in self.caches
                for cache in caches
                for each in (cache.k, cache.v)
            ],
            1,
        )


@pytest.mark.parametrize("devices", [False, True])
def test_what_goes_out_comes_back_to_the_same_ranks(devices: bool) -> None:
    rng = random.Random(1)
    ranks = Ranks(rng, 3, devices=devices)
    first, expected = ranks.first, ranks.content()
    assert first.page_bytes == expected.shape[1] and len(first.marks) == 2
    kept: list[tuple[list[int], torch.Tensor, Any, np.ndarray]] = []
    for _ in range(150):
        pages = rng.sample(range(PAGES), rng.randint(1, 4))
        if rng.random() < 0.5:
            [(rows, ready)] = first.out(pages)
            kept.append((pages, rows, ready, expected[pages].copy()))
        elif kept:
            _, rows, ready, right = kept.pop(rng.randrange(len(kept)))
            while ranks.tasks:
                ranks.work()
            ready()
            assert np.array_equal(rows.numpy(), right), "what came out is not what pages had"
            come = first.room(len(rows))
            come.copy_(rows)
            begin = rng.randrange(len(rows))
            pages = rng.sample(range(PAGES), len(rows) - begin)
            first.fill(pages, [StagedRows(first.stage(come), begin, len(pages))])
            expected[pages] = right[begin:]
            del rows, come
        if ranks.tasks and rng.random() < 0.5:
            ranks.work()
    ranks.settle()
    assert np.array_equal(ranks.content(), expected)


def test_who_waits_for_a_rank_that_has_ended_hears_why() -> None:
    ranks = Ranks(random.Random(2), 2, devices=False)
    [(_, ready)] = ranks.first.out([3, 5])
    assert ready is not None
    ranks.group.end("rank 1 of the model: it was killed")
    with pytest.raises(RanksEnded, match="it was killed"):
        ready()


def test_a_part_that_a_device_can_not_copy_ends_the_group() -> None:
    ranks = Ranks(random.Random(3), 2, devices=True)
    [part] = ranks.parts

    def fails() -> None:
        raise OSError("the device is gone")

    part._transfers.out = lambda pages, rows: [Copied(rows, fails)]  # type: ignore[method-assign, assignment]
    ranks.first.out([1])
    ranks.work()
    while (reason := ranks.groups[1].ended) is None:
        pass
    assert reason == "rank 1 of the model: OSError: the device is gone"
