"""Advice on how to hit more tokens, by the causes for which they missed.

The page, the terminal and replays show the same advice. Its figures are of the span of the headline
(see `present`), unless they name another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coppice.frontend.report.memory import Memory
from coppice.frontend.report.words import duration
from coppice.runtime.report.snapshot import CacheAccounts, Counts, NearMiss

_WORTH = 0.03  # share of the prompt tokens from which a cause gets advice
_ENOUGH = 1000  # prompt tokens from which the last ten minutes stand for the present
_GAIN = 0.005  # of hit rate, from which another policy is advised


@dataclass(frozen=True, slots=True)
class Advice:
    """What can be done about one cause, if anything. `tokens` are the prompt tokens it cost."""

    cause: str
    title: str
    text: str
    tokens: int


def present(accounts: CacheAccounts) -> str:
    """The name of the window that stands for the present, a field of `Windows`."""
    recent = accounts.overall.last_ten_minutes
    return "last_ten_minutes" if recent.prompt_tokens >= _ENOUGH else "since_start"


def advice(
    counts: Counts,
    memory: Memory,
    near_misses: Sequence[NearMiss],
    policies: Mapping[str, float] | None = None,
) -> list[Advice]:
    """Advice for each cause of at least 3 % of the prompt tokens of `counts`, costliest first.

    Args:
        counts: of the span that stands for the present.
        memory: what other sizes of the cache would hit.
        near_misses: the costliest groups since the start, costliest first.
        policies: the hit rates of eviction policies that were measured on the same requests.
    """
    found = []
    for cause, tokens in sorted(counts.causes.items(), key=lambda each: -each[1]):
        if not tokens:
            continue
        if cause == "evicted" and (better := _policy(memory, policies or {})):
            found.append(Advice(cause, *better, tokens))
        if tokens >= _WORTH * counts.prompt_tokens:
            title, text = _about(cause, counts, memory, near_misses)
            if title:
                found.append(Advice(cause, title, text, tokens))
    return found


def _about(
    cause: str, counts: Counts, memory: Memory, near_misses: Sequence[NearMiss]
) -> tuple[str, str]:
    if cause == "evicted":
        title, text = memory.advice()
        idle = f"Evicted tokens came back after {duration(counts.evicted_idle_seconds)} on average."
        return title, f"{idle} {text}"
    if cause == "diverged":
        return _diverged(near_misses, memory.span)
    return {
        "cold": (
            "New text, which no cache could have hit",
            "Nothing is wrong: these tokens came for the first time.",
        ),
        "namespace": (
            "Known text, but of other namespaces",
            "Requests with different cache_salt share nothing. That is the price of keeping them "
            "apart; give requests that may share a prefix the same one.",
        ),
        "in_flight": (
            "The same prefix was asked for several times at once",
            "Send one request of such a burst first, and the others once its first token has come.",
        ),
        "other_replica": (
            "Prefixes that another replica holds",
            f"{counts.other_replica / counts.prompt_tokens:.1%} of the prompt tokens were computed "
            f"though another replica holds them: waiting for it would have taken longer. Each "
            f"replica computes a hot prefix once; if this goes on, all have too much to do, and "
            f"a further replica helps.",
        ),
        "not_loaded": (
            "Tiers are slower than computing",
            "A tier had these tokens, but to compute them was faster, or the tier took too long: a "
            "faster disk or network would make hits of them.",
        ),
        "no_cache": (
            "Prefix caching is off",
            "Every prompt is computed as a whole. Start the engine with --enable-prefix-caching, "
            "its default, to reuse what prompts share.",
        ),
    }.get(cause, ("", ""))


def _policy(memory: Memory, policies: Mapping[str, float]) -> tuple[str, str] | None:
    """The policy that would have hit most, if that is worth a change."""
    best = max(policies, key=lambda name: policies[name], default=memory.policy)
    if best == memory.policy or policies[best] - memory.hit_rate < _GAIN:
        return None
    return (
        f"Evict by {best}",
        f"On the same requests {best} hit {policies[best]:.1%} of the prompt tokens, "
        f"{memory.policy} {memory.hit_rate:.1%}: --eviction-policy {best}.",
    )


def _diverged(near_misses: Sequence[NearMiss], span: str) -> tuple[str, str]:
    title = "Put what differs after what is shared"
    if not near_misses:
        return title, "Known text came after beginnings that differ."
    worst = near_misses[0]
    requests = f"{worst.requests:,} request{'s' if worst.requests > 1 else ''}"
    where = f"after the first {worst.position:,}" if worst.position else "from the beginning"
    return (
        title,
        f"The costliest case{span}: {requests} computed {worst.tokens_cost:,} known tokens again, "
        f"since they differ {where}. It is shown below.",
    )
