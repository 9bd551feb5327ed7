"""Replicas with real trees and modelled times, and the events between them and a router."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coppice.radix import OutOfPages, PagePool, RadixTree
from coppice.radix.mirror.changes import Change, TreeChanges
from routing.workloads import TOKEN_BYTES, Work

# A replica's machine: tokens a second of prefill alone, seconds of a decode step and more for each
# further sequence, most sequences together.
PREFILL, STEP, EACH, PLACES = 8000.0, 0.02, 0.0004, 48
# Seconds until the router knows what a replica has stored.
DELAY = 0.05


class Policy(Protocol):
    """Chooses replicas, and hears what becomes of requests."""

    def choose(self, name: str, work: Work, now: float) -> int: ...
    def began(self, name: str, now: float) -> None: ...
    def ended(self, name: str, now: float) -> None: ...
    def changed(self, replica: int, changes: Sequence[Change]) -> None: ...
    def held(self, work: Work) -> int: ...


@dataclass(slots=True)
class Replica:
    """One engine: prompts are computed one after another, those that run decode together."""

    tree: RadixTree
    changes: TreeChanges | None
    queue: deque[tuple[str, Work]] = field(default_factory=deque)
    busy: bool = False
    running: int = 0
    computed: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of a decode step."""
        return STEP + EACH * self.running

    def hit(self, work: Work) -> int:
        """Tokens of a prompt that need not be computed."""
        prompt = work.prompt
        return self.tree.match(prompt, limit=len(prompt) // TOKEN_BYTES - 1).length

    def keep(self, work: Work) -> None:
        """Enters a prompt that is computed; evicts what was used least recently."""
        tree, prompt = self.tree, work.prompt
        hold, table = tree.start(tree.match(prompt))
        try:
            table += tree.allocate(len(prompt) // TOKEN_BYTES - len(table))
            tree.finish(hold, prompt, table)
        except OutOfPages:
            tree.unlock(hold)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of all requests: seconds to the first token, hits, tokens, load of each replica.

    Attributes:
        computed: prompt tokens that each replica computed.
        busy: seconds for which each computed prompts, the first decode step of each included.
        copied: of the tokens that were computed, those that another replica held, as the policy
            knows it.
    """

    first: list[float]
    hits: int
    tokens: int
    computed: list[int]
    busy: list[float]
    copied: int


def simulate(
    works: Sequence[Work], replicas: int, cache_tokens: int, policy: Policy, *, feed: bool
) -> Result:
    """Runs all requests; a prompt's speed falls with the share of steps that decode."""
    fleet = []
    for _ in range(replicas):
        tree = RadixTree(PagePool(cache_tokens, 1))
        fleet.append(Replica(tree, TreeChanges(tree) if feed else None))
    events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
    order, first, hits, total, copied = 0, [], 0, 0, 0

    def at(moment: float, call: Callable[..., None], *args: Any) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (moment, order, call, args))

    def arrive(now: float, number: int) -> None:
        name, work = str(number), works[number]
        place = policy.choose(name, work, now)
        fleet[place].queue.append((name, work))
        begin(now, place)

    def begin(now: float, place: int) -> None:
        nonlocal hits, total, copied
        replica = fleet[place]
        if replica.busy or not replica.queue or replica.running >= PLACES:
            return
        name, work = replica.queue.popleft()
        count, hit = len(work.prompt) // TOKEN_BYTES, replica.hit(work)
        hits, total = hits + hit, total + count
        copied += max(0, min(policy.held(work), count - 1) - hit)
        replica.busy = True
        replica.computed += count - hit
        seconds = (count - hit) / PREFILL * (1 + replica.running / PLACES) + replica.step
        replica.seconds += seconds
        at(now + seconds, answered, place, name, work)

    def answered(now: float, place: int, name: str, work: Work) -> None:
        replica = fleet[place]
        replica.busy = False
        replica.running += 1
        replica.keep(work)
        first.append(now - work.at)
        policy.began(name, now)
        if replica.changes is not None:
            at(now + DELAY, told, place, replica.changes.drain())
        at(now + work.generated * replica.step, finished, place, name)
        begin(now, place)

    def told(now: float, place: int, changes: Sequence[Change]) -> None:
        policy.changed(place, changes)

    def finished(now: float, place: int, name: str) -> None:
        fleet[place].running -= 1
        policy.ended(name, now)
        begin(now, place)

    for number, work in enumerate(works):
        at(work.at, arrive, number)
    while events:
        now, _, call, args = heapq.heappop(events)
        call(now, *args)
    computed, busy = [each.computed for each in fleet], [each.seconds for each in fleet]
    return Result(first, hits, total, computed, busy, copied)


def one_cache(works: Sequence[Work], cache_tokens: int) -> float:
    """The hit rate of one cache as large as all together, which sees requests in their order."""
    replica, hits, total = Replica(RadixTree(PagePool(cache_tokens, 1)), None), 0, 0
    for work in works:
        hits += replica.hit(work)
        total += len(work.prompt) // TOKEN_BYTES
        replica.keep(work)
    return hits / total
