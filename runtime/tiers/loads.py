"""Brings pages back from tiers for the sequences of one engine, in threads beside its steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import torch

from coppice.kernels.packing import host_rows
from coppice.radix.mirror.leaving import Known
from coppice.radix.mirror.names import PageKey, chain
from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.requests.request import Sequence, Status
from coppice.runtime.tiers.load import FoundPage, Load, LoadedPage, Next, Piece
from coppice.runtime.tiers.rates import Rate, worth
from coppice.runtime.tiers.store import Place, Store, TierFailed
from coppice.runtime.tiers.told import TiersTold

logger = logging.getLogger(__name__)

_THREADS = 2
_PIECE_BYTES = 8 * 2**20  # of one read: large enough for a disk, small enough to be taken at once
_FLYING_BYTES = 256 * 2**20  # that wait to be read for one sequence: steps may be long
_STAGED_BYTES = 512 * 2**20  # that were read for sequences that do not run yet
_TAKEN_BYTES = 64 * 2**20  # copied to pages between two steps, so that no step waits for long
_EXPECTED = 1e9  # bytes a second of a tier that was never read
_REST_SECONDS = 10.0  # for which a tier that failed is not asked


class Loads:
    """The loads of one engine's sequences.

    `begin` asks the tiers for a sequence that has entered the queue; `poll` takes their answers,
    and has threads read. A running sequence asks `next` what it may do, and gets its pages by
    `take`. Only the threads touch the stores, and nothing else.

    What a sequence of the same prompt is about to bring back is not loaded twice: it is asked for
    when the other runs, and then the scheduler has it wait for that one's pages.
    """

    def __init__(
        self,
        stores: Seq[Store],
        *,
        page_size: int,
        page_bytes: int,
        device: torch.device,
        root: Callable[[Hashable], bytes | None],
        compute_seconds: Callable[[int, int], float | None],
        known: Known,
        told: TiersTold,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with no load.

        Args:
            stores: the tiers, the fastest first.
            page_size: tokens of a page.
            page_bytes: of a packed page.
            device: of the pool's pages.
            root: the name with which the chain of a namespace begins; None: it is not kept.
            compute_seconds: how long some tokens after some others take to compute; None: unknown.
            known: gets the names of pages that were found.
            told: gets what was done.
            clock: seconds, which never go back.
        """
        self._stores = stores
        self._size, self._page_bytes, self._device = page_size, page_bytes, device
        self._root, self._compute_seconds = root, compute_seconds
        self._known, self._told, self._clock = known, told, clock
        self._rates = [Rate(_EXPECTED) for _ in stores]
        self._rested = [0.0 for _ in stores]  # until when each is not asked
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="coppice-tiers")
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._loads: dict[Sequence, Load] = {}
        self._coming: dict[tuple[Hashable, bytes], Load] = {}  # by tokens up to the first new page
        self._behind: dict[Sequence, Load] = {}  # those that another load has wait
        self._piece_pages = max(1, _PIECE_BYTES // page_bytes)
        self._taken_pages = max(1, _TAKEN_BYTES // page_bytes)
        self._reading = 0

    # -- sequences ---------------------------------------------------------------------------

    def begin(self, sequence: Sequence, cached: int) -> None:
        """Asks tiers for the tokens of a sequence after its first `cached`, which the tree has.

        Does nothing if they were asked for it already, or if another load brings them.
        """
        self._behind.pop(sequence, None)
        if sequence in self._loads or sequence.private or not any(map(self._awake, self._tiers)):
            return
        request = sequence.request
        limit = sequence.hit_limit
        if request.adapter is not None and request.adapter.mark is not None:
            limit = min(limit, request.adapter.begin)  # names say nothing of a mark's adapter
        if limit <= cached or (root := self._root(request.namespace)) is None:
            return
        tokens = sequence.keys(0, limit)
        mark = (request.namespace, tokens[: (cached + self._size) * TOKEN_BYTES])
        other = self._coming.get(mark)
        if other is not None and other.coming and other.sequence.status is Status.WAITING:
            self._behind[sequence] = other
            return
        first = sequence.cached_tokens < 0
        load = Load(sequence, cached, self._size, self._clock(), first)
        self._loads[sequence] = load
        self._coming[mark] = load
        self._threads.submit(self._find, load, root, tokens, cached // self._size)

    @property
    def _tiers(self) -> range:
        return range(len(self._stores))

    def _awake(self, tier: int) -> bool:
        return self._clock() >= self._rested[tier]

    def of(self, sequence: Sequence) -> Load | None:
        """The load of a sequence; None if tiers were not asked for it."""
        return self._loads.get(sequence)

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence in the queue should not be admitted yet.

        Tiers are about to answer, or to bring what it shares with another one in the queue.
        """
        load = self._loads.get(sequence)
        return load.finding if load is not None else sequence in self._behind

    def next(self, load: Load, count: int) -> Next:
        """What a running sequence with `count` tokens to compute does now; see `Next`."""
        return load.next(load.sequence.computed, count, self._taken_pages)

    def take(self, load: Load, tokens: int) -> list[LoadedPage]:
        """The pages of the next `tokens` of a sequence, which `next` has offered."""
        sequence = load.sequence
        context = sequence.computed
        pages = load.take(context, tokens)
        told = self._told
        if not load.served:
            load.served = True
            told.requests += 1
        seconds = self._compute_seconds(tokens, context)
        told.saved_seconds += seconds or 0.0
        end = context
        for page in pages:
            store = self._stores[page.found.tier]
            counts = told.tiers[store.name]
            counts.loaded_pages += 1
            counts.loaded_bytes += store.kept_bytes(self._page_bytes)
            border = end // self._size * self._size
            following = border + page.found.place.tokens
            counts.loaded_tokens += following - end
            end = following
        return pages

    def drop(self, sequence: Sequence) -> None:
        """Forgets the load of a sequence, which was served, was preempted or has ended."""
        self._behind.pop(sequence, None)
        if (load := self._loads.pop(sequence, None)) is not None:
            load.give_up()
            for mark in [mark for mark, other in self._coming.items() if other is load]:
                del self._coming[mark]

    # -- between steps -----------------------------------------------------------------------

    @property
    def about_to_come(self) -> bool:
        """Whether tiers are about to answer, or a running sequence has pages or waits for some."""
        return any(
            load.finding or (load.sequence.status is Status.RUNNING and not load.over)
            for load in self._loads.values()
        )

    def poll(self) -> None:
        """Takes what the threads have done, gives up what is too slow, and has more read."""
        while True:
            try:
                self._done.get_nowait()()
            except Empty:
                break
        if self._loads:
            self._check_patience()
            self._read_more()

    def wait(self, seconds: float) -> None:
        """Waits until a thread has done something, for at most `seconds`."""
        if self.about_to_come or self._reading:
            try:
                self._done.get(timeout=seconds)()
            except Empty:
                return

    def close(self) -> None:
        """Ends the threads once they have done what they do."""
        for sequence in list(self._loads):
            self.drop(sequence)
        self._threads.shutdown(cancel_futures=True)

    def _check_patience(self) -> None:
        now = self._clock()
        for load in self._loads.values():
            if load.finding:
                patience = self._rates[0].patience(0)
            elif load.pieces:
                slowest = min(self._rates, key=lambda rate: rate.value)
                patience = slowest.patience(self._piece_pages * self._page_bytes * load.pieces)
            else:
                continue
            if now - load.asked > patience:
                load.give_up()
                for counts in self._told.tiers.values():
                    counts.slow += 1

    def _read_more(self) -> None:
        """Has threads read, for those that run first, for others as far as there is room."""
        staged = sum(load.staged for load in self._loads.values()) * self._page_bytes
        ordered = sorted(self._loads.values(), key=lambda load: load.sequence.status.value)
        for load in ordered:  # "running" before "waiting"
            waits = load.sequence.status is Status.WAITING
            while load.pieces * self._piece_pages * self._page_bytes < _FLYING_BYTES:
                if waits and staged >= _STAGED_BYTES:
                    return
                if (piece := load.piece(self._piece_pages)) is None:
                    break
                if load.pieces == 1:
                    load.asked = self._clock()
                staged += len(piece.pages) * self._page_bytes
                self._reading += 1
                self._threads.submit(self._read, load, piece)

    # -- in threads --------------------------------------------------------------------------

    def _find(self, load: Load, root: bytes, tokens: bytes, first: int) -> None:
        """Finds the pages of a prompt from index `first` on."""
        pages: dict[int, FoundPage] = {}
        failed: list[int] = []
        try:
            keys = chain(root, tokens, self._size * TOKEN_BYTES)
            awake = [tier for tier in self._tiers if self._awake(tier)]
            for tier in awake:
                missing = [index for index in range(first, len(keys)) if index not in pages]
                try:
                    places = self._stores[tier].find([keys[index] for index in missing])
                except TierFailed as error:
                    failed.append(tier)
                    logger.warning("%s", error)
                    continue
                for index, place in zip(missing, places, strict=True):
                    if place is not None:
                        pages[index] = FoundPage(tier, keys[index], place)
            after = max(pages, default=first - 1) + 1
            if after < len(keys):
                self._find_part(after, keys[after], [t for t in awake if t not in failed], pages)
        except Exception:
            logger.exception("a tier could not be asked")
            pages = {}
        self._done.put(lambda: self._found(load, pages, failed))

    def _find_part(
        self, index: int, key: PageKey, tiers: list[int], pages: dict[int, FoundPage]
    ) -> None:
        """Finds a page of which only the first tokens agree."""
        best: Place | None = None
        for tier in tiers:
            try:
                place = self._stores[tier].find_longest(key)
            except TierFailed as error:
                logger.warning("%s", error)
                continue
            if place is not None and (best is None or place.tokens > best.tokens):
                best = place
                part = PageKey(key.parent, key.tokens[: place.tokens * TOKEN_BYTES])
                pages[index] = FoundPage(tier, part, place)

    def _read(self, load: Load, piece: Piece) -> None:
        """Reads a piece into memory."""
        buffer: torch.Tensor | None = None
        right: list[bool] = []
        failed, start = False, time.perf_counter()
        try:
            buffer = host_rows(len(piece.pages), self._page_bytes, self._device)
            right = self._stores[piece.tier].load(
                [page.key for page in piece.pages],
                [page.place for page in piece.pages],
                buffer.numpy(),
            )
        except TierFailed as error:
            logger.warning("%s", error)
            failed, buffer = True, None
        except Exception:
            logger.exception("a tier could not be read")
            failed, buffer = True, None
        seconds = time.perf_counter() - start
        self._done.put(lambda: self._came(load, piece, buffer, right, seconds, failed))

    # -- what threads have done, in the engine's ---------------------------------------------

    def _found(self, load: Load, pages: dict[int, FoundPage], failed: list[int]) -> None:
        for tier in failed:
            self._rest(tier)
        if not load.finding:
            return
        load.finding = False
        computed = max(load.begin, load.sequence.computed)
        tokens = sum(
            max(0, index * self._size + page.place.tokens - max(computed, index * self._size))
            for index, page in pages.items()
        )
        if not tokens:
            return
        for page in pages.values():
            self._known.add(page.key.name)
        self._told.found_tokens += tokens
        seconds = sum(self._page_bytes / self._rates[page.tier].value for page in pages.values())
        alone = self._compute_seconds(tokens, min(pages) * self._size)
        found = worth(seconds, alone)
        if not found.loads:
            self._told.computed_instead += tokens
            return
        load.together = found.together
        load.load_rate = tokens / max(seconds, 1e-9)
        load.compute_rate = tokens / alone if alone else 1e-9
        load.found(pages)

    def _came(
        self,
        load: Load,
        piece: Piece,
        buffer: torch.Tensor | None,
        right: list[bool],
        seconds: float,
        failed: bool,
    ) -> None:
        self._reading -= 1
        size = len(piece.pages) * self._page_bytes
        counts = self._told.tiers[self._stores[piece.tier].name]
        counts.load_seconds += seconds
        if failed:
            self._rest(piece.tier)
        else:
            self._rates[piece.tier].observe(size, seconds)
        for page, good in zip(piece.pages, right, strict=False):
            if not good:
                self._known.discard(page.key.name)
        load.came(piece, buffer, right, self._clock())

    def _rest(self, tier: int) -> None:
        """Leaves a tier alone for a while: it could not answer."""
        self._told.tiers[self._stores[tier].name].failures += 1
        self._rested[tier] = self._clock() + _REST_SECONDS
