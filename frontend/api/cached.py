"""The cached tokens of a prompt in a usage, and where they came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

CachedByTier = Annotated[
    dict[str, Annotated[int, Field(ge=0)]],
    Field(
        description="The cached tokens that were in the pool, and those that came from each tier "
        "beyond it (host, disk, shared); absent without tiers."
    ),
]


def cached_details(cached: int, by_tier: Mapping[str, int] | None) -> dict[str, Any]:
    """The details of a prompt in a usage: its cached tokens, by tier if there are tiers."""
    details: dict[str, Any] = {"cached_tokens": cached}
    return details if by_tier is None else details | {"cached_tokens_by_tier": dict(by_tier)}


def summed(parts: Iterable[Mapping[str, int] | None]) -> dict[str, int] | None:
    """Tokens by tier of several prompts together; None if none of them has any."""
    found: dict[str, int] | None = None
    for part in parts:
        if part is not None:
            found = found or dict.fromkeys(part, 0)
            for tier, tokens in part.items():
                found[tier] = found.get(tier, 0) + tokens
    return found
