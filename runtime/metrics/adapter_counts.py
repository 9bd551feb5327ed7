"""Counts what the requests of each adapter hit, and how much of that the base model had cached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coppice.runtime.requests.request import Request


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What the requests of one adapter took from the cache since it was loaded.

    Attributes:
        name: by which requests ask for it.
        identity: the name and a digest of its files; its namespace, where it acts on all tokens.
        invoked: whether tokens of the prompt invoke it. A prompt without them is the base model's,
            and is not counted here.
        unloading: whether no new request gets it.
        requests, prompt_tokens: of those that were admitted.
        hit_tokens: prompt tokens whose KV was reused, from tiers too.
        base_tokens, base_hit_tokens: those of both that stand before the invocation, which are
            the base model's.
    """

    name: str
    identity: str
    invoked: bool
    unloading: bool
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    base_tokens: int = 0
    base_hit_tokens: int = 0


class AdapterCounts:
    """The counts of the adapters of one engine, by their numbers."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}

    def admitted(self, number: int, begin: int, request: Request, hit_tokens: int) -> None:
        """Counts a request on which adapter ``number`` acts from token ``begin`` on."""
        prompt = len(request.prompt_token_ids)
        counts = self._counts.setdefault(number, [0, 0, 0, 0, 0])
        new = (1, prompt, hit_tokens, min(begin, prompt), min(begin, hit_tokens))
        for place, more in enumerate(new):
            counts[place] += more

    def loaded(self, number: int, acts: int, begin: int, end: int) -> None:
        """Counts prompt tokens from `begin` to `end` that came from a tier.

        The adapter acts on a prompt's tokens from position `acts` on.
        """
        counts = self._counts[number]
        counts[2] += end - begin
        counts[4] += min(acts, end) - min(acts, begin)

    def of(self, number: int) -> Iterable[int]:
        """The counts of an adapter, in the order of `AdapterReport`'s fields."""
        return self._counts.get(number, ())

    def forget(self, number: int) -> None:
        """Drops the counts of an adapter that is given back."""
        self._counts.pop(number, None)
