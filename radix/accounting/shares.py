"""Divides tokens among causes by the shares of chosen places, and tells how far off that may be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.seen.hashes import Ints
from coppice.radix.accounting.seen.places import GROUPS

ESTIMATED = ("prompt_logprobs", "evicted", "namespace", "diverged", "cold")
"""The causes that are estimated from a sample for requests that come fast; all others are exact."""

_EVICTED, _COLD = map(ESTIMATED.index, ("evicted", "cold"))


class Shares:
    """The chosen places of each slot by cause, and the tokens that each cause was given for them.

    The best estimate of a cause is its share of the places times all tokens (a ratio estimate). It
    may fall when more is known; counts may not. So each call gives its tokens to the causes that
    have less than their estimate, and what is given stays as near to the estimates as it can.
    """

    def __init__(self, slots: int) -> None:
        self._places = np.zeros((slots, len(ESTIMATED)), np.int64)
        self._given = np.zeros((slots, len(ESTIMATED)), np.int64)
        self._idle = np.zeros(slots)
        self._groups = np.zeros((GROUPS, len(ESTIMATED)), np.int64)
        self._effects: NDArray[np.float64] | None = None

    def reserve(self, more: int) -> None:
        """Adds `more` slots."""
        none = np.zeros((more, len(ESTIMATED)), np.int64)
        self._places, self._given = (
            np.append(each, none, 0) for each in (self._places, self._given)
        )
        self._idle = np.append(self._idle, np.zeros(more))

    def move(self, slot: int, other: int) -> None:
        """A slot's counts join another's, and it is empty."""
        for counts in (self._places, self._given, self._idle):
            counts[other] += counts[slot]
            counts[slot] = 0

    def divide(self, slot: int, tokens: int, places: Ints) -> Ints:
        """Divides `tokens` of a slot among the causes, given their chosen places by cause."""
        mine = self._places[slot]
        mine += places
        given = self._given[slot]
        shares = mine
        if not mine.any():
            shares = self._places.sum(axis=0)
            if not shares.any():
                shares = np.eye(len(ESTIMATED), dtype=np.int64)[_COLD]
        wanted = np.maximum(shares * ((given.sum() + tokens) / shares.sum()) - given, 0.0)
        wanted *= tokens / max(wanted.sum(), 1e-9)
        found = wanted.astype(np.int64)
        found[(wanted - found).argmax()] += tokens - found.sum()
        given += found
        return found

    def idle(self, slot: int, seconds: float) -> float:
        """Adds the idle seconds of a slot's evicted places; returns their mean since the start."""
        self._idle[slot] += seconds
        count = self._places[slot, _EVICTED]
        return float(self._idle[slot] / count) if count else 0.0

    def add_groups(self, causes: Ints, groups: Ints) -> None:
        """Adds chosen places by cause and group."""
        np.add.at(self._groups, (groups, causes), 1)
        self._effects = None

    def variances(self, tokens: int, places: Ints) -> list[float]:
        """For each cause, the squared standard error of an estimate of `tokens` from its places.

        That of as many places drawn one by one, times how much more the groups of places differ
        than such draws would (the design effect, from a jackknife over groups): equal texts have
        equal places, so that many places of a text that comes often tell no more than a few.
        """
        if not tokens:
            return [0.0] * len(ESTIMATED)
        if self._effects is None:
            self._effects = _design_effects(self._groups)
        count = int(places.sum())
        # With few places the shares are taken for less extreme than they were found.
        shares = (places + 0.5) / (count + 0.5 * len(ESTIMATED))
        found: list[float] = (
            float(tokens) ** 2 * shares * (1 - shares) / (count + 1) * self._effects
        ).tolist()
        return found


def _design_effects(groups: Ints) -> NDArray[np.float64]:
    """By cause, the variance of its share over that of independent places; at least 1."""
    total = groups.sum(axis=0)
    count = total.sum()
    sizes = groups.sum(axis=1)
    if not count or (sizes == count).any():
        return np.ones(len(ESTIMATED))
    without = (total - groups) / (count - sizes)[:, None]
    spread = (GROUPS - 1) / GROUPS * ((without - without.mean(axis=0)) ** 2).sum(axis=0)
    shares = total / count
    plain = shares * (1 - shares) / count
    return np.maximum(1.0, np.divide(spread, plain, out=np.ones_like(plain), where=plain > 0))
