"""The miss-ratio curve: which hit rate other sizes of the pool would have, kept as requests come.

A pool under LRU hits what is younger than its oldest tokens. So each use is counted by its age, and
only how many tokens were used within an age is estimated: from when each of the tokens now known
was used last. This is AET (Hu et al., "Fast Miss Ratio Curve Modeling for Storage Cache", ACM TOS
2018) with that measured instead of modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coppice.radix.accounting.seen.hashes import Hashes, Ints

FACTORS = tuple(2.0 ** (step / 2) for step in range(-4, 9))
"""Sizes of the pool that the curve is asked for, relative to the present one: 1/4 to 16."""

_SPANS = 1 << 10  # at most, of stamps that are counted together
_OPENED = _SPANS // 4  # at most, at once


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The hit rate that LRU would have had since the start with a pool of this size."""

    factor: float  # times the present pool
    pool_tokens: int
    hit_rate: float


class MissRatioCurve:
    """Counts the tokens that a pool of each of the sizes in `FACTORS` would have hit.

    Times are stamps (`UseClock`). For each span of them the curve knows how many tokens were used
    last in it: those that are used again move to the newest span. The sum of the newer spans is
    the number of tokens used within an age, about the same for all the requests of a call. To hit a
    token, a pool must hold these and the prompt up to it, since LRU evicts the end of a prompt
    first. When there are too many spans, the older ones are joined two by two.
    """

    def __init__(self, pool_tokens: int) -> None:
        if pool_tokens < 1:
            raise ValueError(f"pool_tokens must be at least 1, got {pool_tokens}")
        self.pool_tokens = pool_tokens
        self._sizes = np.array(FACTORS, np.float32)[:, None] * pool_tokens
        self._hits = np.zeros(len(FACTORS))
        self._prompt_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all uses, since the pool was emptied; the hits counted so far stay."""
        self._spans = np.zeros(1)  # the last stamp of each; the first is empty
        self._live = np.zeros(1)  # tokens used last in each
        self._until = np.zeros(1)  # and in it or before it

    def use(self, stamps: Hashes, tokens: Ints, before: Hashes, moved: Ints) -> None:
        """Counts uses of tokens. O(stamps + before x log spans + spans).

        `tokens[i]` were used at `stamps[i]`, which do not decrease; of all these, `moved[j]` had
        been used last at `before[j]`, at least 1. The stamps of a call share a few hundred spans.
        """
        if not len(stamps):
            return
        ends = np.ones(len(stamps), np.bool_)
        np.not_equal(stamps[1:], stamps[:-1], out=ends[:-1])
        last = ends.nonzero()[0]
        step = -(-len(last) // _OPENED)
        last = last[(len(last) - 1) % step :: step]
        opened, until = stamps[last].astype(np.float64), tokens.cumsum()[last]
        used = until.copy()
        used[1:] -= until[:-1]
        live = self._live
        if opened[0] <= self._spans[-1]:
            live[-1] += used[0]
            opened, used = opened[1:], used[1:]
        spans = self._spans = np.concatenate((self._spans, opened))
        live = np.concatenate((live, used))
        live -= np.bincount(spans.searchsorted(before), moved, len(live))
        if len(live) > _SPANS:
            joined = len(live) // 4 * 2 + 1
            pairs = live[1:joined].reshape(-1, 2).sum(axis=1)
            live = np.concatenate((live[:1], pairs, live[joined:]))
            self._spans = np.concatenate((spans[:1], spans[2:joined:2], spans[joined:]))
        self._live, self._until = live, live.cumsum()

    def prompts(self, ages: Hashes, begins: Ints, ends: Ints, prompt_tokens: int) -> None:
        """Counts prompts of `prompt_tokens` tokens, of which some stretches had been used before.

        O(stretches x log spans).

        Args:
            ages: stamps from the end of the request that used a stretch last to the beginning of
                the present one.
            begins: the stretches' first positions in their prompts.
            ends: the positions after their last ones.
            prompt_tokens: tokens of all prompts.
        """
        self._prompt_tokens += prompt_tokens
        used = self._until[-1] - np.interp(self._spans[-1] - ages, self._spans, self._until)
        # What a pool that holds these has left for the prompt's beginning.
        reached = self._sizes - used.astype(np.float32)
        np.maximum(reached, begins.astype(np.float32), out=reached)
        np.minimum(reached, ends.astype(np.float32), out=reached)
        self._hits += reached.sum(axis=1, dtype=np.float64) - begins.sum()

    def points(self) -> tuple[CurvePoint, ...]:
        """The curve at `FACTORS`, empty before the first prompt; never falling. O(1)."""
        if not self._prompt_tokens:
            return ()
        rates = self._hits / self._prompt_tokens
        return tuple(
            CurvePoint(factor, round(factor * self.pool_tokens), rate)
            for factor, rate in zip(FACTORS, rates.tolist(), strict=True)
        )
