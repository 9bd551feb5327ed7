"""Prompt tokens that came back from other tiers: they are hits, and have no cause of a miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coppice.radix.accounting.counts import FIELDS, FOUND_CAUSES, TIERS

Span = tuple[int, int]
"""A part of a prompt: its first position, and the one after its last."""

_COLUMN = {name: column for column, name in enumerate(FIELDS)}
# Causes in the order of the tokens that have them, from the hit's end on; after these follow
# diverged and cold ones among each other.
_ORDERED = ("in_flight", "other_replica", "evicted", "prompt_logprobs", "namespace")
# Those of tokens that could have been loaded, had that been faster.
_LOADABLE = ("evicted", "namespace", "diverged", "cold")


class FromTiers:
    """What other tiers had of one prompt, and what came back from them.

    While it is `open` more may come; until then its request is not counted.

    Attributes:
        found: parts that a tier had when it was asked, in order.
        loaded: parts that came back, in order, each with the tier's name, one of `TIERS`.
        diverged: when settled, the parts of known content behind all prefixes that were seen.
        open: whether more may come.
    """

    __slots__ = ("found", "loaded", "diverged", "open")

    def __init__(self) -> None:
        self.found: list[Span] = []
        self.loaded: list[tuple[int, int, str]] = []
        self.diverged: list[Span] = []
        self.open = True

    def has(self, parts: Iterable[Span]) -> None:
        """A tier has these parts, which are in order; those that end before they begin are none."""
        self.found = []
        for begin, end in parts:
            if begin < end:
                if self.found and self.found[-1][1] == begin:
                    begin = self.found.pop()[0]
                self.found.append((begin, end))

    @property
    def found_tokens(self) -> int:
        """The tokens that a tier had when it was asked."""
        return sum(end - begin for begin, end in self.found)

    def came(self, begin: int, end: int, tier: str) -> None:
        """The tokens from position `begin` to `end` have come from a tier."""
        if self.loaded and self.loaded[-1][1:] == (begin, tier):
            begin = self.loaded.pop()[0]
        self.loaded.append((begin, end, tier))

    def tokens(self) -> dict[str, int]:
        """The tokens that came back, by tier; only tiers from which some came."""
        found = dict.fromkeys(TIERS, 0)
        for begin, end, tier in self.loaded:
            found[tier] += end - begin
        return {tier: tokens for tier, tokens in found.items() if tokens}

    def counted(self, row: Sequence[int], hit: int) -> list[int]:
        """The counts of a request, with its loaded tokens among the hits.

        Args:
            row: its counts as if all tokens after its hit in the tree had been computed, in the
                order of `FIELDS`.
            hit: tokens that it hit in the tree.

        What a tier had that was computed all the same gets the cause `not_loaded`, unless another
        request was computing it. O(parts).
        """
        counted = list(row)
        parts = self._by_cause(row, hit)
        loaded = [(max(begin, hit), end) for begin, end, _ in self.loaded]
        evicted = row[_COLUMN["evicted"]]
        for cause, spans in parts.items():
            back = _overlap(spans, loaded)
            counted[_COLUMN[cause]] -= back
            counted[_COLUMN["hit_tokens"]] += back
            if cause == "evicted":
                counted[_COLUMN["loaded_evicted"]] = back
            if cause in _LOADABLE:
                left = _overlap(spans, self.found) - _overlap(_both(spans, loaded), self.found)
                counted[_COLUMN[cause]] -= left
                counted[_COLUMN["not_loaded"]] += left
        for begin, end, tier in self.loaded:
            counted[_COLUMN[f"loaded_{tier}"]] += end - max(begin, hit)
        causes = (*FOUND_CAUSES, "not_loaded")
        last = [cause for cause in causes if counted[_COLUMN[cause]] and cause != "in_flight"]
        if loaded and len(last) == 1 and counted[_COLUMN[last[0]]] == 1:
            # All but the last token hit, or is in flight: that one is computed for its logits.
            counted[_COLUMN[last[0]]], counted[_COLUMN["last_token"]] = 0, 1
        if evicted:
            kept = counted[_COLUMN["evicted"]]
            counted[_COLUMN["evicted_idle"]] = row[_COLUMN["evicted_idle"]] * kept // evicted
        ideal = _COLUMN["ideal_tokens"]
        counted[ideal] = max([counted[ideal], *(end for _, end in loaded)])
        return counted

    def missed(self, begin: int, end: int) -> int:
        """The tokens from `begin` to `end` that no tier had."""
        return end - begin - _overlap([(begin, end)], self.found)

    def _by_cause(self, row: Sequence[int], hit: int) -> dict[str, list[Span]]:
        """The parts of the prompt that have each cause; the last token alone is left out."""
        parts: dict[str, list[Span]] = {}
        at = hit
        for cause in _ORDERED:
            tokens = row[_COLUMN[cause]]
            parts[cause] = [(at, at + tokens)] if tokens else []
            at += tokens
        parts["diverged"], parts["cold"] = list(self.diverged), []
        end = row[_COLUMN["prompt_tokens"]] - row[_COLUMN["last_token"]]
        for first, last in [*self.diverged, (end, end)]:
            if first > at:
                parts["cold"].append((at, first))
            at = max(at, last)
        return parts


def _both(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The parts that are in both."""
    both = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(begin, end) for begin, end in both if begin < end]


def _overlap(some: Sequence[Span], others: Sequence[Span]) -> int:
    """The tokens that are in both."""
    return sum(end - begin for begin, end in _both(some, others))
