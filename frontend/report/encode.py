"""Encodes a `CacheReport` as JSON, which the pages, the terminal and clients read.

A server adds its latencies and its history, a replay adds its trace. The JSON contains text of
prompts only if `Names` has a decoder; otherwise it has the length and a hash of each piece of text.
Hashes are keyed with random bytes, so nobody can guess what they stand for.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coppice import __version__
from coppice.frontend.report.advice import advice, present
from coppice.frontend.report.memory import memory
from coppice.frontend.report.samples import SPANS, History, Sample
from coppice.frontend.report.words import (
    CAUSE_NAMES,
    Decode,
    cause_meaning,
    drafts_sentence,
    estimate_sentence,
    tiers_sentence,
    windows_sentence,
)
from coppice.runtime.report.snapshot import (
    CAUSES,
    CacheReport,
    Counts,
    NearMiss,
    PinState,
    PrefixNode,
    PromptCauses,
    ReplicaReport,
    SharedPrefix,
    TiersReport,
    WindowReport,
    Windows,
)

SCHEMA = "coppice.cache-report"
VERSION = 1
"""Increases when a reader of the old version would misunderstand the new one."""

SHOWN_TOKENS = 48
"""How many tokens of a prefix the report shows at either end."""

_WINDOWS = tuple(Windows.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Names:
    """How pieces of text and namespaces are named.

    Attributes:
        decode: token ids to text; None if text must not be shown.
        key: of the hashes, 16 random bytes.
    """

    decode: Decode | None
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)

    def piece(self, token_ids: Sequence[int], tokens: int | None = None) -> dict[str, Any]:
        """A piece of text as JSON: its length, a hash, and its text or None.

        `tokens` is the length of the whole piece, if `token_ids` are only the part that is shown.
        """
        return {
            "tokens": len(token_ids) if tokens is None else tokens,
            "hash": self._hash(struct.pack(f"<{len(token_ids)}q", *token_ids)),
            "text": None if self.decode is None else _whole(self.decode(token_ids)),
        }

    def namespace(self, namespace: Hashable) -> str:
        """A readable name: adapter, tenant, and a hash in place of the secret `cache_salt`.

        A namespace of a replayed trace is a string, and is its own name.
        """
        if isinstance(namespace, str):
            return namespace
        salt = getattr(namespace, "cache_salt", None)
        parts = [getattr(namespace, "adapter", None), getattr(namespace, "tenant", None)]
        parts.append(
            None if salt is None else f"#{self._hash(salt.encode(errors='surrogatepass'))}"
        )
        return " ".join(part for part in parts if part is not None) or "default"

    def _hash(self, content: bytes) -> str:
        return hashlib.blake2b(content, digest_size=4, key=self.key).hexdigest()


def _whole(text: str) -> str:
    """The text without replacement characters at its ends, where a token cut a character."""
    return text.strip("\ufffd")


def report_schema() -> dict[str, Any]:
    """The JSON Schema of a server's report, from `schema.json`."""
    source = Path(__file__).with_name("schema.json")
    schema: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return schema


def server_report(
    report: CacheReport,
    history: History,
    names: Names,
    *,
    model: str,
    at: float,
    started: float,
) -> dict[str, Any]:
    """What `/cache/report` answers; docs/cache-report.md explains its parts.

    Args:
        report: the snapshot as of now; its tree may be some seconds older.
        history: the samples taken before it.
        names: how texts and namespaces are named.
        model: the model's name.
        at, started: now, and when the server started, in seconds since the epoch.
    """
    now = Sample(at, report)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "coppice": __version__,
        "model": model,
        "at": at,
        "uptime_seconds": at - started,
        **encode(report, names, window=present(report.accounts)),
        "latency_seconds": history.latencies(now),
        "over_time": {span: history.over_time(span, now) for span in SPANS},
    }


def encode(
    report: CacheReport,
    names: Names,
    *,
    window: str = "since_start",
    policies: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The whole snapshot as dicts, lists, strings and numbers that `json.dumps` accepts.

    Figures of other spans than `window`'s name theirs.

    Args:
        report: the snapshot. Without its tree there are no prefixes and no nodes.
        names: how texts and namespaces are named.
        window: the field of `Windows` whose counts stand for the present.
        policies: the hit rates of eviction policies that were measured on the same requests.
    """
    accounts, policy = report.accounts, report.eviction_policy
    counts: Counts = getattr(accounts.overall, window)
    per_token = report.prefill_seconds_a_token
    span = "" if window == "since_start" else " since the start"
    sizes = memory(report, span=span, lru_rate=(policies or {}).get("lru"))
    advised = advice(counts, sizes, accounts.near_misses, policies)
    return {
        "has_text": names.decode is not None,
        "present": {
            "window": window,
            "hit_rate": counts.hit_rate,
            "ideal_hit_rate": counts.ideal_hit_rate,
            "prompt_tokens": counts.prompt_tokens,
            "hit_tokens": counts.hit_tokens,
            "saved_seconds": counts.hit_tokens * per_token,
            "advice": [asdict(each) for each in advised],
        },
        "counts": _windows(accounts.overall),
        "causes": {
            cause: {"name": CAUSE_NAMES[cause], "meaning": cause_meaning(cause, counts)}
            for cause in CAUSES
        },
        "saved_seconds": report.counts.hit_tokens * per_token,
        "requests": {
            "running": report.requests_running,
            "waiting": report.requests_waiting,
            "finished": report.finished,
            "refused": report.refused,
            "preemptions": report.preemptions,
            "failed_steps": report.failed_steps,
        },
        "generated_tokens": report.generated_tokens,
        "rounded_off_tokens": report.rounded_off_tokens,
        "pool": {
            "page_size": report.page_size,
            "tokens": report.pages_total * report.page_size,
            "pages": {
                "total": report.pages_total,
                "free": report.pages_free,
                "cached": report.pages_cached,
                "pinned": report.pages_pinned,
                "held": report.pages_held,
            },
            "evicted_tokens": report.evicted_tokens,
            "eviction_age_seconds": report.eviction_age.quantile(0.5),
            "eviction_policy": policy,
        },
        "curve": {
            "pool_tokens": accounts.pool_tokens,
            "sentence": sizes.sentence,
            "note": sizes.note,
            "points": [asdict(point) for point in sizes.points],
        },
        "namespaces": [
            {"name": names.namespace(namespace), **_windows(windows)}
            for namespace, windows in accounts.namespaces.items()
        ],
        "other_namespaces": _windows(accounts.other_namespaces),
        "prefixes": [_prefix(prefix, names) for prefix in report.top_prefixes],
        "tree": [_node(node, names) for node in report.tree.nodes] if report.tree else [],
        "near_misses": [_near_miss(each, names) for each in accounts.near_misses],
        "recent": [_recent(each, names) for each in report.recent],
        "pins": [encode_pin(pin, names) for pin in report.pins],
        "adapters": [asdict(each) for each in report.adapters],
        "windows": report.windows and _sliding(report.windows),
        "tiers": report.tiers and _tiers(report.tiers),
        "drafts": _drafts(report) if report.draft_rows else None,
        "replicas": [_replica(each) for each in report.replicas],
    }


def encode_pin(pin: PinState, names: Names) -> dict[str, Any]:
    """A pin as JSON, the same in /cache/pins and in the report."""
    return {
        "name": pin.name,
        "namespace": names.namespace(pin.namespace),
        "tokens": pin.num_tokens,
        "cached_tokens": pin.cached_tokens,
        "ttl_seconds": pin.ttl,
        "seconds_left": pin.seconds_left,
    }


def _windows(windows: Windows) -> dict[str, Any]:
    return {name: _counts(getattr(windows, name)) for name in _WINDOWS}


def _sliding(report: WindowReport) -> dict[str, Any]:
    return {
        "layers": report.layers,
        "windows": [{"tokens": size, "layers": layers} for size, layers in report.windows],
        "keys_read": report.keys_read,
        "keys_skipped": report.keys_skipped,
        "bytes_skipped": report.bytes_skipped,
        "pages_old": report.pages_old,
        "bytes_old": report.bytes_old,
        "sentence": windows_sentence(report),
    }


def _tiers(tiers: TiersReport) -> dict[str, Any]:
    return {
        "stores": [asdict(each) for each in tiers.stores],
        "loaded_tokens": tiers.loaded_tokens,
        "found_tokens": tiers.found_tokens,
        "requests": tiers.requests,
        "computed_instead_tokens": tiers.computed_instead,
        "saved_seconds": tiers.saved_seconds,
        "unwritten_pages": tiers.unwritten_pages,
        "waiting_bytes": tiers.waiting_bytes,
        "sentence": tiers_sentence(tiers),
    }


def _drafts(report: CacheReport) -> dict[str, Any]:
    return {
        "sources": [
            {
                "name": name,
                "drafted_tokens": drafted,
                "accepted_tokens": report.accepted_tokens.get(name, 0),
                "saved_seconds": report.draft_seconds_saved.get(name, 0.0),
            }
            for name, drafted in report.drafted_tokens.items()
        ],
        "model": {
            "hit_tokens": report.draft_model_tokens["hit"],
            "computed_tokens": report.draft_model_tokens["computed"],
            "seconds": report.draft_model_seconds,
        }
        if report.draft_model_tokens
        else None,
        "rows": report.draft_rows,
        "tokens_a_step": report.tokens_a_step,
        "sentence": drafts_sentence(report),
    }


def _replica(replica: ReplicaReport) -> dict[str, Any]:
    pages = ("total", "free", "cached", "pinned", "held")
    return {
        "name": replica.name,
        "requests": replica.requests,
        "running": replica.requests_running,
        "waiting": replica.requests_waiting,
        "prompt_tokens": replica.prompt_tokens,
        "hit_tokens": replica.hit_tokens,
        "hit_rate": replica.hit_rate,
        "other_replica_tokens": replica.other_replica,
        "generated_tokens": replica.generated_tokens,
        "pages": {state: getattr(replica, f"pages_{state}") for state in pages},
        "resident_bytes": replica.resident_bytes,
    }


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "hit_tokens": counts.hit_tokens,
        "loaded_tokens": counts.loaded,
        "loaded_evicted_tokens": counts.loaded_evicted,
        "ideal_tokens": counts.ideal_tokens,
        "computed_tokens": counts.computed_tokens,
        "causes": counts.causes,
        "hit_rate": counts.hit_rate,
        "ideal_hit_rate": counts.ideal_hit_rate,
        "evicted_idle_seconds": counts.evicted_idle_seconds,
        "estimated_tokens": counts.estimated_tokens,
        "standard_errors": counts.standard_errors,
        "estimate": estimate_sentence(counts),
        "same_request": {"tokens": counts.same_tokens, "hit_tokens": counts.same_hit_tokens},
        "preempted": {
            "tokens": counts.preempted_tokens,
            "hit_tokens": counts.preempted_hit_tokens,
        },
    }


def _prefix(prefix: SharedPrefix, names: Names) -> dict[str, Any]:
    ids = prefix.token_ids
    last = ids[max(SHOWN_TOKENS, len(ids) - SHOWN_TOKENS) :]
    return {
        "tokens": len(ids),
        "hits": prefix.hits,
        "tokens_saved": prefix.tokens_saved,
        "pages": prefix.resident_pages,
        "idle_seconds": prefix.idle_seconds,
        "first": names.piece(ids[:SHOWN_TOKENS]),
        "last": names.piece(last) if last else None,
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
        "loaded_tokens": request.loaded,
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
