"""The pool of pages that replays and simulations have in common, as options give it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from coppice.radix import POLICIES
from coppice.radix.pages.pool import MAX_PAGES


class PoolOptions(Protocol):
    """Options that describe a pool and what is evicted from it."""

    @property
    def pool_tokens(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def eviction_policy(self) -> str: ...


def pages_of(options: PoolOptions) -> int:
    """Pages of the pool, the last one filled partly if need be."""
    return -(-options.pool_tokens // options.page_size)


def check_counts(options: object, names: Iterable[str], optional: str) -> None:
    """Raises ValueError unless each is an integer of at least 1; `optional` may be None."""
    for name in names:
        value = getattr(options, name)
        if name == optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def check_pool(options: PoolOptions) -> None:
    """Raises ValueError for a pool with too many pages, or an unknown eviction policy."""
    if options.eviction_policy not in POLICIES:
        raise ValueError(
            f"eviction_policy must be one of {', '.join(POLICIES)}, got {options.eviction_policy!r}"
        )
    if pages_of(options) > MAX_PAGES:
        raise ValueError(
            f"pool_tokens must be at most {MAX_PAGES} pages of {options.page_size}, "
            f"got {options.pool_tokens}"
        )
