"""Simulates the scheduler on a model of a machine: how long requests wait, without computing.

`coppice simulate` and the scheduler's benchmark use it.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from coppice.radix import PagePool, RadixTree
from coppice.runtime.offline.machine import Machine
from coppice.runtime.offline.usage import Usage
from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.chunks import Schedule
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.schedule.scheduler import Scheduler

_PARAMS = SamplingParams()
_GENERATED = 1 << 30  # generated tokens are above any vocabulary, and differ between sequences


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the time at which it arrives."""

    time: float  # seconds
    prompt: array[int]
    output: int  # tokens that it will generate, at least 1
    namespace: Hashable = None
    priority: int = 0
    label: str = ""  # by which results are grouped
    generated: array[int] | None = None  # these tokens, if they are known; `output` of them


@dataclass(slots=True)
class Outcome:
    """How a request was served."""

    arrival: Arrival
    number: int  # its index among the arrivals
    hit_tokens: int = 0
    first_token: float = 0.0  # its time, in seconds
    end: float = 0.0  # time of the last token so far

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.first_token - self.arrival.time

    @property
    def latency(self) -> float:
        """Time to the last token, in seconds."""
        return self.end - self.arrival.time


class Simulation:
    """Runs arrivals through the real scheduler and tree on a `Machine`, with a virtual clock.

    Generated tokens occur in no prompt, unless the arrival has them. Only steps take time, as long
    as the machine gives. `usage` has what the steps used; running sequences hold pages from the
    step that computes their first chunk to that with their last token, and pages that only the
    cache keeps count as free.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        pool_tokens: int,
        page_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        policy: str = "lpm",
        eviction_policy: str = "lru",
        overtaking: float | None = None,
        max_step_stretch: float | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.machine = machine
        self.usage = Usage()
        self.now = 0.0
        self.steps = 0
        self.decoded = 0  # tokens, of all sequences
        # The number of gaps between two tokens of a sequence, by label and seconds, rounded to a
        # millionth.
        self.gaps: Counter[tuple[str, float]] = Counter()
        self.tree = RadixTree(PagePool(-(-pool_tokens // page_size), page_size), eviction_policy)
        self.paging = Paging(self.tree, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(
            self.paging,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            overtaking=overtaking,
            max_step_stretch=max_step_stretch,
        )
        self._outcomes: dict[Sequence, Outcome] = {}

    def run(self, arrivals: Iterable[Arrival]) -> list[Outcome]:
        """Serves all of them, in order of time; returns the outcome of each, in that order.

        Raises ValueError if times decrease, or if one does not fit the pool.
        """
        return sorted(self.serve(arrivals), key=lambda outcome: outcome.number)

    def serve(self, arrivals: Iterable[Arrival]) -> Iterator[Outcome]:
        """Like `run`, but yields each outcome when its request ends, and keeps none."""
        coming = iter(arrivals)
        following = next(coming, None)
        number = 0
        while following is not None or self._outcomes:
            if not self._outcomes and following is not None:
                self.now = max(self.now, following.time)
            while following is not None and following.time <= self.now:
                self._add(following, number)
                number += 1
                time, following = following.time, next(coming, None)
                if following is not None and following.time < time:
                    raise ValueError(f"arrivals: times must not decrease: {following.time}")
            yield from self._step(math.inf if following is None else following.time)

    def _add(self, arrival: Arrival, number: int) -> None:
        length = len(arrival.prompt) + arrival.output
        if length > self.tree.pool.num_pages * self.tree.page_size:
            raise ValueError(f"arrivals: number {number} has {length} tokens, more than the pool")
        request = Request(
            str(number), arrival.prompt, _PARAMS, arrival.namespace, number, 0, length,
            arrival.priority,
        )  # fmt: skip
        sequence = Sequence(request)
        self._outcomes[sequence] = Outcome(arrival, number)
        self.scheduler.add(sequence)

    def _step(self, until: float) -> list[Outcome]:
        """Runs a step, and the equal steps that follow before `until`; returns what ended."""
        schedule = self.scheduler.schedule()
        assert schedule.chunks, "nothing is scheduled, but requests are unfinished"
        seconds = self._spend(schedule)
        self._use(schedule, seconds)
        self.now += seconds
        steady = len(schedule.chunks) == len(self.scheduler.running)
        ended = []
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            steady = steady and chunk.decode
            self.scheduler.computed(chunk)
            if len(sequence.tokens) == sequence.computed:
                outcome = self._sample(sequence)
                if outcome is not None:
                    ended.append(outcome)
        if steady and not ended:
            self._repeat(schedule, seconds, until)
        return ended

    def _spend(self, schedule: Schedule) -> float:
        rows = sum(chunk.decode for chunk in schedule.chunks)
        seconds = self.machine.seconds(schedule.rows() - rows, rows)
        self.scheduler.observe(schedule, seconds)
        self.steps += 1
        return seconds

    def _held(self) -> int:
        """Pages that running sequences hold."""
        pool = self.tree.pool
        return pool.num_pages - pool.free_pages - self.tree.evictable_pages

    def _use(self, schedule: Schedule, seconds: float) -> None:
        """Counts a step that was scheduled and is not computed yet."""
        size, held = self.tree.page_size, self._held()
        coming = {id(chunk.sequence): chunk.count for chunk in schedule.chunks}
        # A page that sequences share is full, but for the last one of each table, its own.
        unused = sum(
            size * len(each.table) - each.computed - coming.get(id(each), 0)
            for each in self.scheduler.running
        )
        rows = sum(chunk.decode for chunk in schedule.chunks)
        first = sum(
            not chunk.decode and chunk.count == chunk.sequence.remaining
            for chunk in schedule.chunks
        )
        self.usage.add(
            self.now, seconds, pages=held, tokens=max(0, size * held - unused), peak=held,
            slots=rows + first, useful=rows + first, sequences=len(self.scheduler.running),
            computed=schedule.rows() - rows,
        )  # fmt: skip

    def _use_repeated(self, sequences: list[Sequence], seconds: float, times: int) -> None:
        """Counts `times` steps in which these sequences decode; before they take their pages."""
        size, held = self.tree.page_size, self._held()
        steps = np.arange(1, times + 1)
        pages, unused = np.full(times, held), np.zeros(times, np.int64)
        for each in sequences:
            table = np.maximum(-(-(each.computed + steps) // size), len(each.table))
            pages += table - len(each.table)
            unused += size * table - each.computed - steps
        rows = len(sequences)
        self.usage.add(
            self.now, times * seconds, steps=times, pages=float(pages.mean()),
            tokens=float(np.maximum(0, size * pages - unused).mean()), peak=int(pages[-1]),
            slots=times * rows, useful=times * rows, sequences=rows,
        )  # fmt: skip

    def _sample(self, sequence: Sequence) -> Outcome | None:
        """Adds the sequence's next token; returns its outcome if that was the last one."""
        outcome, tokens = self._outcomes[sequence], sequence.tokens
        if len(tokens) > len(outcome.arrival.prompt):
            self._gap(outcome, self.now - outcome.end, 1)
        else:
            outcome.first_token = self.now
            outcome.hit_tokens = sequence.cached_tokens
        outcome.end = self.now
        tokens.append(_generated(sequence, outcome.arrival))
        self.decoded += 1
        if len(tokens) < sequence.request.max_length:
            return None
        self.scheduler.finish(sequence)
        return self._outcomes.pop(sequence)

    def _gap(self, outcome: Outcome, seconds: float, count: int) -> None:
        self.gaps[outcome.arrival.label, round(seconds, 6)] += count

    def _repeat(self, schedule: Schedule, seconds: float, until: float) -> None:
        """Repeats a step in which all running sequences decoded, until something else can happen.

        No request was admitted in it, so none will be before one ends or another one arrives: those
        that wait were kept out by the number of running sequences, or for want of free pages, which
        become fewer. The result is that of single steps; only the pages are taken at once.
        """
        sequences = [chunk.sequence for chunk in schedule.chunks]
        times = min(each.request.max_length - len(each.tokens) for each in sequences) - 1
        if until < math.inf and seconds > 0:
            times = min(times, math.ceil((until - self.now) / seconds))
        size = self.tree.page_size
        pages = sum(
            max(0, -(-(each.computed + times) // size) - len(each.table)) for each in sequences
        )
        if times < 1 or until <= self.now:
            return
        if pages > self.tree.pool.free_pages + self.tree.evictable_pages:
            return
        self._use_repeated(sequences, seconds, times)
        for sequence in sequences:
            grown = self.paging.try_grow(sequence, times)
            assert grown, "there were pages enough"
            sequence.computed += times
            arrival = self._outcomes[sequence].arrival
            for _ in range(times):
                sequence.tokens.append(_generated(sequence, arrival))
        for _ in range(times):
            self._spend(schedule)
        self.now += times * seconds
        self.decoded += times * len(sequences)
        for sequence in sequences:
            outcome = self._outcomes[sequence]
            outcome.end = self.now
            self._gap(outcome, seconds, times)


def _generated(sequence: Sequence, arrival: Arrival) -> int:
    """The sequence's next generated token."""
    if arrival.generated is not None:
        return arrival.generated[len(sequence.tokens) - len(arrival.prompt)]
    return _GENERATED | sequence.request.arrival * 8191 + len(sequence.tokens) & (_GENERATED - 1)
