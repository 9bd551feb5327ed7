"""Brings back what is hottest before anybody asks for it, while an engine has nothing to do."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from coppice.kernels.pages.transfers import PageTransfers, Staged
from coppice.radix import RadixTree
from coppice.radix.mirror.leaving import Known
from coppice.runtime.tiers.store import HotPage, Store, TierFailed
from coppice.runtime.tiers.told import TiersTold

logger = logging.getLogger(__name__)

_SHARE = 0.5  # of the pool's pages that are filled in this way
_LEFT_FREE = 0.125  # of them that stay free for requests
_MOST_KNOWN = 1 << 12  # namespaces that wait to be asked for
_PIECE_BYTES = 8 * 2**20  # of one read, and of what is copied to pages at once


class _Run(NamedTuple):
    """Pages of one tier that follow each other; `pages` has them, and all that lead to them."""

    namespace: Hashable
    tier: int
    pages: Seq[HotPage]
    last: int

    def path(self) -> list[HotPage]:
        """The pages from the beginning of the prompt to the run's last one."""
        line, at = list[HotPage](), self.last
        while at >= 0:
            line.append(self.pages[at])
            at = self.pages[at].above
        line.reverse()
        return line


class _Read(NamedTuple):
    """What was read for a run: the pages of its path from index `first` on.

    Of these `size` pages the first `right` are as they were written.
    """

    tier: int
    path: list[HotPage]
    first: int
    size: int
    staged: Staged
    right: int


class Warming:
    """Fills free pages with the hottest prefixes that tiers have.

    The engine's thread calls it while no request runs. One thread reads, a piece at a time, so that
    a request that comes waits for no more than that. Nothing is evicted for it: only pages that are
    free are filled, up to half of the pool.

    A tier has names of namespaces, which tell nothing of what they stand for; so what is brought
    back is of those namespaces that somebody has named: `know`.
    """

    def __init__(
        self,
        stores: Seq[Store],
        *,
        enter: Callable[[Hashable, bytes, int, Staged], int],
        page_size: int,
        transfers: PageTransfers,
        vocabulary: int,
        known: Known,
        told: TiersTold,
    ) -> None:
        """Knows no namespace yet.

        Args:
            stores: the tiers, the fastest first.
            enter: enters the pages of a prompt, from one index on, in the tree, and returns how
                many tokens the tree did not have; see `Tiers.enter`.
            page_size: tokens of a page.
            transfers: give memory for what is read.
            vocabulary: the number of tokens; a page with others belongs to an adapter.
            known: gets the names of pages that all tiers have.
            told: gets what was done.
        """
        self._names = known
        self._stores, self._enter = stores, enter
        self._size, self._transfers = page_size, transfers
        self._vocabulary, self._told = vocabulary, told
        self._piece = max(1, _PIECE_BYTES // transfers.page_bytes)
        self._known: dict[bytes, Hashable] = {}  # whose hottest prefixes were not asked for
        self._asked: dict[bytes, Hashable] = {}  # for whose the thread asks
        self._runs: deque[_Run] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._done: SimpleQueue[list[_Run] | _Read | None] = SimpleQueue()
        self._busy = False  # the thread is
        self._void = False  # what it reads is not wanted any more
        self._left: int | None = None  # pages that may be filled; None: not begun
        self._closed = False

    def know(self, root: bytes, namespace: Hashable) -> None:
        """Has prefixes of a namespace brought back; `root` is what its chains begin with."""
        if len(self._known) < _MOST_KNOWN:
            self._known[root] = namespace

    def forget(self, gone: Callable[[Hashable], bool] = lambda namespace: True) -> None:
        """Brings back nothing of the namespaces that are `gone`, before `know` names them again.

        What is on its way is void, too.
        """
        reads = self._busy and not self._asked and bool(self._runs)
        self._void = self._void or (reads and gone(self._runs[0].namespace))
        self._runs = deque(run for run in self._runs if not gone(run.namespace))
        for named in (self._known, self._asked):
            for root in [root for root, namespace in named.items() if gone(namespace)]:
                del named[root]

    def restart(self) -> None:
        """Begins anew, with an empty tree; `know` comes again for each namespace."""
        self.forget()
        self._left = None

    def advance(self, tree: RadixTree) -> bool:
        """Does a little of the work; returns whether there is more to do, soon.

        Call it while no request runs. It takes as long as to copy a piece to pages.
        """
        if self._closed:
            return False
        try:
            came = self._done.get_nowait()
        except Empty:
            if self._busy:
                return True
        else:
            self._busy = False
            if not self._void:
                self._take(came)
            self._void = False
        pages = tree.pool.num_pages
        if self._left is None:
            self._left = int(pages * _SHARE)
        room = min(self._left, tree.pool.free_pages - int(pages * _LEFT_FREE))
        if room <= 0:
            self._runs.clear()
            self._known.clear()
            return False
        while self._runs:
            run = self._runs[0]
            path = run.path()
            there = tree.match(_tokens(path), run.namespace).length
            first = there // self._size
            if there < sum(page.key.length for page in path):
                most = min(room, self._piece)
                self._submit(self._read, run.tier, path, first, first + most)
                return True
            self._runs.popleft()
        if self._known:
            self._asked, self._known = self._known, {}
            self._submit(self._ask, dict(self._asked), room)
            return True
        return False

    def close(self) -> None:
        """Ends the thread once it has done what it does; nothing is brought back any more."""
        self._closed = True
        self._runs.clear()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _submit(self, task: Callable[..., None], *arguments: object) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="coppice-warming")
        self._busy = True
        self._threads.submit(task, *arguments)

    def _take(self, came: list[_Run] | _Read | None) -> None:
        """Takes what the thread has done; None: it has failed."""
        if isinstance(came, list):
            wanted = set(self._asked.values())
            self._runs.extend(run for run in came if run.namespace in wanted)
            self._asked = {}
            return
        if not self._runs:
            return
        entered = 0
        if came is not None and came.right:
            tokens = _tokens(came.path[: came.first + came.right])
            namespace = self._runs[0].namespace
            entered = self._enter(namespace, tokens, came.first, came.staged)
        if came is None or came.right < came.size or not entered:
            self._runs.popleft()  # what follows has nothing before it, or no place in the tree
        if came is not None and entered:
            assert self._left is not None
            self._left -= came.right
            counts = self._told.tiers[self._stores[came.tier].name]
            counts.warmed_tokens += entered
            if len(self._stores) == 1:
                for page in came.path[came.first : came.first + came.right]:
                    self._names.add(page.key.name)

    # -- in the thread -----------------------------------------------------------------------

    def _ask(self, known: dict[bytes, Hashable], most: int) -> None:
        """Finds the hottest prefixes of some namespaces, up to `most` pages of each tier."""
        runs: list[_Run] = []
        for tier, store in enumerate(self._stores):
            try:
                pages = store.hottest(known, most)
            except TierFailed as error:
                logger.warning("%s", error)
            except BaseException:  # whatever ends this thread's work is told
                logger.exception("a tier could not be asked for its hottest pages")
            else:
                pages = self._usable(pages)
                runs += [
                    _Run(known[page.root], tier, pages, at)
                    for at, page in enumerate(pages)
                    if at + 1 == len(pages) or pages[at + 1].above != at
                ]
        self._done.put(runs)

    def _usable(self, pages: Seq[HotPage]) -> list[HotPage]:
        """Without the pages that have an adapter's mark: names do not say which adapter's.

        Nor those that follow one of them, or one that is not full, which no prompt has.
        """
        usable: list[HotPage] = []
        places = {-1: -1}  # where each full page is now
        for at, page in enumerate(pages):
            tokens = np.frombuffer(page.key.tokens, np.int32)
            if page.above in places and ((tokens >= 0) & (tokens < self._vocabulary)).all():
                usable.append(page._replace(above=places[page.above]))
                if len(tokens) == self._size:
                    places[at] = len(usable) - 1
        return usable

    def _read(self, tier: int, path: list[HotPage], first: int, end: int) -> None:
        """Reads pages of a path."""
        pages = path[first:end]
        came: _Read | None = None
        try:
            rows = self._transfers.room(len(pages))
            right = self._stores[tier].load_ahead(
                [page.key for page in pages], [page.place for page in pages], rows.numpy()
            )
            wrong = right.index(False) if False in right else len(right)
            came = _Read(tier, path, first, len(pages), self._transfers.stage(rows), wrong)
        except TierFailed as error:
            logger.warning("%s", error)
        except BaseException:  # likewise
            logger.exception("a tier could not be read")
        self._done.put(came)


def _tokens(path: Seq[HotPage]) -> bytes:
    return b"".join(page.key.tokens for page in path)
