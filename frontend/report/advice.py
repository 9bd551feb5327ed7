"""Advice on how to hit more tokens, by the causes for which they missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.frontend.report.words import duration, memory_sentence
from coppice.runtime.report.snapshot import CacheAccounts, Counts, NearMiss

_WORTH = 0.03  # share of the prompt tokens from which a cause gets advice
_ENOUGH = 1000  # prompt tokens from which the last ten minutes stand for the present
_GAIN = 0.01  # of hit rate, from which more memory is advised


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


def advice(accounts: CacheAccounts, counts: Counts, policy: str) -> list[Advice]:
    """Advice for each cause of at least 3 % of the prompt tokens of `counts`, costliest first."""
    found = []
    for cause, tokens in sorted(counts.causes.items(), key=lambda each: -each[1]):
        if tokens and tokens >= _WORTH * counts.prompt_tokens:
            title, text = _about(cause, counts, accounts, policy)
            if title:
                found.append(Advice(cause, title, text, tokens))
    return found


def _about(cause: str, counts: Counts, accounts: CacheAccounts, policy: str) -> tuple[str, str]:
    if cause == "evicted":
        return _evicted(counts, accounts, policy)
    if cause == "diverged":
        return _diverged(accounts.near_misses)
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
    }.get(cause, ("", ""))


def _evicted(counts: Counts, accounts: CacheAccounts, policy: str) -> tuple[str, str]:
    idle = f"Evicted tokens came back after {duration(counts.evicted_idle_seconds)} on average."
    rates = {point.factor: point.hit_rate for point in accounts.curve}
    if not rates:
        return "The cache was too small for what came back", f"{idle} Give it more memory."
    if rates[2.0] - rates[1.0] >= _GAIN:
        return "Give the cache more memory", f"{idle} {memory_sentence(accounts, policy)}"
    for point in accounts.curve:
        if point.factor > 2 and point.hit_rate - rates[1.0] >= _GAIN:
            return (
                "Much more memory would help, a little would not",
                f"{idle} It takes {point.factor:.3g} times the memory to gain "
                f"{point.hit_rate - rates[1.0]:.0%} of the prompt tokens.",
            )
    return (
        "More memory would not help",
        f"{idle} Even 16 times the memory would have kept next to none of them.",
    )


def _diverged(near_misses: Sequence[NearMiss]) -> tuple[str, str]:
    title = "Put what differs after what is shared"
    if not near_misses:
        return title, "Known text came after beginnings that differ."
    worst = near_misses[0]
    requests = f"{worst.requests:,} request{'s' if worst.requests > 1 else ''}"
    where = f"after the first {worst.position:,}" if worst.position else "from the beginning"
    return (
        title,
        f"The costliest case: {requests} computed {worst.tokens_cost:,} known tokens again, since "
        f"they differ {where}. It is shown below.",
    )
