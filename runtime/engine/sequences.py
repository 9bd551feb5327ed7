"""The unfinished sequences of all requests, which begin, are forked and end here."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, wait

from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.requests.request import Request, Sequence, Status
from coppice.runtime.sampling.drafts.draft import Speculation
from coppice.runtime.schedule.scheduler import Scheduler


class Sequences:
    """Every sequence that runs or waits, by its request.

    A request begins with one sequence. Its siblings (`n`) are forked when its first token is
    sampled, the beams of a search at any step.

    Attributes:
        compiling: those that cannot be scheduled yet, since their grammar is not compiled.
        speculation: is told of each sequence that ends; None: there is none.
    """

    def __init__(self, scheduler: Scheduler, counters: EngineCounters) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._of: dict[str, list[Sequence]] = {}
        self._arrivals = 0
        self.compiling: list[Sequence] = []
        self.speculation: Speculation | None = None

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._of.values():
            yield from sequences

    def of(self, request_id: str) -> Seq[Sequence]:
        """The sequences of one request (a copy); none if it is unknown."""
        return tuple(self._of.get(request_id, ()))

    def names(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._of)

    def longest(self) -> int:
        """The most tokens that a request may grow to; 0 without requests."""
        return max((lines[0].request.max_length for lines in self._of.values()), default=0)

    def queued(self) -> tuple[int, int]:
        """How many requests wait to begin, and how many tokens their prompts have.

        Preempted sequences, siblings and beams without a place do not count: their requests began.
        """
        waiting, compiling = self._scheduler.waiting, self.compiling
        tokens = sum(len(each.tokens) for each in compiling)
        return waiting.requests + len(compiling), waiting.tokens + tokens

    def next_arrival(self) -> int:
        """The next serial number; forked sequences get one too."""
        self._arrivals += 1
        return self._arrivals - 1

    def begin(self, sequence: Sequence) -> None:
        """Registers the first sequence of a request and queues it, once its grammar is compiled."""
        self._of[sequence.request.request_id] = [sequence]
        self._counters.arrived(sequence.request.request_id)
        if sequence.request.grammar is None:
            self._scheduler.add(sequence)
        else:
            self.compiling.append(sequence)

    def compiled(self) -> list[tuple[Sequence, str]]:
        """Queues the sequences whose grammar is compiled now.

        Returns those whose grammar failed, and why. O(sequences that wait for a grammar).
        """
        failed = []
        for sequence in list(self.compiling):
            grammar = sequence.request.grammar
            assert grammar is not None
            if not grammar.done():
                continue
            if (error := grammar.exception()) is not None:
                failed.append((sequence, f"structured_outputs: {error}"))
                continue
            self.compiling.remove(sequence)
            self._scheduler.add(sequence)
        return failed

    def wait_for_grammar(self, seconds: float) -> None:
        """Waits for a grammar for at most `seconds`; returns at once if none is being compiled."""
        grammars = [each.request.grammar for each in self.compiling]
        wait([each for each in grammars if each is not None], seconds, FIRST_COMPLETED)

    def end(self, sequence: Sequence, reason: str, *, keep: bool = True) -> bool:
        """Ends a sequence for one of `FINISH_REASONS`; `keep` as in `Paging.leave`.

        Returns whether it was its request's last one.
        """
        if sequence in self.compiling:
            self.compiling.remove(sequence)
            sequence.status = Status.FINISHED
        else:
            waits = sequence.status is Status.WAITING
            self._scheduler.finish(sequence, keep=keep)
            if waits and not keep and sequence.request.beam_search and sequence.num_generated:
                self._scheduler.paging.forget(sequence)
        if self.speculation is not None:
            self.speculation.ended(sequence)
        request_id = sequence.request.request_id
        self._of[request_id].remove(sequence)
        if self._of[request_id]:
            return False
        del self._of[request_id]
        self._counters.ended(request_id, reason)
        return True

    # -- siblings ----------------------------------------------------------------------------

    def with_siblings(self, sampled: list[Sequence]) -> list[int]:
        """Adds new siblings to the sequences of a step, to be sampled from the same logits.

        Inserts them in `sampled` after the first sequence of their request; returns the row of the
        logits for each entry of `sampled`. `enter` gives them their pages.
        """
        if all(each.forked for each in sampled):
            return list(range(len(sampled)))
        rows, all_sampled = [], []
        for row, first in enumerate(sampled):
            count = 1 if first.forked else first.request.params.n
            first.forked = True
            all_sampled.append(first)
            all_sampled += [self._forked(first.request, index) for index in range(1, count)]
            rows += [row] * count
        sampled[:] = all_sampled
        return rows

    def _forked(self, request: Request, index: int) -> Sequence:
        sequence = Sequence(request, index, self.next_arrival())
        sequence.forked = True
        return sequence

    def enter(self, sampled: Seq[Sequence]) -> None:
        """Forks the new siblings among `sampled` from their request's first sequence."""
        for sequence in sampled:
            if sequence.index and sequence.status is Status.WAITING:
                siblings = self._of[sequence.request.request_id]
                self._scheduler.fork(siblings[0], sequence)
                siblings.append(sequence)

    # -- beams -------------------------------------------------------------------------------

    def fork(self, parent: Sequence, token: int) -> Sequence:
        """Makes a sequence of the same request with all tokens of `parent`, then `token`."""
        child = self._forked(parent.request, parent.index)
        child.tokens = parent.tokens[:]
        if parent.logit_rules is not None:
            child.logit_rules = parent.logit_rules.forked()
        placed = parent.status is Status.RUNNING and self._scheduler.fork(parent, child)
        child.tokens.append(token)
        if not placed:
            child.cached_tokens, child.counted = parent.cached_tokens, True
            child.cached_by_tier = parent.cached_by_tier
            child.preempted = True
            self._scheduler.add(child)
        self._of[parent.request.request_id].append(child)
        return child

    def append(self, sequence: Sequence, token: int) -> None:
        """Appends a beam's next token; one that was preempted meanwhile is queued anew with it."""
        waits = sequence.status is Status.WAITING
        if waits:
            self._scheduler.waiting.remove(sequence)
        sequence.tokens.append(token)
        if waits:
            self._scheduler.add(sequence)
