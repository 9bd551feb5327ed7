"""The eviction policies by name: least recently or frequently used, segmented, hit density."""

from __future__ import annotations

from collections.abc import Iterator

from coppice.radix.eviction.adaptive import Adaptive
from coppice.radix.eviction.density import HitDensity
from coppice.radix.eviction.order import EvictionOrder, LeafHeap
from coppice.radix.eviction.past_uses import History
from coppice.radix.eviction.records import Record
from coppice.radix.node import Node


class LeastRecentlyUsed(EvictionOrder):
    """Evicts the leaf that no request has used for longest."""

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._leaves = LeafHeap()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves)

    def add(self, leaf: Node) -> None:
        self._leaves.add(leaf.stamp, leaf)

    def pop(self) -> Node | None:
        return self._leaves.pop()


class LeastFrequentlyUsed(EvictionOrder):
    """Evicts the leaf that was hit least often, and of equals the least recently used.

    Its known weakness: what was hit often in the past stays cached, though no request needs it now.
    """

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._leaves = LeafHeap()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves)

    def add(self, leaf: Node) -> None:
        self._leaves.add((leaf.hits, leaf.stamp), leaf)

    def pop(self) -> Node | None:
        return self._leaves.pop()


class SegmentedLeastRecentlyUsed(EvictionOrder):
    """Evicts tokens that were used once before those used again; each least recently used first.

    SLRU (Karedla, Love and Wherry, "Caching strategies to improve disk system performance",
    Computer 27(3), 1994): new tokens are on probation, another use protects them. At most
    `PROTECTED` of the capacity is protected; beyond it the least recently used return to probation,
    as if they were used just then.

    A use counts although its tokens had been evicted, as in 2Q (Johnson and Shasha, "2Q: a low
    overhead high performance buffer management replacement algorithm", VLDB 1994). Without that,
    where most tokens are evicted before they are used again, few are ever protected, and these stay
    cached: on Mooncake's conversation trace, 9.9% of the tokens then hit in a pool of 3M tokens
    instead of 17.5%.
    """

    PROTECTED = 0.8

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._probation = LeafHeap()
        self._protected = LeafHeap()
        self._history = History(capacity_tokens, self._use)
        # Protected tokens were used more than once, the last time after this request.
        self._returned = 0
        self._protected_tokens = 0
        self._last_used: dict[int, int] = {}  # protected tokens by the request that used them last
        self._clock = 0

    def __iter__(self) -> Iterator[Node]:
        leaves = {id(leaf): leaf for heap in (self._probation, self._protected) for leaf in heap}
        return iter(leaves.values())

    def add(self, leaf: Node) -> None:
        heap = self._protected if self._is_protected(leaf.policy_data) else self._probation
        heap.add(leaf.stamp, leaf)

    def pop(self) -> Node | None:
        if self._protected_tokens > self.PROTECTED * self.capacity_tokens:
            self._return_oldest()
        leaf = self._probation.pop()
        return leaf if leaf is not None else self._protected.pop()

    def tail(self, leaf: Node) -> int:
        """Tokens at the end of a leaf that are in one segment."""
        return leaf.end - max(leaf.policy_data.start, leaf.start)

    def used(self, node: Node, clock: int) -> None:
        self._clock = clock
        self._history.use_path(node)

    def inserted(self, node: Node, tokens: int) -> None:
        self._history.insert(node, tokens)

    def split(self, upper: Node, lower: Node) -> None:
        self._history.split(upper, lower)

    def evicted(self, node: Node, tokens: int) -> None:
        record: Record = node.policy_data
        end = node.end
        begin = end - tokens
        while end > begin:
            start = max(record.start, begin)
            if self._is_protected(record):
                self._count(record.last, start - end)
            if start > begin:
                assert record.parent is not None
                record = record.parent
            end = start
        self._history.evict(node, tokens)

    def cleared(self) -> None:
        self._history.clear()

    # -- segments ----------------------------------------------------------------------------

    def _is_protected(self, record: Record) -> bool:
        return record.uses > 1 and record.last > self._returned

    def _use(self, record: Record, age: int, hit: bool) -> None:
        """A record is about to be used again, or if not `hit`, to be forgotten."""
        if not hit:
            return
        if record.live and self._is_protected(record):
            self._count(record.last, -record.length)
        self._count(record.last + age, record.length)

    def _count(self, last: int, tokens: int) -> None:
        """Adds `tokens`, or subtracts, to the protected ones that request `last` used last."""
        if last > self._returned:
            self._protected_tokens += tokens
            if total := self._last_used.pop(last, 0) + tokens:
                self._last_used[last] = total

    def _return_oldest(self) -> None:
        """Puts the least recently used of the protected on probation until the rest fits."""
        while self._protected_tokens > self.PROTECTED * self.capacity_tokens:
            self._returned += 1
            self._protected_tokens -= self._last_used.pop(self._returned, 0)
        while (leaf := self._protected.pop()) is not None:
            if self._is_protected(leaf.policy_data):
                self._protected.add(leaf.stamp, leaf)
                break
            self._probation.add(self._clock, leaf)


POLICIES: dict[str, type[EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "slru": SegmentedLeastRecentlyUsed,
    "density": HitDensity,
    "adaptive": Adaptive,
}


def make_order(policy: str, capacity_tokens: int) -> EvictionOrder:
    """The order of eviction of a tree of `capacity_tokens` tokens; ValueError if unknown."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    return POLICIES[policy](capacity_tokens)
