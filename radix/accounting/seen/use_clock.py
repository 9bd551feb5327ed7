"""A clock that counts tokens used, and converts its stamps to seconds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.seen.hashes import Hashes, Ints

PER_POOL = 1 << 16
"""Stamps that pass while a pool's worth of tokens is used."""

LAST = 2**32 - 1
"""The last stamp there is."""

_KNOTS = 1 << 13


class UseClock:
    """Stamps pieces of tokens with how many were used until their end, in parts of the pool.

    Stamps begin with 1 and do not decrease. Their times are kept for the last 8,192 of them at
    most; when there are more, every second one of the older half is dropped, and times in between
    are interpolated.
    """

    def __init__(self, pool_tokens: int) -> None:
        if pool_tokens < 1:
            raise ValueError(f"pool_tokens must be at least 1, got {pool_tokens}")
        self._unit = max(1, pool_tokens // PER_POOL)
        self._tokens = 0
        self._stamps = np.zeros(1)
        self._times = np.zeros(1)

    def stamp(self, tokens: Ints, times: NDArray[np.float64]) -> tuple[Hashes, Hashes]:
        """The stamps before pieces of `tokens` tokens each, and their own. O(pieces).

        The pieces were used one after another at `times`, in seconds since the start. Raises
        OverflowError, and changes nothing, when stamps run out, which takes 65,536 pools' worth of
        tokens.
        """
        used = np.cumsum(tokens)
        used += self._tokens
        if used[-1] // self._unit >= LAST:
            raise OverflowError(f"there are no more than {LAST} stamps")
        begins = (used - tokens) // self._unit + 1
        stamps = used // self._unit + 1
        self._tokens = int(used[-1])
        firsts = np.flatnonzero(np.diff(stamps, prepend=self._stamps[-1]))
        if len(firsts):
            self._stamps = np.concatenate((self._stamps, stamps[firsts]))
            self._times = np.concatenate((self._times, times[firsts]))
            if len(self._stamps) > _KNOTS:
                keep = np.ones(len(self._stamps), np.bool_)
                keep[1 : len(keep) // 2 : 2] = False
                self._stamps, self._times = self._stamps[keep], self._times[keep]
        return begins.view(np.uint64), stamps.view(np.uint64)

    def restart(self) -> None:
        """Begins with 1 again. No stamp from before may be asked for."""
        self._tokens = 0
        self._stamps = np.zeros(1)
        self._times = np.zeros(1)

    def time_of(self, stamps: Hashes) -> NDArray[np.float64]:
        """When the first piece with each of these stamps was used. O(n log n)."""
        return np.interp(stamps, self._stamps, self._times)
