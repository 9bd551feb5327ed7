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

# Two buckets for each doubling of the age: 0, 1, 2, 3, 4 .. 5, 6 .. 7, 8 .. 11, 12 .. 15, ...
_AGES = 64
_BEGIN = [age if age < 2 else 2 + age % 2 << age // 2 - 1 for age in range(_AGES)]
_WIDTH = [1, 1, *(1 << age // 2 - 1 for age in range(2, _AGES))]
# Classes by uses: 1, 2, 3, 4, 5 .. 8, 9 .. 16, 17 .. 32, 33 .. 64, more.
_CLASSES = 9
# Where little is known of a class, its rate is expected to be this multiple of the one before's.
_MORE = (1.0, 2.0, 1.5, 1.33, 1.25, 1.5, 1.5, 1.5, 1.5)


def _class(uses: int) -> int:
    return uses - 1 if uses < 5 else min(1 + (uses - 1).bit_length(), _CLASSES - 1)


def _bucket(age: int) -> int:
    if age < 2:
        return age
    bits = age.bit_length()
    return 2 * bits - 4 + (age >> bits - 2)


class ReuseTable:
    """When tokens are used again, by how often they were used and for how long not since.

    For each class and age it keeps how many tokens were used again at that age (`_hits`), how many
    ended a wait there, used or forgotten (`_ended`), and for how long in that bucket
    (`_waited`, token-requests). From these follows the rate of hits of a token at each age, and
    from the rates its *density*: the most hits a request that keeping it from now on can earn, over
    all ages at which one could stop: max over T of P(hit within T) / E(time until hit or T), as a
    logarithm in whole steps. That is the Gittins index of the wait; LHD (Beckmann, Chen and Cidon,
    NSDI 2018) has the same quotient with the policy's own evictions as the end.

    Where a class has few observations at an age, its rate is drawn to a multiple of that of the
    class with fewer uses (as if the rate were in proportion to the uses), the first class's to that
    of all classes, and this to half the rate at half the age. So a table without observations
    orders by recency, and with few of them by uses.
    """

    def __init__(self) -> None:
        self._hits = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._ended = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._waited = [[0.0] * _AGES for _ in range(_CLASSES)]
        self.density = [[-age for age in range(_AGES)] for _ in range(_CLASSES)]

    def ended(self, record: Record, age: int, hit: bool) -> None:
        """A wait of `age` requests is over. O(1)."""
        bucket = _bucket(age)
        uses, tokens = record.uses, record.length
        row = uses - 1 if uses < 5 else _class(uses)
        if hit:
            self._hits[row][bucket] += tokens
        self._ended[row][bucket] += tokens
        self._waited[row][bucket] += tokens * (age - _BEGIN[bucket])

    def of(self, record: Record, now: int) -> int:
        """The density of a record's tokens."""
        uses = record.uses
        row = uses - 1 if uses < 5 else _class(uses)
        return self.density[row][_bucket(now - record.last)]

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
        fade = [weight * 0.5 ** (begin / half_life) for begin in _BEGIN]
        for record in waiting:
            age = now - record.last
            bucket = _bucket(age)
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
            assumed = common[-1] / (2 if bucket < 2 else math.sqrt(2))
        rates = common
        for row, times, densities, more in zip(
            self._hits, waited, self.density, _MORE, strict=True
        ):
            rates = [
                (hits + prior) / (time + prior / (rate * more))
                for hits, time, rate in zip(row, times, rates, strict=False)
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
                densities[bucket] = densities[bucket - 1] - round(_STEPS / 2)
