"""The tiers beside one engine's pool: pages that leave it are kept there, and come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from coppice.kernels.pages.transfers import PageTransfers, Staged, StagedRows
from coppice.radix import Namespace, Node, RadixTree
from coppice.radix.mirror.following import Following, Uses
from coppice.radix.mirror.leaving import Known, LeavingPages, NamedPage
from coppice.radix.mirror.names import root_name
from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.requests.request import Sequence
from coppice.runtime.tiers.loading.load import Load, LoadedPage
from coppice.runtime.tiers.loading.loads import Loads
from coppice.runtime.tiers.loading.warming import Warming
from coppice.runtime.tiers.store import Store
from coppice.runtime.tiers.told import TierCounts, TierReport, TiersReport, TiersTold
from coppice.runtime.tiers.writer import Batch, Hits, Writer

logger = logging.getLogger(__name__)

_KNOWN = 1 << 18  # names of pages that are not written again
_ROOTS = 1 << 12  # namespaces whose names are remembered
#: Bytes of pages that may wait to be written, at least.
WAITING_BYTES = 256 * 2**20
_CLOSING_PAUSE = 0.005  # seconds until the writer may have room again
_TELL_SECONDS = 5.0  # between two times at which tiers are told what was hit
_TOLD_PAGES = 1024  # of one time
_TOLD_AT_END = 1 << 17
_BETWEEN_SECONDS = 0.01  # until a thread may have done something, while no request runs
# Bytes copied between two steps of pages that were hit again; and at a time where none follows: a
# request may come, and the outputs of the last step are not sent yet.
_BESIDE_STEP, _IDLE = 4 * 2**20, 64 * 2**20


class Tiers:
    """Keeps what leaves a tree's pages, and what was hit again, in stores; brings it back.

    The engine's thread calls it. It copies pages to memory and back, between steps; threads read
    and write. Pages are overwritten only after `flush`: it must be called after pages were
    allocated and before anything is written to them.

    Attributes:
        copy: makes copies of pages on the device.
        before_access: called before pages are read or written; has all copies made that were
            scheduled so far.
        loads: what comes back.
        told: what was done so far.
        stores: the tiers, the fastest first.
        marks: what tells apart the adapters that act from a token on, by what the tree calls that
            token (`AdapterUse.mark`).
    """

    def __init__(
        self,
        stores: Seq[Store],
        *,
        tree: RadixTree,
        transfers: PageTransfers,
        copy: Callable[[Seq[Any]], None],
        digest: bytes,
        compute_seconds: Callable[[int, int], float | None],
        vocabulary: int,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        """Begins to listen to `tree`.

        Args:
            stores: the tiers, the fastest first; they are closed with this.
            tree: whose pages are kept.
            transfers: copies pages to memory and back.
            copy: makes copies of pages on the device, in order.
            digest: of all that the numbers depend on beside tokens and namespaces.
            compute_seconds: see `Loads`.
            vocabulary: the number of tokens.
            waiting_bytes: of pages that may wait to be written.
        """
        self.stores = stores
        self.told = TiersTold({store.name: TierCounts() for store in stores})
        self._transfers, self._digest, self.copy = transfers, digest, copy
        self.before_access: Callable[[], None] = lambda: None
        self.marks: Mapping[int, bytes] = {}
        self._roots: dict[Hashable, bytes | None] = {}
        self._known = Known(_KNOWN)
        self._page_bytes = transfers.page_bytes
        self._size = tree.page_size
        self._again: dict[Node, None] = {}  # nodes that were hit, with pages to be written
        self._written: dict[Node, int] = {}  # how many of a node's pages were
        self._vocabulary = vocabulary
        self._leaving = LeavingPages(self._size, self._root, self._wanted, self._salt)
        self._following = Following(self._size, self._again, self._written)
        self._uses, self._tell_next = Uses(), 0.0
        self._tree = tree
        self._listen()
        self.loads = Loads(
            stores,
            page_size=self._size,
            transfers=transfers,
            root=self._root,
            salt=self._salt,
            compute_seconds=compute_seconds,
            known=self._known,
            told=self.told,
        )
        self._warming = Warming(
            stores,
            enter=self.enter,
            page_size=self._size,
            transfers=transfers,
            vocabulary=vocabulary,
            known=self._known,
            told=self.told,
        )
        # The last one, since it starts a thread: whatever fails before leaves nothing running.
        self._writer = Writer(stores, self.told, self._known.discard, waiting_bytes)

    @property
    def names(self) -> list[str]:
        """The names of the tiers, the fastest first."""
        return [store.name for store in self.stores]

    def _listen(self) -> None:
        self._tree.add_listener(self._leaving)
        self._tree.add_listener(self._following)
        self._tree.add_listener(self._uses)

    def move_to(self, tree: RadixTree) -> None:
        """Continues with another tree, which is empty; what the other one held is not written."""
        self._leaving.cleared()
        self._following.cleared()
        self._uses.cleared()
        self._leaving.take()
        self._transfers.forget()
        self._tree = tree
        self._listen()
        self._warming.restart()
        for namespace, name in self._roots.items():
            if name is not None:
                self._warming.know(name, namespace)

    def emptied(self) -> None:
        """Notes that the tree was emptied on purpose: what nobody asks for does not come back."""
        self._warming.forget()

    def forget_adapter(self, identity: str) -> None:
        """Brings back nothing of an adapter's namespaces until somebody names them again."""

        def gone(namespace: Hashable) -> bool:
            return isinstance(namespace, Namespace) and namespace.adapter == identity

        for namespace in [each for each in self._roots if gone(each)]:
            del self._roots[namespace]
        self._warming.forget(gone)

    def _root(self, namespace: Hashable) -> bytes | None:
        """The name with which the chain of a namespace begins; None for one without an encoding."""
        if namespace in self._roots:
            return self._roots[namespace]
        name: bytes | None = None
        if namespace is None or isinstance(namespace, Namespace):
            same = namespace
            if same is not None:  # what the model and its adapter are called does not matter
                adapter = same.adapter and same.adapter.rpartition("@")[2]
                same = same._replace(model="", adapter=adapter)
            name = root_name(self._digest, same)
        if len(self._roots) >= _ROOTS:
            self._roots.clear()
        self._roots[namespace] = name
        if name is not None:
            self._warming.know(name, namespace)
        return name

    def renew(self, digest: bytes) -> None:
        """Takes another digest, since the weights may be others; without effect if it is the same.

        The tree must be empty, and no request may run.
        """
        if digest == self._digest:
            return
        self._digest = digest
        namespaces = list(self._roots)
        self._roots.clear()
        self._known.clear()
        self._warming.restart()
        for namespace in namespaces:
            self._root(namespace)

    def know(self, namespace: Hashable) -> None:
        """Has what is hottest in a namespace brought back, as for those that requests name."""
        self._root(namespace)

    def _salt(self, tokens: bytes) -> bytes | None:
        """What a page depends on by its tokens, see `chain`: the adapter that begins there."""
        if not self.marks:  # what an adapter computed leaves the tree before its mark
            return b""
        most = int(np.frombuffer(tokens, np.int32).max())
        return b"" if most < self._vocabulary else self.marks.get(most)

    def _wanted(self, name: bytes) -> bool:
        return name not in self._known

    # -- what leaves -------------------------------------------------------------------------

    def flush(self) -> None:
        """Copies the pages that were evicted since the last call, which may now be overwritten."""
        if gone := self._leaving.take():
            self.before_access()
            unique = {each.name: each for each in gone}
            self._keep(list(unique.values()))

    def asks(self, sequence: Sequence, cached: int) -> bool:
        """Whether a sequence should not run yet, since tiers are about to answer.

        Asks them, if that was not done, for what comes after its first `cached` tokens.
        """
        self.loads.begin(sequence, cached)
        return self.loads.waits(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """Notes that a sequence holds a hit: it is worth keeping."""
        hold = sequence.hold
        if hold is None or sequence.private:
            return
        node = hold.node
        while node is not None and node.parent is not None:
            if not node.draft and self._written.get(node, 0) < len(node.pages):
                self._again[node] = None
            self._uses.hit(node)
            node = node.parent

    def beside(self, *, idle: bool) -> None:
        """Copies some of the pages that were hit again, as many as do not delay the next step.

        `idle`: no step follows, so more than that.
        """
        self.flush()
        self._writer.poll()
        if self._again:
            self.before_access()
        room = self._writer.room()
        room = min(_IDLE, room) if idle else min(_BESIDE_STEP, room // 2)
        most = room // self._page_bytes
        if not idle:
            most = max(1, most) if room else 0
        while self._again and most > 0:
            node = next(iter(self._again))
            pages = list(islice(self._leaving.pages(node, self._written.get(node, 0)), most))
            self._written[node] = self._written.get(node, 0) + len(pages)
            if not pages or self._written[node] >= len(node.pages):
                del self._again[node]
            self._keep([each for each in pages if self._wanted(each.name)])
            most -= max(1, len(pages))
        if self._uses and time.monotonic() >= self._tell_next:
            self._tell(_TOLD_PAGES)
            self._tell_next = time.monotonic() + _TELL_SECONDS

    def _tell(self, most: int) -> None:
        """Has tiers told of hits on about `most` pages that they have."""
        later: list[tuple[Node, int]] = []  # none of their pages was given to the writer yet
        for node, times in self._uses.take():
            named = list(self._leaving.pages(node))
            pages = [each for each in named if each.name in self._known]
            if pages:
                keys, names = [each.key for each in pages], [each.name for each in pages]
                self._writer.tell(Hits(keys, names, times))
            elif named:
                later.append((node, times))
            most -= len(node.pages)
            if most <= 0:
                break
        for node, times in later:
            self._uses.again(node, times)

    def between(self) -> float | None:
        """Does a little of what is left for times in which no request runs.

        Returns after how many seconds there is more of it; None: there is none.
        """
        self._transfers.settle()
        self.beside(idle=True)
        if self._warming.advance(self._tree) or self._again:
            return _BETWEEN_SECONDS
        return max(_BETWEEN_SECONDS, self._tell_next - time.monotonic()) if self._uses else None

    def _keep(self, pages: list[NamedPage]) -> bool:
        """Has the writer store pages, those first that come first, as far as it has room.

        Returns whether they could be copied.
        """
        room = self._writer.room() // self._page_bytes
        if len(pages) > room:
            self.told.unwritten_pages += len(pages) - room
            pages = pages[:room]
        if not pages:
            return True
        try:
            copied = self._transfers.out([each.page for each in pages])
        except Exception:  # no memory, or the device has failed: the next step will tell
            logger.exception("pages could not be copied to memory, and are not kept")
            self.told.unwritten_pages += len(pages)
            return False
        names = [each.name for each in pages]
        for name in names:
            self._known.add(name)
        keys, begin = [each.key for each in pages], 0
        for rows, ready in copied:
            end = begin + len(rows)
            self._writer.add(Batch(keys[begin:end], names[begin:end], rows, ready))
            begin = end
        return True

    # -- what comes back ---------------------------------------------------------------------

    def poll(self) -> None:
        """Takes what threads, and the device, have done since the last step."""
        self._transfers.settle()
        self.loads.poll()
        self._writer.poll()

    def take(self, sequence: Sequence, load: Load, tokens: int) -> int | None:
        """Fills a sequence's pages with its next `tokens`, which `Loads.next` has offered.

        Its table has pages for them. If its computed tokens end inside a page, that page is
        replaced by one that has all of them: returns the one that it was, else None. Raises
        OutOfPages, with nothing changed, if there is no page for that.
        """
        size, table, computed = self._size, sequence.table, sequence.computed
        first = computed // size
        page = self._tree.allocate(1) if computed % size else None
        try:
            if page is not None:
                self.flush()
            self.before_access()
            loaded = self._fill(load, tokens, table, first, page)
        except BaseException:
            # What was computed stays where it is; the pages after it are computed, too.
            if page is not None:
                self._tree.pool.release(page)
            raise
        replaced = None
        if page is not None:
            replaced, table[first] = table[first], page[0]
            self._tree.pool.release([replaced])
        self.loads.took(load, loaded, tokens)
        return replaced

    def _fill(
        self, load: Load, tokens: int, table: Seq[int], first: int, page: Seq[int] | None
    ) -> list[LoadedPage]:
        """Copies what was read to the pages of a table from index `first` on, or `page` instead."""
        loaded = self.loads.take(load, tokens)
        pages = list(table[first : first + len(loaded)])
        if page is not None:
            pages[:1] = page
        runs: list[StagedRows] = []  # rows that follow each other in one buffer go together
        for _, staged, row in loaded:
            if runs and runs[-1].staged is staged:
                runs[-1] = runs[-1]._replace(size=runs[-1].size + 1)
            else:
                runs.append(StagedRows(staged, row, 1))
        self._transfers.fill(pages, runs)
        return loaded

    def enter(self, namespace: Hashable, tokens: bytes, first: int, staged: Staged) -> int:
        """Enters the beginning of a prompt in the tree, with its pages from index `first` on.

        `staged` begins with these pages. Only free pages are filled. Returns how many tokens the
        tree did not have; none if it does not have what is before them, or has no free pages.
        """
        tree, size = self._tree, self._size
        match = tree.match(tokens, namespace)
        skipped = match.length // size - first  # pages that it has got meanwhile
        end = len(tokens) // TOKEN_BYTES
        count = -(-end // size) - match.length // size
        if skipped < 0 or match.length == end or count > tree.pool.free_pages:
            return 0
        try:
            hold = tree.lock(match, use=False)
        except ValueError as error:  # a listener refuses the namespace
            logger.info("the hottest pages are not brought back: %s", error)
            return 0
        table = tree.page_table(hold)[: match.length // size]
        pages = tree.allocate(count)
        table += pages
        self.flush()
        self.before_access()
        try:
            self._transfers.fill(pages, [StagedRows(staged, skipped, count)])
        except Exception:
            logger.exception("pages could not be brought back")
            tree.release(hold, table)
            return 0
        tree.finish(hold, tokens[match.length * TOKEN_BYTES :], table, begin=match.length)
        return end - match.length

    def wait(self, seconds: float) -> None:
        """Waits for a thread, for at most `seconds`; returns at once if none has anything to do."""
        self.loads.wait(seconds)

    def report(self) -> TiersReport:
        """What was done so far, and what tiers keep now."""
        told = self.told
        stores = tuple(
            TierReport(
                store.name,
                **asdict(told.tiers[store.name]),
                damaged=store.damaged,
                used_bytes=store.used,
                capacity_bytes=store.capacity,
            )
            for store in self.stores
        )
        return TiersReport(
            stores,
            told.found_tokens,
            told.requests,
            told.computed_instead,
            told.saved_seconds,
            told.unwritten_pages,
            self._writer.waiting_bytes,
        )

    # -- the end -----------------------------------------------------------------------------

    def close(self, seconds: float) -> None:
        """Writes all that was not, for about `seconds`; ends the threads; closes the stores.

        What was hit again goes first, then what was used last.
        """
        deadline = time.monotonic() + seconds
        self.loads.close()
        self._warming.close()
        try:
            self._keep_all(deadline)
        except Exception:  # a failed device, or ranks that have ended
            logger.exception("what tiers do not have yet is lost")
        finally:
            self._writer.close()
            for store in self.stores:
                store.close()

    def _keep_all(self, deadline: float) -> None:
        """Has the writer store what was not, until a deadline; see `close`."""
        self._writer.hurry(deadline)
        self.before_access()
        self.flush()
        nodes = sorted(self._tree.nodes(), key=lambda node: (node.hits > 0, node.stamp))
        while nodes and time.monotonic() < deadline:
            node = nodes.pop()
            if node.draft:
                continue
            pages = [each for each in self._leaving.pages(node) if self._wanted(each.name)]
            while pages and time.monotonic() < deadline:
                self._writer.poll()
                if most := self._writer.room() // self._page_bytes:
                    if not self._keep(pages[:most]):
                        return
                    del pages[:most]
                else:
                    time.sleep(_CLOSING_PAUSE)
        self._tell(_TOLD_AT_END)
