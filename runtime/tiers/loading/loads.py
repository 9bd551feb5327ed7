"""Brings pages back from tiers for the sequences of one engine, in threads beside its steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue

from coppice.kernels.pages.transfers import PageTransfers, Staged
from coppice.radix.mirror.leaving import Known
from coppice.radix.mirror.names import Salt
from coppice.radix.tokens import TOKEN_BYTES
from coppice.runtime.requests.request import Sequence, Status
from coppice.runtime.tiers.loading.finding import Finding
from coppice.runtime.tiers.loading.load import FoundPage, Load, LoadedPage, Next, Piece
from coppice.runtime.tiers.loading.rates import Rate, worth
from coppice.runtime.tiers.store import Store, TierFailed
from coppice.runtime.tiers.told import TiersTold

logger = logging.getLogger(__name__)

_THREADS = 2
_PIECE_BYTES = 8 * 2**20  # of one read: large enough for a disk, small enough to be taken at once
_PIECE_SECONDS = 0.03  # that one read may take: with a slow tier less is read at once
_FLYING_BYTES = 256 * 2**20  # that wait to be read for one sequence: steps may be long
_STAGED_BYTES = 512 * 2**20  # that are read for sequences that do not run yet
_RUNNING_BYTES = 1 << 30  # the same for those that run, beside one piece for each
_TAKEN_BYTES = 64 * 2**20  # copied to pages between two steps, so that no step waits for long
_EXPECTED = 1e9  # bytes a second of a tier that was never read
_REST_SECONDS = 10.0  # for which a tier that failed is not asked
_AGAIN_SECONDS = 2.0  # between two times that tiers are asked again for a sequence


class Loads:
    """The loads of one engine's sequences.

    `begin` asks the tiers for a sequence that has entered the queue; `poll` takes their answers,
    and has threads read. A running sequence asks `next` what it may do, and gets its pages by
    `take`. Only threads touch the stores, those of `finding` and `reading`, and nothing else.

    What a sequence of the same prompt is about to bring back is not loaded twice: it is asked for
    when the other runs, and then the scheduler has it wait for that one's pages.
    """

    def __init__(
        self,
        stores: Seq[Store],
        *,
        page_size: int,
        transfers: PageTransfers,
        root: Callable[[Hashable], bytes | None],
        salt: Salt | None = None,
        compute_seconds: Callable[[int, int], float | None],
        known: Known,
        told: TiersTold,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with no load.

        Args:
            stores: the tiers, the fastest first.
            page_size: tokens of a page.
            transfers: give memory for what is read.
            root: the name with which the chain of a namespace begins; None: it is not kept.
            salt: what pages depend on beside that, see `chain`; called in any thread.
            compute_seconds: how long some tokens after some others take to compute; None: unknown.
            known: gets the names of pages that were found.
            told: gets what was done.
            clock: seconds, which never go back.
        """
        self._stores = stores
        self._size, self._transfers = page_size, transfers
        self._page_bytes = page_bytes = transfers.page_bytes
        self._root, self._compute_seconds = root, compute_seconds
        self._known, self._told, self._clock = known, told, clock
        self._rates = [Rate(_EXPECTED) for _ in stores]
        self._rested = [0.0 for _ in stores]  # until when each is not asked
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.finding = Finding(
            stores,
            page_size=page_size,
            salt=salt,
            awake=self._awake,
            failed=self._rest,
            found=self._found,
            done=self._done,
            clock=clock,
        )
        # Each tier has its own, so that none waits for another.
        self.reading = [
            ThreadPoolExecutor(_THREADS, f"coppice-{each.name}-load") for each in stores
        ]
        self._loads: dict[Sequence, Load] = {}
        self._coming: dict[Hashable, Load] = {}  # by tokens up to the first new page
        self._behind: dict[Sequence, Load] = {}  # those that another load has wait
        self._piece_pages = max(1, _PIECE_BYTES // page_bytes)
        self._taken_pages = max(1, _TAKEN_BYTES // page_bytes)
        self._queued: dict[Load, list[tuple[Piece, Future[None]]]] = {}
        self._at_once = [0 for _ in stores]  # threads that read now
        self._counting = threading.Lock()
        # Of each tier: when it last brought a piece; the pieces that it has to bring.
        self._brought = [0.0 for _ in stores]
        self._pieces = [0 for _ in stores]
        self._new: list[Load] = []  # that were found to be worth it since `found` was called

    # -- sequences ---------------------------------------------------------------------------

    def begin(self, sequence: Sequence, cached: int) -> None:
        """Asks tiers for the tokens of a sequence after its first `cached`, which the tree has.

        Does nothing if they were asked for it already, or if another load brings them.
        """
        self._behind.pop(sequence, None)
        if sequence in self._loads:
            return
        self._ask(sequence, None, cached, sequence.hit_limit)

    def asks_again(self, sequence: Sequence, cached: int) -> bool:
        """Whether a sequence that is about to run should wait, since tiers are asked once more.

        They are if the tree has lost what they were not asked for, since it had it: they may have
        got it. They are asked again every few seconds at most, lest a sequence wait for ever.
        """
        load = self._loads.get(sequence)
        if load is None or cached >= load.border or load.finding or self._clock() < load.again:
            return False
        self._ask(sequence, load, cached, load.border)
        return self.waits(sequence)

    def _ask(self, sequence: Sequence, load: Load | None, cached: int, limit: int) -> None:
        """Asks tiers for a sequence's tokens from `cached` to `limit`, unless another load does.

        `load`: that of the sequence; None: it begins.
        """
        if sequence.private or limit <= cached or not any(map(self.finding.awake, self._tiers)):
            return
        request = sequence.request
        if (root := self._root(request.namespace)) is None:
            return
        tokens = sequence.keys(0, limit)
        mark = (request.namespace, tokens[: (cached + self._size) * TOKEN_BYTES])
        other = self._coming.get(mark)
        if (
            other is not None
            and other is not load
            and other.coming
            and other.sequence.status is Status.WAITING
            and other.sequence.request.priority <= request.priority
        ):
            self._behind[sequence] = other
            return
        if load is None:
            first = sequence.cached_tokens < 0
            load = Load(sequence, cached, self._size, self._clock(), first, mark)
            self._loads[sequence] = load
        else:
            self._brings_no_more(load)
            load.ask_again(cached, mark, self._clock() + _AGAIN_SECONDS)
        self._coming[mark] = load
        self.finding.ask(load, root, tokens)

    def _brings_no_more(self, load: Load) -> None:
        """What others would load as well need not wait for a load any more."""
        if self._coming.get(load.mark) is load:
            del self._coming[load.mark]

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
        return sequence in self._behind or (load is not None and load.finding)

    def next(self, load: Load, count: int) -> Next:
        """What a running sequence with `count` tokens to compute does now; see `Next`."""
        return load.next(load.sequence.computed, count, self._taken_pages)

    def take(self, load: Load, tokens: int) -> list[LoadedPage]:
        """The pages of the next `tokens` of a sequence, which `next` has offered.

        Call `took` once they are copied.
        """
        return load.take(load.sequence.computed, tokens)

    def took(self, load: Load, pages: Seq[LoadedPage], tokens: int) -> None:
        """Counts pages as taken over: the next `tokens` of a sequence."""
        context = load.sequence.computed
        told = self._told
        if not load.served:
            load.served = True
            told.requests += 1
        seconds = self._compute_seconds(tokens, context)
        if seconds is not None:
            reading = sum(self._page_bytes / self._rates[page.found.tier].value for page in pages)
            told.saved_seconds += max(0.0, seconds - reading)
        end = context
        for page in pages:
            store = self._stores[page.found.tier]
            counts = told.tiers[store.name]
            counts.loaded_pages += 1
            counts.loaded_bytes += store.kept_bytes(self._page_bytes)
            border = end // self._size * self._size
            following = border + page.found.place.tokens
            counts.loaded_tokens += following - end
            load.account.came(end, following, store.name)
            end = following

    def drop(self, sequence: Sequence) -> None:
        """Forgets the load of a sequence, which was served, was preempted or has ended."""
        self._behind.pop(sequence, None)
        if (load := self._loads.pop(sequence, None)) is not None:
            load.give_up()
            self._withdraw(load)
            self._queued.pop(load, None)  # what a thread reads now, `_came` counts
            load.forget()
            self._brings_no_more(load)

    # -- between steps -----------------------------------------------------------------------

    @property
    def about_to_come(self) -> bool:
        """Whether tiers are about to answer, or a running sequence has pages or waits for some."""
        return any(
            # A beam that waits for its siblings computes nothing, and takes no pages either.
            load.finding
            or (
                load.sequence.status is Status.RUNNING
                and load.sequence.remaining > 0
                and not load.over
            )
            for load in self._loads.values()
        )

    def poll(self) -> None:
        """Takes what the threads have done, gives up what is too slow, and has more read."""
        self._take_done()
        if self._loads:
            self._check_patience()
            for load in self._loads.values():
                if load.together:  # it may have come less far, or further, than was expected
                    self._withdraw(load)
                    self._expect(load)
            self._read_more()

    def _take_done(self) -> None:
        while True:
            try:
                self._done.get_nowait()()
            except Empty:
                return

    def found(self) -> list[Load]:
        """Loads that were found to be worth it since the last call."""
        found, self._new = self._new, []
        return found

    def wait(self, seconds: float) -> None:
        """Waits until a thread has done something, for at most `seconds`."""
        if self.about_to_come or any(self._pieces):
            try:
                self._done.get(timeout=seconds)()
            except Empty:
                return

    def close(self) -> None:
        """Ends the threads once they have done what they do."""
        for sequence in list(self._loads):
            self.drop(sequence)
        self.finding.close()
        for threads in self.reading:
            threads.shutdown(cancel_futures=True)

    def _check_patience(self) -> None:
        """Gives up what comes from a tier that has done nothing for too long.

        A tier that answers nobody is left alone for a while, as one that fails: those that wait for
        its answer go on to the next one together, and no other has to wait for as long.
        """
        now, each = self._clock(), self._page_bytes * _THREADS
        stuck = {
            tier
            for tier, (rate, pages) in enumerate(zip(self._rates, self._at_a_time(), strict=True))
            if self._pieces[tier] and now - self._brought[tier] > rate.patience(each * pages)
        }
        silent = set[int]()
        for load in self._loads.values():
            if load.finding:
                tier, seconds = self.finding.silent(load)
                if seconds > self._rates[tier].patience(0):
                    silent.add(tier)
            elif given_up := load.tiers & stuck:
                self._withdraw(load)  # else threads would read it once the tier goes on
                for tier in given_up:
                    self._slow(tier)
                    load.give_up(tier)
        for tier in silent:
            self._slow(tier, self._leave(tier))
        if silent:  # there may be no tier left to be asked
            self._take_done()

    def _leave(self, tier: int) -> int:
        """Leaves a tier alone for a while; returns for how many loads it had not answered."""
        self._rested[tier] = self._clock() + _REST_SECONDS
        return self.finding.leave(tier)

    def _at_a_time(self) -> list[int]:
        """Pages that are read by one call, of each tier."""
        return [
            max(1, min(self._piece_pages, int(rate.value * _PIECE_SECONDS / self._page_bytes)))
            for rate in self._rates
        ]

    def _slow(self, tier: int, loads: int = 1) -> None:
        self._told.tiers[self._stores[tier].name].slow += loads

    def _withdraw(self, load: Load) -> None:
        """Takes back what is about to be read for a load, and that no thread has begun to."""
        left = []
        for piece, future in self._queued.pop(load, ()):
            if future.cancel():
                self._pieces[piece.tier] -= 1
                load.withdraw(piece)
            elif not future.done():
                left.append((piece, future))
        if left:
            self._queued[load] = left

    def _expect(self, load: Load) -> None:
        """Has a load that goes together with computing know how fast both are now."""
        if tiers := load.tiers:
            slowest = min(self._rates[tier].value for tier in tiers)
            load.load_rate = self._size * slowest / self._page_bytes
        sequence = load.sequence
        if sequence.status is Status.RUNNING:
            now, computed = self._clock(), sequence.computed
            if load.began is None:
                load.began = now, computed
            elif computed > load.began[1]:
                load.compute_rate = (computed - load.began[1]) / max(now - load.began[0], 1e-9)

    def _read_more(self) -> None:
        """Has threads read, for those that run first, for others as far as there is room."""
        most = self._at_a_time()
        # Bytes that were read, or are about to be, of sequences that wait and of those that run.
        held = {True: 0, False: 0}
        for load in self._loads.values():
            waits = load.sequence.status is Status.WAITING
            held[waits] += (load.staged + load.flying) * self._page_bytes
        ordered = sorted(self._loads.values(), key=lambda load: load.sequence.status.value)
        for load in ordered:  # "running" before "waiting"
            waits = load.sequence.status is Status.WAITING
            while load.flying * self._page_bytes < _FLYING_BYTES:
                if waits and held[waits] >= _STAGED_BYTES:
                    return
                if held[waits] >= _RUNNING_BYTES and (load.staged or load.flying):
                    break
                if (piece := load.piece(most)) is None:
                    break
                held[waits] += len(piece.pages) * self._page_bytes
                if not self._pieces[piece.tier]:
                    self._brought[piece.tier] = self._clock()
                self._pieces[piece.tier] += 1
                future = self.reading[piece.tier].submit(self._read, load, piece)
                self._queued.setdefault(load, []).append((piece, future))

    # -- in threads --------------------------------------------------------------------------

    def _read(self, load: Load, piece: Piece) -> None:
        """Reads a piece into memory."""
        staged: Staged | None = None
        right: list[bool] = []
        failed, start = False, time.perf_counter()
        with self._counting:
            self._at_once[piece.tier] += 1
            at_once = self._at_once[piece.tier]
        try:
            rows = self._transfers.room(len(piece.pages))
            right = self._stores[piece.tier].load(
                [page.key for page in piece.pages],
                [page.place for page in piece.pages],
                rows.numpy(),
            )
            staged = self._transfers.stage(rows)
        except TierFailed as error:
            logger.warning("%s", error)
            failed = True
        except BaseException:  # likewise
            logger.exception("a tier could not be read")
            failed = True
        with self._counting:
            at_once += self._at_once[piece.tier]
            self._at_once[piece.tier] -= 1
        # Threads that read at the same time share what the tier gives.
        seconds = (time.perf_counter() - start) / (at_once / 2)
        self._done.put(lambda: self._came(load, piece, staged, right, seconds, failed))

    # -- what threads have done, in the engine's ---------------------------------------------

    def _found(self, load: Load, pages: dict[int, FoundPage]) -> None:
        for name in load.missed:  # a tier has forgotten it, or never had it
            self._known.discard(name)
        if not load.finding:
            return
        load.finding = False
        computed, before = max(load.begin, load.sequence.computed), load.account.found_tokens
        load.account.has(
            (max(computed, index * self._size), index * self._size + page.place.tokens)
            for index, page in sorted({**load.before, **pages}.items())
        )
        tokens = load.account.found_tokens - before
        if not pages or tokens <= 0:
            return
        if len(self._stores) == 1:  # else another one may not have them
            for page in pages.values():
                self._known.add(page.key.name)
        self._told.found_tokens += tokens
        seconds = sum(self._page_bytes / self._rates[page.tier].value for page in pages.values())
        alone = self._compute_seconds(tokens, min(pages) * self._size)
        found = worth(seconds, alone)
        if not found.loads:
            self._told.computed_instead += tokens
            for tier in {page.tier for page in pages.values()}:
                self._rates[tier].declined()
            return
        load.together = load.together or found.together
        load.load_rate = tokens / max(seconds, 1e-9)
        load.compute_rate = tokens / alone if alone else 1e-9
        load.bonus += round(tokens * min(1.0, found.seconds / alone)) if alone else tokens
        load.found(pages)
        self._new.append(load)

    def _came(
        self,
        load: Load,
        piece: Piece,
        staged: Staged | None,
        right: list[bool],
        seconds: float,
        failed: bool,
    ) -> None:
        tier = piece.tier
        self._pieces[tier] -= 1
        self._brought[tier] = self._clock()
        counts = self._told.tiers[self._stores[tier].name]
        counts.load_seconds += seconds
        if failed:
            self._rest(tier)
        else:
            self._rates[tier].observe(len(piece.pages) * self._page_bytes, seconds)
        for page, good in zip(piece.pages, right, strict=False):
            if not good:
                self._known.discard(page.key.name)
        load.came(piece, staged, right)

    def _rest(self, tier: int) -> None:
        """Leaves a tier alone for a while: it could not answer."""
        self._told.tiers[self._stores[tier].name].failures += 1
        self._leave(tier)
