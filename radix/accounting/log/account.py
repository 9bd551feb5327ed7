"""The account of one request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

from coppice.radix.accounting.counts import CAUSES, FIELDS, FOUND_CAUSES
from coppice.radix.accounting.log.loaded import FromTiers
from coppice.radix.accounting.near_misses import SHOWN_TOKENS
from coppice.radix.node import Node
from coppice.radix.tokens import TOKEN_BYTES

Kind = Literal["cross", "same", "preempted"]
"""Where a hit comes from: other requests, the request's own sequences, or before a preemption."""


class Divergence(NamedTuple):
    """Where a prompt leaves what is cached, and the tokens around (int32 bytes, a few dozen)."""

    position: int
    before: bytes
    ours: bytes
    theirs: bytes

    @classmethod
    def at(cls, tokens: bytes, position: int, theirs: bytes) -> Divergence:
        """The divergence of the prompt `tokens` from what continues with `theirs`. O(1)."""
        middle, shown = position * TOKEN_BYTES, SHOWN_TOKENS * TOKEN_BYTES
        return cls(
            position,
            tokens[max(0, middle - shown) : middle],
            tokens[middle : middle + shown],
            theirs[:shown],
        )


class RequestAccount:
    """The tokens of a prompt by hit and cause. Reading a cause settles all pending requests.

    `hit_tokens` are those that it hit in the tree; `tiers` has what came after these from other
    tiers, None if none was asked.

    The causes of one that was `skipped` are not known: reading them raises RuntimeError.
    """

    __slots__ = ("namespace", "kind", "prompt_tokens", "hit_tokens", "in_flight_tokens",
                 "hit_limit", "held_elsewhere", "time", "finished", "tokens", "node", "place",
                 "chain", "stamp", "theirs", "tiers", "prompt", "estimated", "skipped",
                 "sampled_at", "seen_tokens", "known_more", "_around", "_settle", "_row",
                 "_evicted")  # fmt: skip

    def __init__(
        self,
        namespace: Hashable,
        kind: Kind,
        prompt_tokens: int,
        hit_tokens: int,
        in_flight_tokens: int,
        hit_limit: int,
        held_elsewhere: int,
        theirs: bytes,
        time: float,
        tokens: bytes,
        node: Node | None,
        place: int,
        settle: Callable[[], object],
        tiers: FromTiers | None = None,
        estimated: bool = False,
        skipped: bool = False,
    ) -> None:
        self.namespace = namespace
        self.kind = kind
        self.prompt_tokens = prompt_tokens
        self.hit_tokens = hit_tokens
        self.in_flight_tokens = in_flight_tokens
        self.hit_limit = hit_limit
        self.held_elsewhere = held_elsewhere
        # What the tree has after the hit, read now: later requests add to it.
        here = hit_tokens * TOKEN_BYTES
        self.theirs = theirs if node is None else _beside(node, tokens[here : here + TOKEN_BYTES])
        self.time = time  # of the admission
        self.finished = False
        self.tiers = tiers
        # Until it is settled, the prompt; then its last tokens, after its last whole block.
        self.tokens = tokens
        self.node = node  # until it is settled, where the hit ends
        self.place = place  # its serial number; -1 when settled
        self.stamp = 0  # when settled, what its prefixes were entered with
        self.chain = 0  # when settled, hash of the prefix that `tokens` continue
        self.prompt = tokens  # until nothing can continue it
        self.estimated = estimated  # its causes are counted by a sample
        self.skipped = skipped  # it is not settled by itself, so that its own causes stay unknown
        self.sampled_at = 0  # the stamp of its places in the sample
        self.seen_tokens = 0  # the sample has seen a place of its prefix that far before
        self.known_more = False  # the sample knew a place by its content, or in another namespace
        self._around = b""  # when settled, the tokens at both sides of the hit's end
        self._settle = settle
        self._row: list[int] | None = None  # counts in the order of `FIELDS`
        self._evicted: tuple[float, float | None] | None = None

    def settled(self, row: list[int], stamp: int, chain: int, tail: bytes) -> None:
        """Fills in the counts (in the order of `FIELDS`), and what later tokens continue from.

        Args:
            row: the counts, as if no tier had been asked.
            stamp: the one its prefixes were entered with.
            chain: hash of the prompt's whole blocks.
            tail: the tokens after these, int32 bytes.
        """
        self._row, self.stamp, self.chain = row, stamp, chain
        hit = self.hit_tokens
        begin = max(0, hit - SHOWN_TOKENS) * TOKEN_BYTES
        self._around = self.tokens[begin : (hit + SHOWN_TOKENS) * TOKEN_BYTES]
        self.tokens = tail
        self.place, self.node = -1, None

    def sampled(self, stamp: int) -> None:
        """The sample has seen its places, with this stamp."""
        self.sampled_at = stamp
        if self.finished:
            self.prompt = b""
        if self.skipped:
            self.place, self.node, self.tokens = -1, None, b""

    def seen_at(self, tokens: int, more: bool) -> None:
        """A place was looked up: its prefix of `tokens` tokens was seen (0: was not).

        `more`: its content was, or its prefix in another namespace.
        """
        self.seen_tokens = max(self.seen_tokens, tokens)
        self.known_more |= more and not tokens

    def settled_evicted(self, idle: float, at: float | None) -> None:
        self._evicted = idle, at

    def as_it_was(self, tokens: bytes) -> RequestAccount:
        """A copy as it was at the admission, with the prompt `tokens`, to be hashed again."""
        return RequestAccount(
            self.namespace, self.kind, self.prompt_tokens, self.hit_tokens, self.in_flight_tokens,
            self.hit_limit, self.held_elsewhere, b"", self.time, tokens, None, -1, self._settle,
        )  # fmt: skip

    def _found(self) -> list[int]:
        """The counts as if no tier had been asked."""
        if self._row is None:
            if self.skipped:
                raise RuntimeError(
                    "the account was not settled by itself, since requests came too fast; its "
                    "`skipped` is True"
                )
            self._settle()
        assert self._row is not None
        return self._row

    def row(self) -> list[int]:
        """The counts so far, in the order of `FIELDS`."""
        row = self._found()
        return row if self.tiers is None else self.tiers.counted(row, self.hit_tokens)

    def found_causes(self) -> dict[str, int]:
        """The tokens after its hit in the tree by cause, as if no tier had been asked."""
        row = self._found()
        return {cause: row[FIELDS.index(cause)] for cause in FOUND_CAUSES}

    def _count(self, name: str) -> int:
        return self.row()[FIELDS.index(name)]

    @property
    def divergence(self) -> Divergence | None:
        """Where the hit ended, if the tree continues there with something else."""
        # A hit of all but the last token may continue with that token in the tree.
        if self.hit_tokens >= self.prompt_tokens - 1:
            return None
        tokens, begin = self.tokens, self.hit_tokens
        if self.place < 0:
            tokens, begin = self._around, min(begin, SHOWN_TOKENS)
        ours, theirs = tokens[begin * TOKEN_BYTES : (begin + 1) * TOKEN_BYTES], self.theirs
        if not theirs or theirs[:TOKEN_BYTES] == ours:
            return None
        return Divergence.at(tokens, begin, theirs)._replace(position=self.hit_tokens)

    @property
    def loaded(self) -> dict[str, int]:
        """The tokens that came from each tier so far; only tiers from which some came."""
        return {} if self.tiers is None else self.tiers.tokens()

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens - sum(self.loaded.values())

    @property
    def causes(self) -> dict[str, int]:
        """The computed tokens by cause; their sum is `computed_tokens`."""
        row = self.row()
        return {cause: row[FIELDS.index(cause)] for cause in CAUSES}

    @property
    def ideal_tokens(self) -> int:
        """What an unlimited cache would have hit that also has what other replicas hold."""
        return self._count("ideal_tokens")

    @property
    def evicted_idle_seconds(self) -> float | None:
        """How long before the request its evicted tokens were last used; None if none were."""
        self._count("evicted")
        return self._evicted[0] if self._evicted is not None else None

    @property
    def evicted_at(self) -> float | None:
        """When its evicted tokens were evicted; None if none were, or if that was not recorded."""
        self._count("evicted")
        return self._evicted[1] if self._evicted is not None else None


def _beside(node: Node, first: bytes) -> bytes:
    """The first tokens of the newest edge below a node that does not begin with `first`. O(1)."""
    children = node.children
    for token in reversed(children):
        if token != first:
            child = children[token]
            shown = child.length if child.length < SHOWN_TOKENS else SHOWN_TOKENS
            return child.edge[: shown * TOKEN_BYTES]
    return b""
