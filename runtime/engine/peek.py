"""What a prompt would hit in the cache now, and why the rest would miss; changes nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from coppice.radix import Match, Pin
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.metrics.prompt_accounts import PromptAccounts
from coppice.runtime.requests.request import Sequence
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.schedule.queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Peek:
    """What a request with this prompt would find if it began now.

    Attributes:
        prompt_tokens: of the prompt.
        cached_tokens: whose KV would be reused.
        pinned_tokens: of those, the ones that a pin keeps.
        causes: why the others would be computed, by cause, only causes that occur; empty without
            accounts.
        evicted_idle_seconds: since the evicted ones of them were used last; None: none were.
        page_size: tokens of a page.
        shared_pages: whole pages that it would share.
        copied_pages: 1 if its hit ends inside a page, which it would copy if others use it too.
        new_pages: that its prompt would take from the pool, the copy included.
        namespace: in which it would match.
    """

    prompt_tokens: int
    cached_tokens: int
    pinned_tokens: int
    causes: Mapping[str, int]
    evicted_idle_seconds: float | None
    page_size: int
    shared_pages: int
    copied_pages: int
    new_pages: int
    namespace: Hashable


def peek(
    sequence: Sequence,
    limit: int,
    *,
    paging: Paging,
    waiting: WaitingQueue,
    pins: Iterable[Pin],
    accounts: PromptAccounts,
) -> Peek:
    """What `sequence`, which was never queued, would hit of its first `limit` tokens. O(tokens)."""
    tokens, namespace = sequence.keys(), sequence.request.namespace
    pins = list(pins)
    match = paging.tree.match(tokens if paging.caching else b"", namespace, limit)
    private = match.length > 0 and not _fits_alone(len(sequence.tokens) + 1, match, paging, pins)
    if private:  # it starts without the hit
        match = paging.tree.match(b"", namespace)
    hit, size = match.length, paging.page_size
    limited = None if limit == len(sequence.tokens) - 1 else limit
    causes: Mapping[str, int] = {}
    idle = None
    if paging.accounts is not None:
        in_flight = 0 if private else waiting.led(tokens, namespace, hit)
        held = sequence.request.held_elsewhere
        causes, idle = accounts.preview(tokens, namespace, hit, in_flight, limited, held)
    pinned = [
        min(hit, pin.cached_tokens, common_prefix(pin.tokens, 0, tokens) // TOKEN_BYTES)
        for pin in pins
        if pin.namespace == namespace
    ]
    return Peek(
        prompt_tokens=len(sequence.tokens),
        cached_tokens=hit,
        pinned_tokens=max(pinned, default=0),
        causes=causes,
        evicted_idle_seconds=idle,
        page_size=size,
        shared_pages=hit // size,
        copied_pages=int(hit % size > 0),
        new_pages=paging.pages_needed(len(sequence.tokens), match),
        namespace=namespace,
    )


def _fits_alone(length: int, match: Match, paging: Paging, pins: Iterable[Pin]) -> bool:
    """Whether the pool has `length` tokens' pages beside this hit and the pins, and no other.

    A hit that the engine can't keep even then is computed again. See `Scheduler.schedule`.
    """
    size = paging.page_size
    kept = {
        node: node.own_pages
        for pin in pins
        if pin.hold is not None and pin.hold.node is not None
        for node in pin.hold.node.path()
    }
    node = match.node and match.node.ending(match.length)
    after = 0  # pages of the edge that lie wholly after the hit, and can be evicted
    if node is not None:
        after = -(-node.end // size) - -(-match.length // size)
    while node is not None:
        kept.setdefault(node, node.own_pages - after)
        node, after = node.parent, 0
    free = paging.tree.pool.num_pages - sum(kept.values())
    return paging.pages_needed(length, match) <= free
