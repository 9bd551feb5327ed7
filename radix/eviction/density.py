"""Eviction by learned hit density: the tokens least likely to earn a hit in the time they take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from coppice.radix.eviction.order import EvictionOrder, LeafHeap
from coppice.radix.eviction.past_uses import History, Record
from coppice.radix.node import Node

# The weight of an assumed rate, in observations of records of mean length.
_PRIOR = 2.0
# Densities that differ by less than a sixth count as equal, and recency decides: such differences
# are mostly noise of the estimate.
_STEPS = 6.0

# Of the waits that have not ended, a sample of at least this size is read, if there are more.
_SAMPLE = 2048

_AGES = 32  # age a belongs to the bucket a.bit_length(): 0, 1, 2 .. 3, 4 .. 7, ...
_WIDTH = [1, *(1 << age for age in range(_AGES - 1))]
_BEGIN = [0, *_WIDTH[1:]]
# Classes by uses: 1, 2, 3, 4, 5 .. 8, 9 .. 16, 17 .. 32, 33 .. 64, more.
_CLASSES = 9


def _class(uses: int) -> int:
    return uses - 1 if uses < 5 else min(1 + (uses - 1).bit_length(), _CLASSES - 1)


class ReuseTable:
    """When tokens are used again, by how often they were used and for how long not since.

    For each class and age it keeps how many tokens were used again at that age (`_hits`), how many
    ended a wait there, used or forgotten (`_ended`), and for how long in that bucket
    (`_waited`, token-requests). From these follows the rate of hits of a token at each age, and
    from the rates its *density*: the most hits a request that keeping it from now on can earn, over
    all ages at which one could stop: max over T of P(hit within T) / E(time until hit or T), as a
    logarithm in whole steps. That is the Gittins index of the wait; LHD (Beckmann, Chen and Cidon,
    NSDI 2018) has the same quotient with the policy's own evictions as the end.

    Where a class has few observations at an age, its rate is drawn to that of all classes, and this
    to half the rate at half the age. So a table without observations orders by recency.
    """

    def __init__(self) -> None:
        self._hits = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._ended = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._waited = [[0.0] * _AGES for _ in range(_CLASSES)]
        self.density = [[-age for age in range(_AGES)] for _ in range(_CLASSES)]

    def ended(self, record: Record, age: int, hit: bool) -> None:
        """A wait of `age` requests is over. O(1)."""
        bucket = age.bit_length()
        uses, tokens = record.uses, record.length
        row = uses - 1 if uses < 5 else _class(uses)
        if hit:
            self._hits[row][bucket] += tokens
        self._ended[row][bucket] += tokens
        self._waited[row][bucket] += tokens * (age - _BEGIN[bucket])

    def learn(
        self, waiting: Iterable[Record], weight: int, now: int, half_life: float, elapsed: int
    ) -> None:
        """Computes the densities anew, with the waits that have not ended; O(waiting).

        Each of `waiting` stands for `weight` records. Old observations lose half their weight in
        `half_life` requests; `elapsed` of them have passed since the last time.
        """
        ended = [row.copy() for row in self._ended]
        waited = [row.copy() for row in self._waited]
        total = count = 0
        fade = [weight * 0.5 ** (min(b and 1 << b - 1, 1 << 30) / half_life) for b in range(_AGES)]
        for record in waiting:
            age = now - record.last
            bucket = age.bit_length()
            row = _class(record.uses)
            total += record.length
            count += 1
            tokens = record.length * fade[bucket]
            ended[row][bucket] += tokens
            waited[row][bucket] += tokens * (age - _BEGIN[bucket])
        for times, ends in zip(waited, ended, strict=True):
            longer = 0.0
            for bucket in range(_AGES - 1, -1, -1):
                times[bucket] += longer * _WIDTH[bucket]
                longer += ends[bucket]
        if total:
            self._rate(waited, _PRIOR * total / count)
        fading = 0.5 ** (elapsed / half_life)
        for table in (self._hits, self._ended, self._waited):
            for values in table:
                values[:] = [value * fading for value in values]

    def _rate(self, waited: list[list[float]], prior: float) -> None:
        """Densities from hits and time; `prior` tokens is what an assumed rate weighs."""
        # Nothing has waited for longer than this; beyond it all densities fall alike with age.
        known = 2 + max((age for row in waited for age in range(_AGES) if row[age]), default=0)
        known = min(known, _AGES)
        assumed = 0.25
        common = []
        for bucket in range(known):
            hits = sum(row[bucket] for row in self._hits)
            time = sum(row[bucket] for row in waited)
            common.append((hits + prior) / (time + prior / assumed))
            assumed = common[-1] / 2
        for row, times, densities in zip(self._hits, waited, self.density, strict=True):
            rates = [
                (hits + prior) / (time + prior / rate)
                for hits, time, rate in zip(row, times, common, strict=False)
            ]
            leaves = [1 - math.exp(-rate * _WIDTH[age]) for age, rate in enumerate(rates)]
            for bucket in range(known):
                kept, earned, spent, best = 1.0, 0.0, 0.0, 0.0
                for later in range(bucket, known):
                    gone = kept * leaves[later]
                    earned += gone
                    spent += gone / rates[later]
                    kept -= gone
                    if earned > best * spent:
                        best = earned / spent
                    elif kept < 0.01:
                        break
                densities[bucket] = round(math.log(best) * _STEPS)
            for bucket in range(known, _AGES):
                densities[bucket] = densities[bucket - 1] - round(_STEPS)


# What is compared with LRU: windows of at least this many requests that enter at least half the
# capacity; the first few only learn, so that a short run is plain LRU.
_WINDOW = 64
_FIRST_WINDOWS = 4
_MEMORY = 0.85  # weight of the windows before in each
_MARGIN = 0.002  # LRU's lead in hits that counts
_LEAST, _MOST = 8, 64  # windows for which LRU decides after it has won


class HitDensity(EvictionOrder):
    """Evicts the leaf whose last tokens have the least hit density first, unless LRU does better.

    What tokens are worth is learned from how those before them fared (`ReuseTable`), evicted ones
    included: a bounded number of ghosts shows what would have been hit. A simulated LRU cache of
    the same size runs beside it (`History`); while that has more hits than the tree, leaves are
    evicted by recency, for longer each time LRU wins.

    Costs beyond the heap of leaves: O(records on the path) a request, O(1) an evicted leaf, and
    amortised O(1) for learning anew and sorting the leaves again now and then.
    """

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._table = ReuseTable()
        self._history = History(capacity_tokens, self._table.ended)
        self._leaves = LeafHeap()
        self._learned = 0  # request of the last table
        self._learn_at = 16
        self._sort_at = 0
        self._by_recency = True
        self._windows = 0  # since that was decided
        self._sentence = _FIRST_WINDOWS  # windows until LRU must prove itself again
        self._next_sentence = _LEAST
        self._window_requests = _WINDOW
        self._window_tokens = 0
        self._seen = (0, 0)
        self._own = self._lru = 0.0  # hit tokens, fading

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves)

    def add(self, leaf: Node) -> None:
        self._leaves.add(self._key(leaf), leaf)

    def pop(self) -> Node | None:
        now = self._history.now
        if now >= self._learn_at:
            self._learn(now)
        if now >= self._sort_at and not self._by_recency:
            self._sort(now)
        return self._leaves.pop()

    def tail(self, leaf: Node) -> int:
        """Tokens at the end of a leaf that share its key; those before may be worth more."""
        return leaf.end - max(leaf.policy_data.start, leaf.start)

    def used(self, node: Node, clock: int) -> None:
        history = self._history
        history.use_path(node)
        if history.now >= self._window_requests and history.entered_tokens >= self._window_tokens:
            self._compare()

    def inserted(self, node: Node, tokens: int) -> None:
        self._history.insert(node, tokens)

    def evicted(self, node: Node, tokens: int) -> None:
        self._history.evict(node, tokens)

    def split(self, upper: Node, lower: Node) -> None:
        self._history.split(upper, lower)

    def cleared(self) -> None:
        self._history.clear()

    # -- order -------------------------------------------------------------------------------

    def _key(self, leaf: Node) -> tuple[int, int]:
        if self._by_recency:
            return 0, leaf.stamp
        record: Record = leaf.policy_data
        uses = record.uses
        row = uses - 1 if uses < 5 else _class(uses)
        age = self._history.now - record.last
        return self._table.density[row][age.bit_length()], leaf.stamp

    def _sort(self, now: int) -> None:
        """Enters all leaves by their present keys. O(leaves log leaves), each quarter of them."""
        leaves = LeafHeap()
        for leaf in self._leaves:
            leaves.add(self._key(leaf), leaf)
        self._leaves = leaves
        self._sort_at = now + max(4, len(leaves) // 4)

    def _learn(self, now: int) -> None:
        waiting, step = self._history.sample(_SAMPLE)
        half_life = 4096.0 + 2 * step * len(waiting)
        self._table.learn(waiting, step, now, half_life, now - self._learned)
        self._learned = now
        self._learn_at = now + min(max(16, now // 4), 512)
        self._sort_at = now

    # -- LRU or not --------------------------------------------------------------------------

    def _compare(self) -> None:
        """Ends a window: decides whether LRU has done better."""
        history = self._history
        own = history.hit_tokens - self._seen[0]
        lru = history.lru_hit_tokens - self._seen[1]
        self._seen = history.hit_tokens, history.lru_hit_tokens
        self._window_requests = history.now + _WINDOW
        self._window_tokens = history.entered_tokens + self.capacity_tokens // 2
        self._windows += 1
        if self._by_recency:
            if self._windows >= self._sentence:
                self._switch(by_recency=False)
            return
        self._own = self._own * _MEMORY + own
        self._lru = self._lru * _MEMORY + lru
        if self._windows >= 2 and self._lru > self._own * (1 + _MARGIN):
            self._sentence = self._next_sentence
            self._next_sentence = min(_MOST, 2 * self._next_sentence)
            self._switch(by_recency=True)
        elif self._own > self._lru * (1 + _MARGIN):
            self._next_sentence = max(_LEAST, self._next_sentence // 2)

    def _switch(self, by_recency: bool) -> None:
        self._by_recency = by_recency
        self._windows = 0
        self._own = self._lru = 0.0
        self._sort(self._history.now)
