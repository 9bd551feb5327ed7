"""Which tokens of which sequences a step computes: admission, chunks, preemption. No tensors."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

from coppice.radix import Match, OutOfPages, RadixTree
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.requests.request import Sequence, Status
from coppice.runtime.sampling.drafts.draft import Speculation
from coppice.runtime.schedule.chunks import Chunk, Schedule
from coppice.runtime.schedule.drafting import add_drafts
from coppice.runtime.schedule.paging import PageCopy, Paging
from coppice.runtime.schedule.queue import WaitingQueue
from coppice.runtime.schedule.step_times import StepTimes

if TYPE_CHECKING:  # it needs torch, which a simulation of the scheduler does without
    from coppice.runtime.tiers.exchange import Tiers

logger = logging.getLogger(__name__)

# The most sequences that do not fit now and are passed, in one step, by others that do.
LOOK_PAST = 8


class Scheduler:
    """Continuous batching over the pages of one tree.

    Every step is one mixed batch of at most `max_num_batched_tokens` tokens of at most
    `max_num_seqs` sequences: first a token for each sequence that decodes, then chunks of prompts
    that are partly computed, then waiting sequences, longest hit first. With `max_step_stretch` a
    step gets only as many prompt tokens as keep it within that multiple of its decodes' time alone,
    and more where sequences wait (`StepTimes`).

    When pages run out, a sequence may take those of one that was admitted after it, which is
    preempted: its computed tokens enter the tree, and it resumes from those that are still cached.
    Under "priority" sequences of worse classes count as admitted after those of better ones. The
    sequence admitted first is never preempted for another, so every request finishes. Only if it
    runs alone and still lacks pages (it needs a copy of the page in which its hit ends, beside that
    page) it starts again as a *private* sequence, which locks nothing and can evict all the rest.

    Sequences whose last token is late (`Sequence.late`) are scheduled as if it did not end them,
    but not those that end by their length. While there are any (`late`) no sequence is preempted:
    some may have ended already, and the queue needs all tokens of the sequences in it. A sequence
    that lacks pages then waits until the tokens have arrived.

    With `tiers`, a sequence waits in the queue until they have answered what they have of its
    prompt, which counts for its place there by the time that it saves. When it runs, its pages are
    taken over as they come, and what does not come is computed.

    With `speculation`, sequences that decode get drafts from it. They take what all else leaves of
    the budget and of the free pages: nothing is evicted, preempted or put off for a draft. Beams
    get none: which of them go on, and with which tokens, is known only when all are scored.

    Attributes:
        late: whether tokens of running sequences are late; set by the step loop.
        tiers: that keep pages beside the pool; None: there are none.
        speculation: proposes drafts; None: there are none.
        branches: whether a draft may have branches; else its likeliest path is taken.
        times: what steps take, learned for `max_step_stretch` and for `tiers`; None without both.
    """

    def __init__(
        self,
        paging: Paging,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "lpm",
        overtaking: float | None = None,
        max_step_stretch: float | None = None,
        counters: EngineCounters | None = None,
    ) -> None:
        self.paging = paging
        self.counters = EngineCounters() if counters is None else counters
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []  # in order of admission
        self._new_queue = partial(
            WaitingQueue, policy=policy, slack=max_num_batched_tokens, overtaking=overtaking
        )
        self.waiting = self._new_queue(paging.tree)
        self.late = False
        self._admissions = 0
        self._forks: dict[Sequence, PageCopy] = {}  # copies that the next step has to make
        self._schedule = Schedule()  # the one that is being made, or will be
        stretch = math.inf if max_step_stretch is None else max_step_stretch
        self._stretches = math.isfinite(stretch)
        self.times = StepTimes(stretch) if self._stretches else None
        self.tiers: Tiers | None = None
        self.speculation: Speculation | None = None
        self.branches = True

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, in the order that the tokens of it that are cached now give it."""
        cached = self.paging.cached(sequence)
        self.waiting.add(sequence, min(cached, sequence.hit_limit), cached)
        if self.tiers is not None and not sequence.preempted:
            self.tiers.loads.begin(sequence, cached)

    def use(self, tiers: Tiers, times: StepTimes) -> None:
        """Takes pages from tiers from now on; `times` learns what steps take.

        Tiers read pages that are evicted, and write to others, as soon as these were allocated. So
        the copies that were scheduled before are made then, and not with the step.
        """
        self.tiers, self.times = tiers, times
        tiers.before_access = self._make_copies
        self.paging.allocated = tiers.flush

    def _make_copies(self) -> None:
        """Makes the copies that were scheduled so far."""
        assert self.tiers is not None
        copies = [*self._forks.values(), *self._schedule.copies]
        if not copies:
            return
        try:
            self.tiers.copy(copies)
        except BaseException as error:
            # The step fails, with all whose pages were to be copied. To raise it here, an interrupt
            # too, would lose pages that are being handed out.
            # Who leaves before it fails must not keep a page that is not copied: see `_leave`.
            self._schedule.copies, self._schedule.failure = copies, error
        else:
            self._forks.clear()
            self._schedule.copies = []

    def move_to(self, tree: RadixTree) -> None:
        """Continues with another tree while nothing runs; waiting sequences are queued anew."""
        assert not self.running
        waiting = list(self.waiting)
        self.paging.tree = tree
        self.waiting = self._new_queue(tree)
        for sequence in waiting:
            self.add(sequence)

    def schedule(self) -> Schedule:
        """The next step; empty if there is nothing to do. Takes its pages and locks.

        O(running sequences), and O(tokens at memory speed) for each one that is admitted.
        """
        schedule, before = Schedule(), self._schedule
        # Between two steps copies may have failed, which this one reports.
        schedule.failure, schedule.copies = before.failure, before.copies
        self._schedule = schedule
        budget = self.max_num_batched_tokens
        if self.tiers is not None:
            self.tiers.poll()
            for load in self.tiers.loads.found():
                if load.sequence.status is Status.WAITING:
                    self.waiting.prefer(load.sequence, load.begin + load.bonus)
        if self.waiting.policy == "priority":
            self._make_room(schedule)
        # Decodes first, so that a long prompt never stalls them: they are at most max_num_seqs.
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for each in self.running:
            length = len(each.tokens)
            if self.late and length >= each.request.max_length and each.late:
                continue
            (prefilling if length - each.computed > 1 else decoding).append(each)
        budget, served = self._continue(decoding, schedule, budget)
        budget = self._prefill_budget(schedule, prefilling, budget)
        if prefilling:
            budget, all_served = self._continue(prefilling, schedule, budget)
            served = served and all_served
        if served or not self.running:
            self._admit(schedule, budget)
        # Beams may wait for others of their search that can't be admitted: the last request makes
        # room, so that the first one can continue with all of its sequences.
        while (
            not (schedule.chunks or self.late)
            and self.running
            and len(self.waiting)
            and (self.tiers is None or not self.tiers.loads.about_to_come)
        ):
            self.preempt(max(self.running, key=lambda each: (each.request.arrival, each.admitted)))
            self._admit(schedule, budget)
        if schedule.chunks:
            # Before the others: what these copy from may have been given away since.
            schedule.copies[:0] = self._forks.values()
            self._forks.clear()
            if self.speculation is not None and not self.late:
                add_drafts(
                    schedule,
                    self.speculation,
                    self.paging,
                    self.max_num_batched_tokens,
                    branches=self.branches,
                )
        elif self.tiers is not None:
            self._make_copies()  # of sequences that wait for their pages
        self._schedule = Schedule()
        return schedule

    def _continue(
        self, sequences: list[Sequence], schedule: Schedule, budget: int
    ) -> tuple[int, bool]:
        """Schedules running sequences; returns the budget left and whether all got pages."""
        chunks, served, size = schedule.chunks, True, self.paging.page_size
        for sequence in sequences:
            computed = sequence.computed
            count = len(sequence.tokens) - computed
            if count > budget:
                count = budget
            if sequence.status is not Status.RUNNING:  # preempted by one before it
                served = False
            elif count:
                if self.tiers is not None and self.tiers.loads.of(sequence) is not None:
                    taken = self._take_loaded(sequence, count, schedule)
                    if not taken:
                        served = served and taken is not None
                        continue
                    computed, count = sequence.computed, taken
                has_pages = computed + count <= len(sequence.table) * size  # as for most decodes
                if has_pages or self._grow(sequence, count, schedule):
                    chunks.append(Chunk(sequence, count))
                    budget -= count
                else:
                    served = False
        return budget, served

    def _take_loaded(self, sequence: Sequence, count: int, schedule: Schedule) -> int | None:
        """Takes over what has come of a sequence's pages; returns how many tokens it computes now.

        At most `count`; None: it got no pages.
        """
        assert self.tiers is not None
        loads = self.tiers.loads
        load = loads.of(sequence)
        assert load is not None
        ready, allowed = loads.next(load, sequence.remaining)
        if ready:
            if not self._grow(sequence, ready, schedule):
                return None
            try:
                replaced = self.tiers.take(sequence, load, ready)
            except OutOfPages:  # then it computes the rest of the page in which it is
                size = self.paging.page_size
                return min(count, size - sequence.computed % size)
            except Exception:  # its pages have anything in them, and are computed
                logger.exception("pages could not be taken over from a tier")
                self._end_load(sequence)
                return count
            if replaced is not None:  # it was to be copied from a page that has fewer tokens
                schedule.copies = [copy for copy in schedule.copies if copy.target != replaced]
            if load.first:
                sequence.cached_tokens += ready
                before = sequence.cached_by_tier or {}
                sequence.cached_by_tier = before | load.account.tokens()
                computed = sequence.computed
                self.counters.loaded(sequence.request, computed, computed + ready)
            self.paging.commit(sequence, ready)
            ready, allowed = loads.next(load, sequence.remaining)
        if load.over:
            self._end_load(sequence)
        return 0 if ready else min(count, allowed)

    def verified(self, sequence: Sequence, count: int) -> None:
        """Counts `count` tokens of a sequence's draft as computed, and gives back other pages."""
        sequence.computed += count
        self.paging.trim(sequence)

    def _end_load(self, sequence: Sequence) -> None:
        """Nothing more of a running sequence will come from tiers."""
        assert self.tiers is not None
        self.tiers.loads.drop(sequence)
        self.paging.loaded(sequence)

    def _prefill_budget(self, schedule: Schedule, prefilling: list[Sequence], budget: int) -> int:
        """The part of the budget that prompts may take beside the decodes that are scheduled."""
        if self.times is None or not self._stretches or not schedule.chunks:
            return budget
        context = prefilling[0].computed if prefilling else 0
        begin = min(len(self.waiting), self.max_num_seqs - len(self.running))
        waiting = len(prefilling) + max(begin, 0)
        allowed = self.times.prefill_tokens(len(schedule.chunks), context, waiting)
        return budget if allowed is None else min(budget, allowed)

    def observe(self, schedule: Schedule, seconds: float) -> None:
        """Learns from the time that a step took."""
        if self.times is not None:
            prefills = [(chunk.count, chunk.start) for chunk in schedule.prefills()]
            decodes = len(schedule.chunks) - len(prefills)
            self.times.observe(decodes, prefills, seconds, schedule.drafted)

    # -- running sequences -------------------------------------------------------------------

    def _grow(self, sequence: Sequence, count: int, schedule: Schedule) -> bool:
        """Takes pages for a sequence's next tokens, if need be by preempting later ones.

        Returns False if it gets none in this step.
        """
        while True:
            if self.paging.try_grow(sequence, count):
                return True
            if self.late:
                schedule.short = True
                return False
            scheduled = {id(chunk.sequence) for chunk in schedule.chunks}
            mine = self._turn(sequence)
            later = (each for each in self.running if self._turn(each) > mine)
            victims = [each for each in later if id(each) not in scheduled]
            if victims:
                self.preempt(self._cheapest(victims))
            elif len(self.running) > 1:
                return False  # older sequences run; their pages are free once they end
            else:
                assert not sequence.private, "a request was accepted that does not fit the pool"
                self.preempt(sequence)
                sequence.private = True
                return False

    def _turn(self, sequence: Sequence) -> tuple[int, int]:
        """Orders running sequences: each may take pages of those that are greater."""
        by_class = self.waiting.policy == "priority"
        return sequence.request.priority if by_class else 0, sequence.admitted

    def _cheapest(self, victims: list[Sequence]) -> Sequence:
        """The victim that costs least: of the worst class, with the fewest tokens to redo.

        Tokens that it shares with others stay; the rest may be evicted before it resumes. Of
        equals, the one with most work left, then the one admitted last.
        """
        return min(
            victims,
            key=lambda victim: (
                -victim.request.priority,
                self.paging.own_tokens(victim),
                victim.computed - victim.request.max_length,
                -victim.admitted,
            ),
        )

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Lets `child` continue from what the running `parent` has computed; it runs from now on.

        Returns False if there is no place or no page for it: then append its next token and `add`
        it; it will hit what its parent has entered in the tree.
        """
        child.cached_tokens, child.cached_by_tier = parent.cached_tokens, parent.cached_by_tier
        child.counted = True  # its request's time in the queue was
        if len(self.running) < self.max_num_seqs:
            try:
                copy = self.paging.fork(parent, child)
            except OutOfPages:
                pass
            else:
                if copy is not None:
                    self._forks[child] = copy
                self._run(child)
                return True
        child.preempted = True  # it is admitted before new requests
        return False

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        sequence.preempted = False
        sequence.admitted = self._admissions
        self._admissions += 1
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the queue; its computed tokens stay in the tree."""
        self.counters.preemptions += 1
        self.running.remove(sequence)
        computed = not sequence.remaining
        self._leave(sequence, keep=True)
        sequence.status = Status.WAITING
        sequence.preempted = True
        if computed:
            self.waiting.park(sequence)
        else:
            self.waiting.add(sequence, 0)

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
        self.waiting.stop_leading(sequence)
        if self.tiers is not None:
            self.tiers.loads.drop(sequence)
        copied = self._forks.pop(sequence, None) is None
        self.paging.leave(sequence, keep=keep, copied=copied)

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Ends a running or waiting sequence; `keep` as in `Paging.leave`."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._leave(sequence, keep=keep)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            if self.tiers is not None:
                self.tiers.loads.drop(sequence)
        sequence.status = Status.FINISHED

    # -- waiting sequences -------------------------------------------------------------------

    def _admit(self, schedule: Schedule, budget: int) -> None:
        """Admits the next sequences that fit; a few may pass one that does not fit.

        None of a worse class passes it: it would be preempted for the other in the next step.
        """
        looked_past = 0
        passed: Sequence | None = None
        while budget and (found := self.waiting.next()) is not None:
            sequence, next_of_all = found
            if passed is not None and self._worse(sequence, passed):
                break
            match = self.paging.match(sequence)
            asking = self.tiers is not None and self.tiers.asks(sequence, match.length)
            if asking and not sequence.preempted:
                self.waiting.set_aside(sequence)
                continue
            in_flight = self.waiting.in_flight(sequence)
            if len(self.running) >= self.max_num_seqs or not self._fits(sequence, match):
                if len(self.running) >= self.max_num_seqs:
                    break
                if self.running:
                    if next_of_all or looked_past == LOOK_PAST:
                        break
                    self.waiting.set_aside(sequence)
                    looked_past, passed = looked_past + 1, sequence
                    continue
                # Alone, but what the hit locks leaves too few pages: compute it without the hit.
                sequence.private = True
                match = self.paging.match(sequence)
                in_flight = 0
            if (
                self.tiers is not None
                and not sequence.preempted
                and self.tiers.loads.asks_again(sequence, match.length)
            ):
                self.waiting.set_aside(sequence)
                continue
            count = min(len(sequence.tokens) - match.length, budget)
            load = None if self.tiers is None else self.tiers.loads.of(sequence)
            account = None if load is None else load.account
            copy = self.paging.admit(
                sequence, match, count if load is None else 0, in_flight, account
            )
            self.waiting.remove(sequence)
            self._enter(sequence)
            if copy is not None:
                schedule.copies.append(copy)
            if load is not None:
                budget, _ = self._continue([sequence], schedule, budget)
            else:
                schedule.chunks.append(Chunk(sequence, count))
                budget -= count
        self.waiting.restore(self.paging.cached)

    def _make_room(self, schedule: Schedule) -> None:
        """Preempts running sequences of worse classes for a waiting one that lacks a place."""
        while (found := self.waiting.next()) is not None:
            sequence, _ = found
            if self.tiers is not None and self.tiers.loads.waits(sequence):
                break  # it is not admitted yet
            worse = [each for each in self.running if self._worse(each, sequence)]
            full = len(self.running) >= self.max_num_seqs
            if not worse or not (full or not self._fits(sequence, self.paging.match(sequence))):
                return
            if self.late:
                schedule.short = True
                return
            self.preempt(self._cheapest(worse))

    def _worse(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether `sequence` is of a worse class than `other`."""
        by_class = self.waiting.policy == "priority"
        return by_class and sequence.request.priority > other.request.priority

    def _enter(self, sequence: Sequence) -> None:
        self._run(sequence)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
            if self.tiers is not None:
                nothing = dict.fromkeys(self.tiers.names, 0)
                sequence.cached_by_tier = {"pool": sequence.computed} | nothing
            self.counters.admitted(sequence.request, sequence.computed)
        if sequence.remaining > 1 and not sequence.private and self.paging.caching:
            limited = sequence.reader is not None  # it may hit less than is cached
            cached = self.paging.cached(sequence) if limited else sequence.computed
            self.waiting.lead(sequence, cached)
        if self.tiers is not None:
            self.tiers.admitted(sequence)

    def computed(self, chunk: Chunk) -> None:
        """Counts a chunk as computed; what others can hit is entered in the tree."""
        sequence = chunk.sequence
        if chunk.decode:
            sequence.computed += 1  # enters the tree when the sequence leaves: see `Paging.commit`
        else:
            self.paging.commit(sequence, chunk.count)
        if self.waiting.leaders and len(sequence.tokens) - sequence.computed <= 1:
            self.waiting.stop_leading(sequence)

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether a sequence and its next token fit, with a page to spare for each running one.

        Only the pages of the first chunk are taken now, but a prompt is not admitted only to be
        preempted in its next chunk.
        """
        length = min(len(sequence.tokens) + 1, sequence.request.max_length)
        needed = self.paging.pages_needed(length, match) + len(self.running)
        return needed <= self.paging.tree.available_pages(match)
