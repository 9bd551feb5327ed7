"""The miss-ratio curve: which hit rate other sizes of the pool would have, kept as requests come.

A pool under LRU hits what is younger than its oldest tokens. So each use is counted by its age, and
only how many tokens were used within an age is estimated: from when each of the tokens now known
was used last. This is AET (Hu et al., "Fast Miss Ratio Curve Modeling for Storage Cache", ACM TOS
2018) with that measured instead of modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.hashes import Hashes, Ints

FACTORS = tuple(2.0 ** (step / 2) for step in range(-4, 9))
"""Sizes of the pool that the curve is asked for, relative to the present one: 1/4 to 16."""

_SPANS = 1 << 12  # at most, of stamps that are counted together


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The hit rate that LRU would have had since the start with a pool of this size."""

    factor: float  # times the present pool
    pool_tokens: int
    hit_rate: float


class MissRatioCurve:
    """Counts hit tokens by the smallest of the sizes in `FACTORS` that would have kept them.

    Times are stamps (`StampClock`). For each span of them the curve knows how many tokens were used
    last in it: those that are used again move to the newest span. The sum of the newer spans tells
    how many tokens were used within an age, which is about the same for all the requests that are
    told of together. To hit a stretch, a pool must hold these and the stretch's own prefix, since
    LRU gives up the end of a prompt first. When there are too many spans, the older ones are
    joined two by two.
    """

    def __init__(self, pool_tokens: int) -> None:
        if pool_tokens < 1:
            raise ValueError(f"pool_tokens must be at least 1, got {pool_tokens}")
        self.pool_tokens = pool_tokens
        self._sizes = np.array(FACTORS) * pool_tokens
        # Hit tokens by the smallest pool that hits them; the last count is of those that none does.
        self._hits = np.zeros(len(FACTORS) + 1)
        self._prompt_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all uses, since the pool was emptied; the hits counted so far stay."""
        self._spans = np.zeros(1, np.uint64)  # the last stamp of each; the first is empty
        self._live: NDArray[np.float64] = np.zeros(1)  # tokens used last in each
        self._measure()

    def use(self, stamps: Hashes, before: Hashes, tokens: Ints) -> None:
        """Stretches of `tokens` tokens were used at `stamps`, which do not decrease, and before
        that at `before`, or 0.

        O(stretches x log spans + spans).
        """
        if not len(stamps):
            return
        opened = stamps[np.flatnonzero(np.append(stamps[1:] != stamps[:-1], True))]
        opened = opened[np.searchsorted(opened, self._spans[-1], side="right") :]
        self._spans = np.concatenate((self._spans, opened))
        places = np.searchsorted(self._spans, stamps)
        live = np.bincount(places, tokens, len(self._spans)).astype(np.float64)
        live[: len(self._live)] += self._live
        moved = np.flatnonzero(before)
        gone = np.searchsorted(self._spans, before[moved])
        live -= np.bincount(gone, tokens[moved], len(live))
        self._live = live
        if len(live) > _SPANS:
            joined = len(live) // 4 * 2 + 1
            pairs = live[1:joined].reshape(-1, 2).sum(axis=1)
            self._live = np.concatenate((live[:1], pairs, live[joined:]))
            self._spans = np.concatenate(
                (self._spans[:1], self._spans[2:joined:2], self._spans[joined:])
            )
        self._measure()

    def _measure(self) -> None:
        """How many tokens were used since the end of each span."""
        self._ages = (self._spans[-1] - self._spans[::-1]).astype(np.float64)
        self._newer = np.cumsum(self._live[::-1])
        self._newer -= self._live[::-1]

    def prompts(self, ages: Hashes, ends: Ints, tokens: Ints, prompt_tokens: int) -> None:
        """Of `prompt_tokens` tokens some were known, in stretches. O(stretches x log spans).

        Args:
            ages: stamps from the end of the request that used a stretch last to the beginning of
                the present one.
            ends: the stretches' last positions in their prompts.
            tokens: of each.
            prompt_tokens: all of them, known or not.
        """
        self._prompt_tokens += prompt_tokens
        needed = np.interp(ages, self._ages, self._newer)
        needed += ends
        places = np.searchsorted(self._sizes, needed)
        self._hits += np.bincount(places, tokens, len(self._hits))

    def points(self) -> tuple[CurvePoint, ...]:
        """The curve at `FACTORS`, empty before the first prompt; never falling. O(1)."""
        if not self._prompt_tokens:
            return ()
        rates = np.cumsum(self._hits[:-1]) / self._prompt_tokens
        rates = np.clip(np.maximum.accumulate(rates), 0.0, 1.0)
        return tuple(
            CurvePoint(factor, round(factor * self.pool_tokens), rate)
            for factor, rate in zip(FACTORS, rates.tolist(), strict=True)
        )
