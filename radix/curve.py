"""The miss-ratio curve: which hit rate other sizes of the pool would have, kept as requests come.

SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015): only blocks whose
hash is below a threshold are followed, and their LRU stack distances are scaled by the rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from coppice.radix.hashes import Hashes, Ints

FACTORS = tuple(2.0 ** (step / 2) for step in range(-4, 9))
"""Sizes of the pool that the curve is asked for, relative to the present one: 1/4 to 16."""

# Blocks that are followed at most: as many as fit the largest pool of the curve at its rate.
_MAX_TRACKED = 8192
# References that are placed in the stack at once. Their cost is quadratic in this number, that of
# the calls to numpy is shared among them. Counts of them fit a byte.
_BATCH = 240

# Sampled references below which the curve is withheld: its correction for sampling would rule it.
_LEAST_SAMPLED = 256


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The hit rate that LRU would have had since the start with a pool of this size."""

    factor: float  # times the present pool
    pool_tokens: int
    hit_rate: float


class MissRatioCurve:
    """LRU stack distances of sampled blocks of prefixes, in tokens.

    A request refers to all blocks of its prompt at once. It would hit a block in a pool of at
    least as many tokens as were used since the block was used last, the block included; its blocks
    then move to the top of the stack, the last one first, so that no prefix leaves a cache before
    its continuation. The rate is fixed: such that the largest pool of the curve holds
    `_MAX_TRACKED` sampled blocks. What sinks below is forgotten, so memory is bounded. As sampled
    blocks may be referred to more or less often than others, the difference from the known number
    of references is put to the shortest distances (SHARDS_adj).

    Whole blocks only are counted: a pool hits up to a block more of each request than this says.
    """

    def __init__(self, pool_tokens: int, block_tokens: int) -> None:
        if pool_tokens < 1:
            raise ValueError(f"pool_tokens must be at least 1, got {pool_tokens}")
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        self.pool_tokens = pool_tokens
        self.block_tokens = block_tokens
        largest = FACTORS[-1] * pool_tokens / block_tokens  # in blocks
        self.rate = min(1.0, _MAX_TRACKED / largest)
        self._threshold = np.uint64(round(self.rate * 2**32))
        self._depth = int(largest * self.rate) + 1
        self._limits = np.array(FACTORS) * pool_tokens
        # Sampled references by the smallest pool that hits them; the last count is of those that
        # none does.
        self._distances = np.zeros(len(FACTORS) + 1, np.int64)
        self._references = 0
        self._prompt_tokens = 0
        # The stack, least recent first: moments of last use, and whose.
        self._moments = np.zeros(0, np.int64)
        self._keys = np.zeros(0, np.uint64)
        self._last: dict[int, int] = {}  # key -> its moment
        self._moment = 0
        # References that wait to be placed together: keys, numbers of groups, counted or not.
        self._waiting: list[tuple[Hashes, Ints, NDArray[np.bool_]]] = []
        self._waiting_keys = 0
        self._groups = 0

    @property
    def tracked(self) -> int:
        """Blocks that are followed now."""
        self._place_waiting()
        return len(self._last)

    def sample(self, keys: Hashes) -> Ints:
        """Which of these blocks are followed: their places in `keys`."""
        return np.flatnonzero((keys >> 16 & 0xFFFFFFFF) < self._threshold)

    def refer(
        self,
        keys: Hashes,
        groups: Ints,
        counted: NDArray[np.bool_],
        references: int,
        prompt_tokens: int,
    ) -> None:
        """Uses of sampled blocks, group after group, in each from the prompt's beginning on.

        O(blocks x 240, and blocks followed for each 240 of them).

        Args:
            keys: the blocks, each once in a group.
            groups: numbers that do not decrease; equal ones were used by one request at once.
            counted: for each block, whether finding it would have been a hit of a prompt.
            references: blocks of the counted prompts, sampled or not.
            prompt_tokens: tokens of the counted prompts.
        """
        self._references += references
        self._prompt_tokens += prompt_tokens
        if len(keys):
            self._waiting.append((keys, groups + self._groups, counted))
            self._groups += int(groups[-1]) + 1
            self._waiting_keys += len(keys)
        if self._waiting_keys >= _BATCH:
            self._place_waiting()

    def _place_waiting(self) -> None:
        if not self._waiting:
            return
        keys, groups, counted = (
            np.concatenate(column) for column in zip(*self._waiting, strict=True)
        )
        self._waiting, self._waiting_keys = [], 0
        first = 0
        begins = np.flatnonzero(np.diff(groups, prepend=-1)).tolist()
        for begin, end in pairwise((*begins, len(keys))):
            if end - first > _BATCH and begin > first:
                self._place(keys[first:begin], groups[first:begin], counted[first:begin])
                first = begin
        self._place(keys[first:], groups[first:], counted[first:])

    def _place(self, keys: Hashes, groups: Ints, counted: NDArray[np.bool_]) -> None:
        """Measures the distances of whole groups, then moves their blocks to the top."""
        # The deepest block of each group first, so that the prompt's beginning ends up on top.
        begins = np.searchsorted(groups, groups, side="left")
        order = begins + np.searchsorted(groups, groups, side="right") - 1 - np.arange(len(keys))
        keys, groups, counted = keys[order], groups[order], counted[order]
        start, last = self._moment, self._last
        self._moment += len(keys)
        uses: list[int] = []  # moments of the uses before; -1: none
        for moment, key in enumerate(keys.tolist(), start):
            uses.append(last.get(key, -1))
            last[key] = moment
        previous = np.array(uses, np.int64)
        moments = np.arange(start, self._moment)

        # Blocks above the own one: those of the stack as it was, and, of uses of earlier groups
        # since, the ones whose own use before lies below (any other was counted already).
        above = len(self._moments) - np.searchsorted(self._moments, previous, side="right")
        if groups[0] != groups[-1]:
            # In short numbers, from the first of these moments on: three times as fast.
            group = (groups - groups[0]).astype(np.int32)
            use = (moments - start).astype(np.int32)
            before = np.maximum(previous - start, -(2**31)).astype(np.int32)
            within = group < group[:, None]
            within &= use > before[:, None]
            within &= before < before[:, None]
            above += within.view(np.uint8).sum(axis=1, dtype=np.uint8)
        found = counted & (previous >= 0)
        distance = (above[found] / self.rate + 1) * self.block_tokens
        places = np.searchsorted(self._limits, distance)
        self._distances += np.bincount(places, minlength=len(self._distances))
        self._distances[-1] += np.count_nonzero(counted & (previous < 0))

        stays = np.ones(len(self._moments), np.bool_)
        stays[np.searchsorted(self._moments, previous[(previous >= 0) & (previous < start)])] = (
            False
        )
        newest = np.ones(len(keys), np.bool_)
        newest[previous[previous >= start] - start] = False
        self._moments = np.concatenate((self._moments[stays], moments[newest]))
        self._keys = np.concatenate((self._keys[stays], keys[newest]))
        if (excess := len(self._moments) - self._depth) > 0:
            for key in self._keys[:excess].tolist():
                del last[key]
            self._moments = self._moments[excess:]
            self._keys = self._keys[excess:]

    def points(self) -> tuple[CurvePoint, ...]:
        """The curve at `FACTORS`; never falling.

        Empty before the first block of a prompt, and while so few are followed that a rate would be
        chance: of `_LEAST_SAMPLED` references it has a standard error of some three points.
        """
        self._place_waiting()
        expected = self._references * self.rate
        if not expected or (self.rate < 1 and expected < _LEAST_SAMPLED):
            return ()
        missing = expected - int(self._distances.sum())
        share = self._references * self.block_tokens / self._prompt_tokens
        hits = np.clip((np.cumsum(self._distances[:-1]) + missing) / expected, 0, 1) * share
        return tuple(
            CurvePoint(factor, round(factor * self.pool_tokens), rate)
            for factor, rate in zip(FACTORS, hits.tolist(), strict=True)
        )
