"""Sends each request to the replica at which its first token is expected soonest.

The expected time at a replica is a sum of seconds:

    what is ahead      uncached tokens of requests that it has not answered yet, at its rate, and
                       what each of them takes besides, as was measured; only of classes that are
                       served before the request's
    what is overdue    how much longer it has already taken for them than its rate says, or for
                       those that were given up, if it has not been heard of since
    the prompt         the tokens that it does not hold, at its rate
    what it costs      the time for which sequences that run there are held back by these tokens,
                       by their share of the places that it has; and for which those will wait that
                       come later: in a queue of use u, work delays them by u / (1 - u) of its own
                       length (Pollaczek and Khinchine). A copy of what n replicas hold counts
                       1 + 2 / n times: what one holds is mostly one conversation, and nobody else
                       will use the copy; what many hold is asked for by many

A prefix that many ask for goes to a second replica as soon as waiting for the first one takes
longer than computing it again, and a miss goes to where least is ahead; of replicas that are equal,
as idle ones are, to the one that has had least to compute lately. There is no threshold.
Hits are those that replicas have reported, token by token, and those that requests on their way
will leave. Rates are measured by the replicas; until one has reported, its own answers give it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from coppice.frontend.router.choosing.debts import Debts
from coppice.frontend.router.choosing.namespaces import AdapterVersions
from coppice.frontend.router.choosing.overhead import RequestOverhead
from coppice.frontend.router.choosing.promised import Promised
from coppice.radix.mirror.changes import Change
from coppice.radix.mirror.index import ReplicaIndex
from coppice.radix.tokens import TOKEN_BYTES, Tokens, token_bytes

# Tokens a second of a replica of which nothing is known, where no other one is known either.
_UNKNOWN_RATE = 1000.0
# Seconds after which a token counts a third as much as one now; the most use that is believed.
_LATELY, _MOST_USE = 20.0, 0.9
# In the use of a replica, the part of its own; the rest is that of all, since requests go anywhere.
_OWN = 0.25
# How much more a copy costs those that come, if only one replica holds what is copied; and from
# which share of the longest hit on a replica holds it.
_ALONE, _HELD = 2.0, 0.9
# Of an older rate, when a request was answered.
_KEPT = 0.8


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes.

    Attributes:
        replica: that gets it.
        hit: tokens that it is expected to hit there, those included that are on their way.
        seconds: until its first token, as expected.
        elsewhere: the most tokens that any replica holds now.
    """

    replica: int
    hit: int
    seconds: float
    elsewhere: int = 0


@dataclass(slots=True)
class _Flight:
    """A request that was sent and has not ended."""

    replica: int
    prompt: bytes
    namespace: Hashable
    missing: int  # tokens that are to be computed
    priority: int
    sent: float
    began: bool = False


class Router:
    """Knows what replicas hold and have to do, and chooses among them.

    Not thread-safe. A decision takes O(tokens at memcmp speed + replicas), with arrays: some 50
    microseconds for 64 replicas and a few hundred for 1,000.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds and never goes back."""
        self.index = ReplicaIndex()
        self._versions = AdapterVersions()
        self._clock = clock
        self._promised = Promised()
        self._flights: dict[str, _Flight] = {}
        self._present = np.zeros(0, bool)
        self._rate = np.zeros(0)  # tokens a second; 0: not known
        self._running = np.zeros(0)  # requests that have got their first token
        self._places = np.ones(0)  # most that run together
        self._progress = np.zeros(0)  # when a request got its first token, or work began
        self._waiting: dict[int, dict[str, _Flight]] = {}  # by replica, those without an answer
        self._ahead = np.zeros(0)  # their tokens
        self._queued = np.zeros(0)  # how many they are
        self._overhead = RequestOverhead()
        self._debts = Debts()
        self._caching: set[int] = set()  # replicas that keep prompts, and report them
        # Requests with an answer whose prompts a replica has not reported yet.
        self._unreported: dict[int, list[str]] = {}
        self._classes = False  # whether any request had a priority
        self._recent = np.zeros(0)  # tokens that each was sent to compute lately; see `_faded`
        self._faded_at = clock()
        self._measured: set[int] = set()  # replicas that have reported their rate

    # -- replicas ----------------------------------------------------------------------------

    def join(self, replica: int, *, places: int = 64, caching: bool = True) -> None:
        """Lets a replica, an integer from 0 on, take requests; it holds nothing yet.

        `places`: most sequences that it runs together; `caching`: whether it keeps prompts. Raises
        ValueError if it is there already.
        """
        if replica < 0 or places < 1:
            raise ValueError(
                f"replica must be at least 0 and places at least 1, got {replica}, {places}"
            )
        more = replica + 1 - len(self._present)
        if more > 0:
            for name in (
                "_present", "_rate", "_running", "_places", "_progress", "_ahead", "_queued",
                "_recent",
            ):  # fmt: skip
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros(more, array.dtype))))
            self._places[-more:] = 1  # also of replicas that have not joined
        if self._present[replica]:
            raise ValueError(f"replica {replica} is there already")
        self._present[replica] = True
        for array in (self._rate, self._running, self._ahead, self._queued, self._recent):
            array[replica] = 0
        self._places[replica] = places
        self._progress[replica] = self._clock()
        self._waiting[replica] = {}
        if caching:
            self._caching.add(replica)

    def leave(self, replica: int) -> tuple[list[str], list[str]]:
        """Takes a replica out, dead or not: its requests without an answer, and those with a part.

        Neither counts any more; the first can be sent to another one.
        """
        if replica not in self._waiting:
            return [], []
        self._present[replica] = False
        self.index.leave(replica)
        mine = [(name, each) for name, each in self._flights.items() if each.replica == replica]
        for name, _ in mine:
            self.end(name)
        del self._waiting[replica]
        self._unreported.pop(replica, None)
        self._measured.discard(replica)
        self._caching.discard(replica)
        self._debts.forget(replica)
        unanswered = [name for name, each in mine if not each.began]
        return unanswered, [name for name, each in mine if each.began]

    def apply(self, replica: int, changes: Iterable[Change]) -> None:
        """Takes what a replica reports of its tree. Raises ValueError as `ReplicaIndex.apply`."""
        if replica not in self._waiting:
            return
        self._debts.forget(replica)
        for change in changes:
            self.index.apply(replica, self._versions.placed(change))
        left = []
        for request in self._unreported.get(replica, ()):
            flight = self._flights.get(request)
            if flight is None:
                continue
            held = (
                self.index.hits(flight.prompt, place).get(replica, 0)
                for place in self._versions.places(flight.namespace)
            )
            if max(held) * TOKEN_BYTES >= len(flight.prompt):
                self._promised.remove(request)
            else:
                left.append(request)
        self._unreported[replica] = left

    def measured(self, replica: int, tokens_a_second: float) -> None:
        """Takes the rate at which a replica computes prompts, as it has measured."""
        self._debts.forget(replica)
        if replica in self._waiting and tokens_a_second > 0:
            self._rate[replica] = tokens_a_second
            self._measured.add(replica)

    def heard(self, replica: int) -> None:
        """Notes that a replica has answered a call: it is not stuck."""
        self._debts.forget(replica)

    # -- requests ----------------------------------------------------------------------------

    def choose(
        self,
        tokens: Tokens,
        namespace: Hashable = None,
        *,
        priority: int = 0,
        without: Collection[int] = (),
    ) -> Choice | None:
        """Where a prompt's first token is expected soonest, `without` some replicas; None: nowhere,
        since there is no other replica."""
        present = self._present
        if without:
            present = present.copy()
            present[list(without)] = False
        if not present.any():
            return None
        prompt = token_bytes(tokens)
        count, now = len(prompt) // TOKEN_BYTES, self._clock()
        hits = np.zeros(len(present))
        for place in self._versions.places(namespace):
            self.index.raise_hits(hits, prompt, place)
        most = min(hits.max(), count - 1)
        self._promised.raise_hits(hits, prompt, namespace)
        np.minimum(hits, count - 1, out=hits)  # the last token's logits are needed
        rate = self._rates()
        each = self._overhead.seconds
        ahead = every = self._ahead / rate + self._queued * each
        if self._classes:
            tokens_ahead, requests_ahead = self._ahead_of(priority)
            ahead = tokens_ahead / rate + requests_ahead * each
        overdue = np.where(self._queued > 0, now - self._progress - every, 0.0)
        self._debts.raise_overdue(overdue, self._queued, now)
        own = (count - hits) / rate
        held_back = own * np.minimum(self._running / self._places, 1.0)
        seconds = ahead + np.maximum(overdue, 0.0) + own
        use = self._use(now, rate)
        holders = max(int((hits >= _HELD * hits.max()).sum()), 1)
        costs = seconds + held_back + own * use / (1 - use) * (1 + _ALONE / holders)
        costs[~present] = np.inf
        equal = np.flatnonzero(costs == costs.min())
        best = int(equal[np.argmin(self._recent[equal])])
        return Choice(best, int(hits[best]), float(seconds[best]), int(most))

    def send(
        self,
        request: str,
        choice: Choice,
        tokens: Tokens,
        namespace: Hashable = None,
        *,
        priority: int = 0,
    ) -> None:
        """Notes that a request goes where `choose` said. Raises ValueError if it was sent."""
        if request in self._flights:
            raise ValueError(f"request {request!r} was sent already")
        prompt, now = token_bytes(tokens), self._clock()
        replica, missing = choice.replica, len(prompt) // TOKEN_BYTES - choice.hit
        flight = _Flight(replica, prompt, namespace, missing, priority, now)
        if not self._waiting[replica]:
            self._progress[replica] = now
        self._flights[request] = self._waiting[replica][request] = flight
        self._recent = self._faded(now)
        self._recent[replica] += missing
        self._faded_at = now
        self._classes |= priority != 0
        self._ahead[replica] += missing
        self._queued[replica] += 1
        if replica in self._caching:
            self._promised.add(request, replica, prompt, namespace)

    def began(self, request: str) -> None:
        """Notes the first token of a request."""
        flight = self._flights.get(request)
        if flight is None or flight.began:
            return
        replica, now = flight.replica, self._clock()
        flight.began = True
        self._debts.forget(replica)
        if replica in self._caching:
            self._unreported.setdefault(replica, []).append(request)
        self._running[replica] += 1
        self._answered(request, flight)
        begun = max(flight.sent, self._progress[replica])
        self._progress[replica] = now
        if replica in self._measured:  # else the rate has it in it
            self._overhead.learn(flight.missing / self._rate[replica], now - begun)
        if flight.missing > 64 and now > begun and replica not in self._measured:
            seen = flight.missing / (now - begun)
            known = self._rate[replica]
            self._rate[replica] = seen if not known else _KEPT * known + (1 - _KEPT) * seen

    def end(self, request: str) -> None:
        """Notes the end of a request, of whatever kind."""
        flight = self._flights.pop(request, None)
        if flight is None:
            return
        replica = flight.replica
        if flight.began:
            self._running[replica] -= 1
        else:
            every = self._ahead[replica] / self._rates()[replica]
            every += self._queued[replica] * self._overhead.seconds
            now = self._clock()
            self._debts.give_up(replica, float(self._progress[replica] + every), now)
            self._answered(request, flight)
            self._progress[replica] = now
        self._promised.remove(request)

    def unanswered(self, replica: int) -> int:
        """Requests at a replica that have not got their first token."""
        return len(self._waiting.get(replica, ()))

    def _faded(self, now: float) -> np.ndarray:
        """What each was sent to compute lately; the older it is, the less it counts."""
        return self._recent * math.exp((self._faded_at - now) / _LATELY)

    def _use(self, now: float, rate: np.ndarray) -> np.ndarray:
        """The share of time that prompts took lately, below 1: mostly of all replicas, partly of
        each its own, so that work goes to those that had less."""
        tokens = self._faded(now) / _LATELY
        every = float(tokens.sum()) / float(rate[self._present].sum())
        return np.minimum((1 - _OWN) * every + _OWN * tokens / rate, _MOST_USE)

    def _answered(self, request: str, flight: _Flight) -> None:
        if self._waiting[flight.replica].pop(request, None) is not None:
            self._ahead[flight.replica] -= flight.missing
            self._queued[flight.replica] -= 1

    def _rates(self) -> np.ndarray:
        """The rate of each replica; of those not known, the others' mean."""
        known = self._rate[self._present & (self._rate > 0)]
        usual = float(known.mean()) if len(known) else _UNKNOWN_RATE
        return np.where(self._rate > 0, self._rate, usual)

    def _ahead_of(self, priority: int) -> tuple[np.ndarray, np.ndarray]:
        """What waits at each replica of classes that are served before or with this one: tokens,
        and requests."""
        waiting = [
            [
                each.missing
                for each in self._waiting.get(n, {}).values()
                if each.priority <= priority
            ]
            for n in range(len(self._present))
        ]
        return np.array(list(map(sum, waiting))), np.array(list(map(len, waiting)))
