"""Checks that an engine's pages, locks and sequences add up: by a recount, or briefly when idle."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence as Seq

from coppice.radix import Pins, RadixTree, check
from coppice.runtime.engine.sequences import Sequences
from coppice.runtime.requests.request import Sequence, Status
from coppice.runtime.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)


def recount(scheduler: Scheduler, pins: Pins, sequences: Sequences) -> None:
    """Recounts every page and lock; raises AssertionError on a mismatch. O(tree and pool)."""
    running = scheduler.running
    held = [(s.hold, s.table) for s in running if s.hold is not None]
    assert len(held) == len(running), "a running sequence without a lock"
    pinned = [(pin.hold, array("i")) for pin in pins if pin.hold is not None]
    check(scheduler.paging.tree, held + pinned)
    assert {id(s) for s in sequences} == {
        id(s) for s in (*running, *scheduler.waiting, *sequences.compiling)
    }, "a request is lost"
    assert all(s.status is Status.RUNNING for s in running)


def is_balanced(tree: RadixTree, running: Seq[Sequence], pins: Pins) -> bool:
    """Whether every page is free or cached; True while anything runs. Logs an error if not.

    O(nodes on the paths of pins).
    """
    pages = tree.pool.num_pages
    if running or (
        tree.pool.free_pages + tree.cached_pages == pages
        and tree.locked_pages == pins.locked_pages()
    ):
        return True
    logger.error(
        "page accounting is off: %d free + %d cached of %d pages, %d locked while nothing "
        "runs; the cache is emptied",
        tree.pool.free_pages,
        tree.cached_pages,
        pages,
        tree.locked_pages,
    )
    return False
