"""Pages of a divided model on their way to tiers and back: each rank has a part of every page.

The first rank has tree and tiers, and gives the others tasks, in the order of all that it has them
do: to copy their parts of some pages to memory that all share, or from there to their caches.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.cpu.ranks.errors import RanksEnded
from coppice.kernels.cpu.ranks.pages import SharedPages, SharedRoom, shared_pages
from coppice.kernels.pages.transfers import Copied, PageTransfers, Staged, StagedRows
from coppice.runtime.model.parallel.group import RankGroup
from coppice.runtime.runner.ranks.following import Followers

logger = logging.getLogger(__name__)

_PAUSE = 0.0005  # seconds until another rank may have done a task


class Divided(Protocol):
    """The first rank's runner."""

    group: RankGroup
    followers: Followers

    def together(self) -> AbstractContextManager[None]:
        """What all ranks do together, or none."""


class DividedTransfers(PageTransfers):
    """Copies pages of which each rank has a part; on the first rank.

    A packed page has the ranks' parts in their order, each as that rank packs its layers.

    Attributes:
        marks: of the other ranks' parts; see `PageTransfers.mark`.
    """

    def __init__(self, runner: Divided, own: PageTransfers, room: int) -> None:
        """Has the other ranks join; at most `room` bytes of pages are on their way at a time.

        Raises ValueError if this system has no memory that processes can share, RanksEnded if
        another rank can't join.
        """
        if not hasattr(os, "memfd_create"):
            raise ValueError("with tensor_parallel_size above 1, tiers need Linux")
        self._runner, self._own = runner, own
        self._tasks = 0  # that the others were given
        size = runner.group.size
        descriptor, secret = shared_pages(size, room)
        try:
            self._shared = SharedPages(descriptor, 0, size, room, secret)
            self._shared.describe(own.page_bytes, own.mark())
            place = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._task("join", place, room, secret)
            self._await(self._tasks)
        finally:
            os.close(descriptor)
        self.marks = [self._shared.mark(rank) for rank in range(1, size)]
        self._rows = SharedRoom(self._shared, lambda: self._tasks)

    def _task(self, name: str, *args: object) -> None:
        """Has the others do what `PagesPart` has under this name."""
        self._runner.followers.tell("pages_task", name, *args)
        self._tasks += 1

    def _await(self, tasks: int) -> None:
        """Waits until the others have done their first `tasks`. Raises RanksEnded with the reason.

        In any thread.
        """
        while self._shared.done() < tasks:
            if (reason := self._runner.group.ended) is not None:
                raise RanksEnded(reason)
            time.sleep(_PAUSE)

    @property
    def page_bytes(self) -> int:
        return self._shared.page_bytes

    def mark(self) -> bytes:
        return self._own.mark()

    def room(self, count: int) -> torch.Tensor:
        return self._rows.take(count)

    def stage(self, rows: torch.Tensor) -> Staged:
        return self._own.stage(rows[:, self._shared.columns(0)])._replace(whole=rows)

    def out(self, pages: Sequence[int], into: torch.Tensor | None = None) -> list[Copied]:
        assert into is None, "other ranks can't write to any memory"
        rows = self._rows.take(len(pages))
        with self._runner.together():
            self._task("out", list(map(int, pages)), self._shared.begin_of(rows))
            tasks = self._tasks
            own = self._own.out(pages, rows[:, self._shared.columns(0)])

        def ready() -> None:
            _await_all(own)
            self._await(tasks)

        return [Copied(rows, ready)]

    def fill(self, pages: Sequence[int], rows: Sequence[StagedRows]) -> None:
        runs: list[tuple[int, int]] = []
        for staged, first, size in rows:
            assert staged.whole is not None
            runs.append((self._shared.begin_of(staged.whole) + first * self.page_bytes, size))
        with self._runner.together():
            self._task("fill", list(map(int, pages)), runs)
            self._own.fill(pages, rows)

    def needed(self, pages: Sequence[int] | np.ndarray) -> None:
        self._own.needed(pages)

    def layers(self, pages: Sequence[int] | np.ndarray) -> Sequence[LayerCache]:
        return self._own.layers(pages)

    def settle(self) -> None:
        self._own.settle()

    def forget(self) -> None:
        with self._runner.together():
            self._task("forget")
            self._own.forget()


def _await_all(copied: Sequence[Copied]) -> None:
    for each in copied:
        if each.ready is not None:
            each.ready()


class PagesPart:
    """Another rank's part of pages: does the tasks that the first rank gives."""

    def __init__(
        self, transfers: PageTransfers, group: RankGroup, place: str, room: int, secret: bytes
    ) -> None:
        """Joins the memory at `place`. Raises OSError or ValueError if it can't."""
        self._transfers, self._group = transfers, group
        descriptor = os.open(place, os.O_RDWR)
        try:
            self._shared = SharedPages(descriptor, group.rank, group.size, room, secret)
        finally:
            os.close(descriptor)
        # Of tasks that a device has not done; made when there is one.
        self._waiting: SimpleQueue[Callable[[], None] | None] | None = None
        self._shared.describe(transfers.page_bytes, transfers.mark())

    def out(self, pages: Sequence[int], begin: int) -> None:
        """Copies pages to the rows that begin there."""
        copied = self._transfers.out(pages, self._shared.part(begin, len(pages)))
        at_once = all(each.ready is None for each in copied)
        self._done(None if at_once else partial(_await_all, copied))

    def fill(self, pages: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Fills pages from rows: where each run of them begins, and how many it has."""
        rows = [
            StagedRows(self._transfers.stage(self._shared.part(begin, count)), 0, count)
            for begin, count in runs
        ]
        self._transfers.fill(pages, rows)
        self._done(None)

    def forget(self) -> None:
        """See `PageTransfers.forget`."""
        self._transfers.forget()
        self._done(None)

    def _done(self, ready: Callable[[], None] | None) -> None:
        """Notes that a task is done, once `ready` returns; in order, since tasks are counted."""
        if self._waiting is None:
            if ready is None:
                self._shared.did()
                return
            self._waiting = SimpleQueue()
            threading.Thread(
                target=self._follow, args=(self._waiting,), name="coppice-pages", daemon=True
            ).start()
        self._waiting.put(ready)

    def _follow(self, waiting: SimpleQueue[Callable[[], None] | None]) -> None:
        while self._group.ended is None:
            ready = waiting.get()
            try:
                if ready is not None:
                    ready()
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}"
                self._group.end(f"rank {self._group.rank} of the model: {reason}")
                logger.exception("pages could not be copied")
                return
            self._shared.did()
