"""The scheduler against a model of the machine: what requests would wait, without computing."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from coppice.radix import PagePool, RadixTree
from coppice.runtime.paging import Paging
from coppice.runtime.request import Request, Sequence
from coppice.runtime.sampling_params import SamplingParams
from coppice.runtime.scheduler import Schedule, Scheduler

_PARAMS = SamplingParams()
_GENERATED = 1 << 30  # generated tokens lie above any vocabulary, and differ between sequences


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step costs, in seconds: a constant, and so much for each token it computes."""

    step: float
    token: float

    def seconds(self, schedule: Schedule) -> float:
        return self.step + self.token * sum(chunk.count for chunk in schedule.chunks)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that will come."""

    time: float  # seconds
    prompt: array[int]
    output: int  # tokens that it will generate, at least 1
    namespace: Hashable = None
    priority: int = 0
    label: str = ""  # for whoever evaluates


@dataclass(slots=True)
class Outcome:
    """What became of a request."""

    arrival: Arrival
    hit_tokens: int = 0
    first_token: float = 0.0  # time at which it was there, in seconds
    end: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.first_token - self.arrival.time


class Simulation:
    """Runs arrivals through the real scheduler and tree on a `Machine`, with a virtual clock.

    What is generated are tokens that no prompt holds. A step costs what the machine says; nothing
    else takes time.
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
    ) -> None:
        self.machine = machine
        self.now = 0.0
        self.steps = 0
        self.decoded = 0  # tokens, of all sequences
        self.gaps: list[tuple[str, float]] = []  # (label, seconds) between tokens of a sequence
        self.tree = RadixTree(PagePool(-(-pool_tokens // page_size), page_size), eviction_policy)
        self.paging = Paging(self.tree, enable_prefix_caching=True)
        self.scheduler = Scheduler(
            self.paging,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            overtaking=overtaking,
            max_step_stretch=max_step_stretch,
        )
        self._outcomes: dict[str, Outcome] = {}
        self._last: dict[str, float] = {}  # when a sequence got its last token

    def run(self, arrivals: Iterable[Arrival]) -> list[Outcome]:
        """Serves all of them, in order of time; returns what became of each, in that order.

        Raises ValueError if times decrease, or if one does not fit the pool.
        """
        outcomes: list[Outcome] = []
        coming = iter(arrivals)
        following = next(coming, None)
        while following is not None or self._outcomes:
            if not self._outcomes and following is not None:
                self.now = max(self.now, following.time)
            while following is not None and following.time <= self.now:
                outcomes.append(self._add(following, len(outcomes)))
                time, following = following.time, next(coming, None)
                if following is not None and following.time < time:
                    raise ValueError(f"arrivals: times must not decrease: {following.time}")
            self._step()
        return outcomes

    def _add(self, arrival: Arrival, number: int) -> Outcome:
        length = len(arrival.prompt) + arrival.output
        if length > self.tree.pool.num_pages * self.tree.page_size:
            raise ValueError(f"arrivals: number {number} has {length} tokens, more than the pool")
        request = Request(
            str(number), arrival.prompt, _PARAMS, arrival.namespace, number, 0, length,
            arrival.priority,
        )  # fmt: skip
        outcome = self._outcomes[request.request_id] = Outcome(arrival)
        self.scheduler.add(Sequence(request))
        return outcome

    def _step(self) -> None:
        schedule = self.scheduler.schedule()
        assert schedule.chunks, "nothing is scheduled, but requests are unfinished"
        seconds = self.machine.seconds(schedule)
        self.scheduler.observe(schedule, seconds)
        self.now += seconds
        self.steps += 1
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            self.scheduler.computed(chunk)
            if not sequence.remaining:
                self._sample(sequence)

    def _sample(self, sequence: Sequence) -> None:
        name = sequence.request.request_id
        outcome = self._outcomes[name]
        if name in self._last:
            self.gaps.append((outcome.arrival.label, self.now - self._last[name]))
        else:
            outcome.first_token = self.now
            outcome.hit_tokens = sequence.cached_tokens
        self._last[name] = self.now
        number = sequence.request.arrival * 8191 + len(sequence.tokens)
        sequence.tokens.append(_GENERATED | number & (_GENERATED - 1))
        self.decoded += 1
        if len(sequence.tokens) == sequence.request.max_length:
            outcome.end = self.now
            self.scheduler.finish(sequence)
            del self._outcomes[name], self._last[name]
