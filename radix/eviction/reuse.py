"""When tokens are used again: what is learned from past waits, and the density that follows."""

from __future__ import annotations

import math
from collections.abc import Iterable

from coppice.radix.eviction.records import Record

# The weight of an assumed rate, in observations of records of mean length.
_PRIOR = 2.0
# Densities that differ by less than a sixth count as equal, and recency decides: such differences
# are mostly noise of the estimate.
_STEPS = 6.0

# Classes by uses: 1, 2, 3, 4, 5 .. 8, 9 .. 16, 17 .. 32, 33 .. 64, more.
_CLASSES = 9
# In a fine table the next class, where little is known of it, is expected to have this multiple of
# a class's rate: about in proportion to the uses.
_MORE = (2.0, 1.5, 1.33, 1.25, 1.5, 1.5, 1.5, 1.5, 1.5)


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

    Ages fall into buckets: 0, 1, 2 .. 3, 4 .. 7 and so on, in a `fine` table two for each doubling:
    0, 1, 2, 3, 4 .. 5, 6 .. 7, 8 .. 11. Where a class has few observations at an age, its rate is
    drawn to that of all classes, in a fine table to a multiple of that of the class with fewer uses
    (the first class's to that of all); the rate of all classes is drawn to half the rate at half
    the age. So a table without observations orders by recency, a fine one with few of them also by
    uses.
    """

    def __init__(self, fine: bool = False) -> None:
        self._fine = fine
        self._ages = 64 if fine else 32
        if fine:
            self._begin = [0, 1, *(2 + age % 2 << age // 2 - 1 for age in range(2, self._ages))]
        else:
            self._begin = [0, *(1 << age for age in range(self._ages - 1))]
        ends = [*self._begin[1:], 2 * self._begin[-1]]
        self._width = [end - begin for begin, end in zip(self._begin, ends, strict=True)]
        self._hits = [[0.0] * self._ages for _ in range(_CLASSES)]
        self._ended = [[0.0] * self._ages for _ in range(_CLASSES)]
        self._waited = [[0.0] * self._ages for _ in range(_CLASSES)]
        self.density = [[-age for age in range(self._ages)] for _ in range(_CLASSES)]

    def bucket(self, age: int) -> int:
        """The bucket of an age."""
        bits = age.bit_length()
        return bits if bits < 2 or not self._fine else 2 * bits - 4 + (age >> bits - 2)

    def ended(self, record: Record, age: int, hit: bool) -> None:
        """A wait of `age` requests is over. O(1)."""
        bucket = self.bucket(age)
        uses, tokens = record.uses, record.length
        row = uses - 1 if uses < 5 else _class(uses)
        if hit:
            self._hits[row][bucket] += tokens
        self._ended[row][bucket] += tokens
        self._waited[row][bucket] += tokens * (age - self._begin[bucket])

    def of(self, record: Record, now: int) -> int:
        """The density of a record's tokens."""
        uses = record.uses
        row = uses - 1 if uses < 5 else _class(uses)
        return self.density[row][self.bucket(now - record.last)]

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
        fade = [weight * 0.5 ** (begin / half_life) for begin in self._begin]
        for record in waiting:
            age = now - record.last
            bucket = self.bucket(age)
            row = _class(record.uses)
            total += record.length
            count += 1
            tokens = record.length * fade[bucket]
            ended[row][bucket] += tokens
            waited[row][bucket] += tokens * (age - self._begin[bucket])
        for times, ends in zip(waited, ended, strict=True):
            longer = 0.0
            for bucket in range(self._ages - 1, -1, -1):
                times[bucket] += longer * self._width[bucket]
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
        known = 2 + max((age for row in waited for age in range(self._ages) if row[age]), default=0)
        known = min(known, self._ages)
        assumed = 0.25
        common = []
        for bucket in range(known):
            hits = sum(row[bucket] for row in self._hits)
            time = sum(row[bucket] for row in waited)
            common.append((hits + prior) / (time + prior / assumed))
            assumed = common[-1] / (math.sqrt(2) if self._fine and bucket >= 2 else 2.0)
        expected = common
        for row, times, densities, more in zip(
            self._hits, waited, self.density, _MORE, strict=True
        ):
            rates = [
                (hits + prior) / (time + prior / rate)
                for hits, time, rate in zip(row, times, expected, strict=False)
            ]
            if self._fine:
                expected = [rate * more for rate in rates]
            leaves = [1 - math.exp(-rate * self._width[age]) for age, rate in enumerate(rates)]
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
            step = round(_STEPS / 2 if self._fine else _STEPS)
            for bucket in range(known, self._ages):
                densities[bucket] = densities[bucket - 1] - step
