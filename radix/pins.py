"""Pins: prefixes that stay cached until they are unpinned or unused for too long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from coppice.radix.node import Hold, Node
from coppice.radix.tokens import TOKEN_BYTES, Tokens, common_prefix, token_bytes
from coppice.radix.tree import RadixTree


class PinRefused(ValueError):
    """A pin is refused: its name is taken, or the budget does not allow it."""


@dataclass(slots=True)
class Pin:
    """A prefix that is kept.

    Attributes:
        name: chosen by the user, unique among the pins.
        tokens: the prefix as int32 bytes.
        namespace: its namespace.
        ttl: seconds without use after which the pin ends; None: never.
        hold: the lock on the part that is cached; None while nothing of it is.
        deadline: when it ends, by the clock of `Pins`; None without a TTL.
        stamp: the tree's logical time at which the pinned part was last seen used.
    """

    name: str
    tokens: bytes
    namespace: Hashable
    ttl: float | None
    hold: Hold | None = None
    deadline: float | None = None
    stamp: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def cached_tokens(self) -> int:
        """Tokens of it that are cached, and so are kept now."""
        return self.hold.length if self.hold is not None else 0


class Pins:
    """The pins of a tree. At most `budget` of the pool's pages can be promised to them.

    A pin is a promise about tokens: those that are cached already are locked at once, the others as
    soon as a request has computed them. Call `refresh` after every step, and before reading the
    pins: it ends those whose time has passed, and locks what was computed since. A sequence uses a
    prefix from its hit until it ends. `clock` returns the time in seconds.
    """

    def __init__(
        self, tree: RadixTree, budget: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ValueError if `budget`, a fraction of the pool, is not within 0 .. 1."""
        if not 0 <= budget <= 1:
            raise ValueError(f"budget must be a fraction of the pool, 0 to 1, got {budget}")
        self.tree = tree
        self.budget_pages = int(tree.pool.num_pages * budget)
        self.clock = clock
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def pin(
        self, name: str, tokens: Tokens, namespace: Hashable = None, *, ttl: float | None = None
    ) -> Pin:
        """Keeps a prefix. O(pins x tokens / memcmp speed).

        A pin of this name that keeps the same prefix is renewed: its time begins anew, with `ttl`.
        Raises PinRefused, with nothing changed, if a pin of this name keeps another prefix or the
        pages of all pins would exceed the budget; ValueError for no tokens at all, bad ones, or a
        `ttl` not above 0. Pins whose time has passed are ended first.
        """
        prefix = token_bytes(tokens)
        if not prefix:
            raise ValueError("tokens: a pin needs at least one token, got none")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl must be more than 0 seconds, or None for no end, got {ttl}")
        self.refresh()
        there = self._pins.get(name)
        if there is not None:
            if (there.tokens, there.namespace) != (prefix, namespace):
                raise PinRefused(f"name: there is a pin named {name!r} already; unpin it first")
            there.ttl = ttl
            there.deadline = None if ttl is None else self.clock() + ttl
            return there
        pin = Pin(name, prefix, namespace, ttl)
        promised = self.promised_pages()
        self._pins[name] = pin
        match = self.tree.match(prefix, namespace)
        if match.length:
            pin.hold = self.tree.lock(match, use=False)
        wanted = self.promised_pages()
        if wanted > self.budget_pages:
            self.unpin(name)
            raise PinRefused(
                f"pin {name!r} needs {wanted - promised} pages more, but {promised} of the "
                f"{self.budget_pages} pages that pins may take are promised to others"
            )
        if ttl is not None:
            pin.deadline = self.clock() + ttl
        pin.stamp = _last_use(pin)
        return pin

    def unpin(self, name: str) -> bool:
        """Ends a pin; what it kept may be evicted from now on. False if there is none."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        if pin.hold is not None:
            self.tree.unlock(pin.hold, use=False)
            pin.hold = None
        return True

    def clear(self) -> None:
        """Ends all pins."""
        for name in list(self._pins):
            self.unpin(name)

    def move_to(self, tree: RadixTree) -> None:
        """Keeps the same prefixes in another, empty tree; gives back no lock in the present one."""
        self.tree = tree
        for pin in self._pins.values():
            pin.hold, pin.stamp = None, 0

    def refresh(self) -> list[str]:
        """Ends the pins whose time has passed; locks what was computed since.

        Returns the names of those that ended. A use since the last call counts as one now.
        O(1) without pins; O(pins) if all they keep is cached, else a match for each that is not.
        """
        if not self._pins:
            return []
        now, ended = self.clock(), []
        for pin in list(self._pins.values()):
            if pin.cached_tokens < pin.num_tokens:
                self._extend_hold(pin)
            if pin.ttl is None or pin.deadline is None:
                continue
            used = _last_use(pin)
            if used != pin.stamp:
                pin.stamp, pin.deadline = used, now + pin.ttl
            if now >= pin.deadline:
                if self._in_use(pin):
                    pin.deadline = now + pin.ttl
                    continue
                self.unpin(pin.name)
                ended.append(pin.name)
        return ended

    def promised_pages(self) -> int:
        """Pages that the pins will take once all of their tokens are cached.

        O(pins x tokens / memcmp speed + nodes on their paths).
        """
        return self._pages((pin.namespace, pin.tokens) for pin in self._pins.values()) + (
            self._spare_pages()
        )

    def locked_pages(self) -> int:
        """Pages that pins keep and no sequence uses, each counted once. O(nodes on their paths)."""
        held = self._held().items()
        return sum(node.own_pages for node, count in held if node.locks == count)

    def _in_use(self, pin: Pin) -> bool:
        """Whether a sequence holds all that a pin keeps. O(nodes on the paths of all pins)."""
        node = pin.hold.node if pin.hold is not None else None
        return node is not None and node.locks > self._held()[node]

    def _held(self) -> Counter[Node]:
        """The nodes that pins keep, and how many of them do."""
        return Counter(
            node
            for pin in self._pins.values()
            if pin.hold is not None and pin.hold.node is not None
            for node in pin.hold.node.path()
        )

    def _spare_pages(self) -> int:
        """Pages that are kept beside those that the kept tokens would fill.

        Where a path branched inside a page, the nodes above and below have a copy of it each.
        """
        kept = (
            (pin.namespace, pin.tokens[: pin.cached_tokens * TOKEN_BYTES])
            for pin in self._pins.values()
        )
        return sum(node.own_pages for node in self._held()) - self._pages(kept)

    def _pages(self, prefixes: Iterable[tuple[Hashable, bytes]]) -> int:
        """Pages that the union of these prefixes fills, each given with its namespace.

        In sorted order a prefix shares with all earlier ones what it shares with the one before.
        """
        size = self.tree.page_size
        total = 0
        grouped: dict[Hashable, list[bytes]] = {}
        for namespace, tokens in prefixes:
            grouped.setdefault(namespace, []).append(tokens)
        for group in grouped.values():
            before = b""
            for tokens in sorted(group):
                shared = common_prefix(tokens, 0, before) // TOKEN_BYTES
                total += -(-len(tokens) // TOKEN_BYTES // size) - shared // size
                before = tokens
        return total

    def _extend_hold(self, pin: Pin) -> None:
        """Locks as much of the prefix as is cached by now.

        Not if that takes more pages than were promised (see `_spare_pages`): requests that were
        accepted on the strength of that promise might not fit any more.
        """
        match = self.tree.match(pin.tokens, pin.namespace)
        if match.length <= pin.cached_tokens:
            return
        before, spare = pin.hold, self._spare_pages()
        pin.hold = self.tree.lock(match, use=False)
        if self._spare_pages() > spare:
            before, pin.hold = pin.hold, before
        if before is not None:
            self.tree.unlock(before, use=False)


def _last_use(pin: Pin) -> int:
    """The tree's logical time of the last use of the part that is kept; 0 if nothing is."""
    if pin.hold is None or pin.hold.node is None:
        return 0
    return pin.hold.node.stamp
