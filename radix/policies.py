"""The eviction policies by name: least recently or frequently used, segmented, hit density."""

from __future__ import annotations

from collections.abc import Iterator

from coppice.radix.hit_density import HitDensity
from coppice.radix.node import Node
from coppice.radix.order import EvictionOrder, LeafHeap


class LeastRecentlyUsed(EvictionOrder):
    """The leaf that no request has used for longest goes first."""

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
    """The leaf that was hit least often goes first, the least recently used of equals.

    What was hit often once stays for ever; that is what the policy is known for.
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
    """Leaves that were never hit go first, then those that were; each least recently used first.

    SLRU (Karedla, Love and Wherry, "Caching strategies to improve disk system performance",
    Computer 27(3), 1994): new tokens are on probation, a hit protects the path. At most
    `PROTECTED` of the capacity is protected; beyond it the least recently used protected leaf
    returns to probation.
    """

    PROTECTED = 0.8

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._probation = LeafHeap()
        self._protected = LeafHeap()
        self._protected_tokens = 0
        self._clock = 0

    def __iter__(self) -> Iterator[Node]:
        leaves = {id(leaf): leaf for heap in (self._probation, self._protected) for leaf in heap}
        return iter(leaves.values())

    # `mark` is True on protected nodes; whatever is above one is protected as well.

    def used(self, node: Node, clock: int) -> None:
        self._clock = clock
        while not node.mark and node.parent is not None:
            node.mark = True
            self._protected_tokens += node.length
            node = node.parent

    def inserted(self, node: Node, tokens: int) -> None:
        if node.mark:
            self._protected_tokens += tokens

    def evicted(self, node: Node, tokens: int) -> None:
        if node.mark:
            self._protected_tokens -= tokens

    def add(self, leaf: Node) -> None:
        (self._protected if leaf.mark else self._probation).add(leaf.stamp, leaf)

    def pop(self) -> Node | None:
        while self._protected_tokens > self.PROTECTED * self.capacity_tokens:
            leaf = self._protected.pop()
            if leaf is None:  # the others are locked, or above a leaf on probation
                break
            leaf.mark = None
            self._protected_tokens -= leaf.length
            self._probation.add(self._clock, leaf)
        leaf = self._probation.pop()
        return leaf if leaf is not None else self._protected.pop()


POLICIES: dict[str, type[EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "slru": SegmentedLeastRecentlyUsed,
    "density": HitDensity,
}


def make_order(policy: str, capacity_tokens: int) -> EvictionOrder:
    """The order of eviction of a tree of `capacity_tokens` tokens; ValueError if unknown."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    return POLICIES[policy](capacity_tokens)
