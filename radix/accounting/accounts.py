"""The accounts of the cache as a whole."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from coppice.radix.accounting.counts import Windows
from coppice.radix.accounting.miss_ratio import CurvePoint
from coppice.radix.accounting.near_misses import NearMiss


@dataclass(frozen=True, slots=True)
class CacheAccounts:
    """What the cache did, and what it could have done."""

    seconds: float  # since the start
    pool_tokens: int
    overall: Windows
    namespaces: dict[Hashable, Windows]
    other_namespaces: Windows  # those that are not counted separately, together
    curve: tuple[CurvePoint, ...]  # of LRU, since the start; the actual hit rate is in `overall`
    near_misses: tuple[NearMiss, ...]
