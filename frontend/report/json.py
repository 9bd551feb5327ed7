"""The cache's report as JSON: what /cache/report answers, the page shows and the terminal reads.

Text of prompts is in it only if the server was told to show it; otherwise each piece of text is its
length and a hash. Hashes and the names of namespaces are keyed with a number that the server draws
when it starts: the same within one run, and of no use for guessing what they stand for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coppice import __version__
from coppice.frontend.report.advice import advice, present
from coppice.frontend.report.samples import SPANS, History, Sample
from coppice.frontend.report.words import (
    CAUSE_NAMES,
    Decode,
    cause_meaning,
    memory_sentence,
)
from coppice.runtime.report.cache import (
    CAUSES,
    CacheAccounts,
    Counts,
    NearMiss,
    PrefixNode,
    PromptCauses,
    Windows,
)
from coppice.runtime.report.live import LiveReport, PinState, PrefixEnds, TreePicture

SCHEMA = "coppice.cache-report"
VERSION = 1
"""Counts up when a reader of the old version would misunderstand the new one."""

_NAMED = tuple(Windows.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Names:
    """How pieces of text and namespaces are named.

    Attributes:
        decode: token ids to text; None if text must not be shown.
        key: of the hashes, 16 random bytes of this run.
    """

    decode: Decode | None
    key: bytes

    def piece(self, token_ids: Sequence[int], tokens: int | None = None) -> dict[str, Any]:
        """A piece of `tokens` tokens (default: all), of which these are shown."""
        return {
            "tokens": len(token_ids) if tokens is None else tokens,
            "hash": self._hash(struct.pack(f"<{len(token_ids)}q", *token_ids)),
            "text": None if self.decode is None else _whole(self.decode(token_ids)),
        }

    def namespace(self, namespace: Hashable) -> str:
        """A name that tells nothing of the `cache_salt` in it: its hash; a tenant's is shown."""
        salt = getattr(namespace, "cache_salt", None)
        parts = [getattr(namespace, "adapter", None), getattr(namespace, "tenant", None)]
        parts.append(
            None if salt is None else f"#{self._hash(salt.encode(errors='surrogatepass'))}"
        )
        return " ".join(part for part in parts if part is not None) or "default"

    def _hash(self, content: bytes) -> str:
        return hashlib.blake2b(content, digest_size=4, key=self.key).hexdigest()


def _whole(text: str) -> str:
    """Text without the pieces of characters that a cut between tokens left at its ends."""
    return text.strip("\ufffd")


def report_json(
    live: LiveReport,
    tree: TreePicture,
    history: History,
    *,
    model: str,
    at: float,
    started: float,
    names: Names,
) -> dict[str, Any]:
    """The report (see docs/cache-report.md for what its parts mean).

    Args:
        live: the engine's counters, accounts and pins as of now.
        tree: its prefixes, which may be some seconds old.
        history: the samples before.
        model: its name.
        at, started: now, and when the server started, in seconds since the epoch.
        names: how texts and namespaces are named.
    """
    stats, accounts, now = live.stats, live.accounts, Sample(at, live.stats)
    window, counts = present(accounts)
    per_token = stats.prefill_seconds / stats.prefill_tokens if stats.prefill_tokens else 0.0
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "coppice": __version__,
        "model": model,
        "at": at,
        "uptime_seconds": at - started,
        "has_text": names.decode is not None,
        "present": {
            "window": window,
            "hit_rate": counts.hit_rate,
            "ideal_hit_rate": counts.ideal_hit_rate,
            "prompt_tokens": counts.prompt_tokens,
            "hit_tokens": counts.hit_tokens,
            "saved_seconds": counts.hit_tokens * per_token,
            "advice": [asdict(each) for each in advice(accounts, live.eviction_policy)],
        },
        "counts": _windows(accounts.overall),
        "causes": {
            cause: {"name": CAUSE_NAMES[cause], "meaning": cause_meaning(cause, counts)}
            for cause in CAUSES
        },
        "saved_seconds": stats.counts.hit_tokens * per_token,
        "requests": {
            "running": stats.requests_running,
            "waiting": stats.requests_waiting,
            "finished": stats.finished,
            "refused": stats.refused,
            "preemptions": stats.preemptions,
            "failed_steps": stats.failed_steps,
        },
        "generated_tokens": stats.generated_tokens,
        "rounded_off_tokens": stats.rounded_off_tokens,
        "pool": {
            "page_size": stats.page_size,
            "tokens": stats.pages_total * stats.page_size,
            "pages": {
                "total": stats.pages_total,
                "free": stats.pages_free,
                "cached": stats.pages_cached,
                "pinned": stats.pages_pinned,
                "held": stats.pages_held,
            },
            "evicted_tokens": stats.evicted_tokens,
            "eviction_age_seconds": stats.eviction_age.quantile(0.5),
            "eviction_policy": live.eviction_policy,
        },
        "curve": _curve(accounts, live.eviction_policy),
        "latency_seconds": history.latencies(now),
        "over_time": {span: history.over_time(span, now) for span in SPANS},
        "namespaces": [
            {"name": names.namespace(namespace), **_windows(windows)}
            for namespace, windows in accounts.namespaces.items()
        ],
        "other_namespaces": _windows(accounts.other_namespaces),
        "prefixes": [_prefix(prefix, names) for prefix in tree.prefixes],
        "tree": [_node(node, names) for node in tree.nodes],
        "near_misses": [_near_miss(each, names) for each in accounts.near_misses],
        "recent": [_recent(each, names) for each in live.recent],
        "pins": [pin_json(pin, names) for pin in live.pins],
    }


def pin_json(pin: PinState, names: Names) -> dict[str, Any]:
    """A pin, as /cache/pins and the report tell it."""
    return {
        "name": pin.name,
        "namespace": names.namespace(pin.namespace),
        "tokens": pin.num_tokens,
        "cached_tokens": pin.cached_tokens,
        "ttl_seconds": pin.ttl,
        "seconds_left": pin.seconds_left,
    }


def _windows(windows: Windows) -> dict[str, Any]:
    return {name: _counts(getattr(windows, name)) for name in _NAMED}


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "hit_tokens": counts.hit_tokens,
        "ideal_tokens": counts.ideal_tokens,
        "computed_tokens": counts.computed_tokens,
        "causes": counts.causes,
        "hit_rate": counts.hit_rate,
        "ideal_hit_rate": counts.ideal_hit_rate,
        "evicted_idle_seconds": counts.evicted_idle_seconds,
        "same_request": {"tokens": counts.same_tokens, "hit_tokens": counts.same_hit_tokens},
        "preempted": {
            "tokens": counts.preempted_tokens,
            "hit_tokens": counts.preempted_hit_tokens,
        },
    }


def _curve(accounts: CacheAccounts, policy: str) -> dict[str, Any]:
    return {
        "pool_tokens": accounts.pool_tokens,
        "sentence": memory_sentence(accounts, policy),
        "points": [asdict(point) for point in accounts.curve],
    }


def _prefix(prefix: PrefixEnds, names: Names) -> dict[str, Any]:
    return {
        "tokens": prefix.num_tokens,
        "hits": prefix.hits,
        "tokens_saved": prefix.tokens_saved,
        "pages": prefix.resident_pages,
        "idle_seconds": prefix.idle_seconds,
        "first": names.piece(prefix.first),
        "last": names.piece(prefix.last) if prefix.last else None,
    }


def _node(node: PrefixNode, names: Names) -> dict[str, Any]:
    return {
        "parent": None if node.parent < 0 else node.parent,
        "namespace": names.namespace(node.namespace),
        "start": node.start,
        "hits": node.hits,
        "tokens_saved": node.tokens_saved,
        "subtree_saved": node.subtree_saved,
        "edge": names.piece(node.token_ids, node.length),
    }


def _near_miss(group: NearMiss, names: Names) -> dict[str, Any]:
    return {
        "namespace": names.namespace(group.namespace),
        "requests": group.requests,
        "tokens_cost": group.tokens_cost,
        "position": group.position,
        "tokens_after": group.tokens_after,
        "before": names.piece(group.before, group.position),
        "differences": [
            {"ours": names.piece(each.ours), "theirs": names.piece(each.theirs)}
            for each in group.differences
        ],
        "after": names.piece(group.after, group.tokens_after),
    }


def _recent(request: PromptCauses, names: Names) -> dict[str, Any]:
    parted = request.difference
    return {
        "namespace": names.namespace(request.namespace),
        "seconds_ago": request.seconds_ago,
        "prompt_tokens": request.prompt_tokens,
        "hit_tokens": request.hit_tokens,
        "causes": request.causes,
        "evicted_idle_seconds": request.evicted_idle_seconds,
        "evicted_seconds": request.evicted_seconds,
        "divergence": parted
        and {
            "before": names.piece(request.before, request.divergence),
            "ours": names.piece(parted.ours),
            "theirs": names.piece(parted.theirs),
        },
    }
