"""Eviction by the rule that earns most now, as shadow caches of all rules show."""

from __future__ import annotations

from collections.abc import Iterator

from coppice.radix.eviction.order import EvictionOrder, LeafHeap
from coppice.radix.eviction.past_uses import History
from coppice.radix.eviction.records import Record
from coppice.radix.eviction.reuse import ReuseTable
from coppice.radix.eviction.shadows import (
    DensityShadow,
    FrequencyShadow,
    RecencyShadow,
    SegmentShadow,
    Shadow,
)
from coppice.radix.node import Node

# Of the waits that have not ended, a sample of at least this size is read, if there are more.
_SAMPLE = 2048

# The shadows are compared after windows of at least this many requests that enter at least a
# quarter of the capacity.
_WINDOW = 64
_MEMORY = 0.75  # weight of the windows before in each
# The rule changes for a lead, in hit tokens, of more than this part of the capacity: after a change
# the cache is still filled as the rule before chose.
_LEAD = 0.02

_SEGMENTS, _DENSITY = 2, 3
# Keys by these rules change though a leaf is not used.
_CHANGING = (_SEGMENTS, _DENSITY)


class Adaptive(EvictionOrder):
    """Evicts by recency, frequency, segments or hit density: whichever earns the most hits lately.

    A shadow cache of the same size is simulated for each rule on the records of what was used
    (`History`), and leaves are evicted by the rule whose shadow leads. A shadow, unlike the tree,
    was filled by its own rule alone, so it shows what a rule earns once it is settled.

    Costs beyond the heap of leaves: for each shadow O(records on the path) a request and
    O(log records) for each record that it lets in or out; O(1) an evicted leaf, and amortised O(1)
    for learning anew and sorting the leaves again now and then.
    """

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._table = ReuseTable(fine=True)
        self._density = DensityShadow(capacity_tokens, _DENSITY, self._table)
        self._shadows: list[Shadow] = [
            RecencyShadow(capacity_tokens, 0),
            FrequencyShadow(capacity_tokens, 1),
            SegmentShadow(capacity_tokens, _SEGMENTS),
            self._density,
        ]
        self._history = History(capacity_tokens, self._table.ended, self._shadows)
        # Index of the shadow that leads. Before densities are learned they order by recency.
        self._rule = _DENSITY
        self._leaves = LeafHeap()
        self._learned = 0  # request of the last table
        self._learn_at = 16
        self._sort_at = 0
        self._window_requests = _WINDOW
        self._window_tokens = 0
        self._seen = [0] * len(self._shadows)  # hits before this window
        self._scores = [0.0] * len(self._shadows)  # hits, fading

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves)

    def add(self, leaf: Node) -> None:
        self._leaves.add(self._key(leaf), leaf)

    def pop(self) -> Node | None:
        now = self._history.now
        if now >= self._learn_at:
            self._learn(now)
        if now >= self._sort_at and self._rule in _CHANGING:
            self._sort(now)
        return self._leaves.pop()

    def tail(self, leaf: Node) -> int:
        """Tokens at the end of a leaf that share its key; those before may be worth more."""
        return leaf.end - max(leaf.policy_data.start, leaf.start)

    def used(self, node: Node, clock: int) -> None:
        history = self._history
        history.use_path(node)
        if history.now >= self._window_requests and history.entered_tokens >= self._window_tokens:
            self._compare()

    def inserted(self, node: Node, tokens: int) -> None:
        self._history.insert(node, tokens)

    def evicted(self, node: Node, tokens: int) -> None:
        self._history.evict(node, tokens)

    def split(self, upper: Node, lower: Node) -> None:
        self._history.split(upper, lower)

    def cleared(self) -> None:
        self._history.clear()

    def _key(self, leaf: Node) -> tuple[int, int]:
        record: Record = leaf.policy_data
        return self._shadows[self._rule].key(record), leaf.stamp

    def _sort(self, now: int) -> None:
        """Enters all leaves by their present keys. O(leaves log leaves), each sixteenth of them."""
        leaves = LeafHeap()
        for leaf in self._leaves:
            leaves.add(self._key(leaf), leaf)
        self._leaves = leaves
        self._sort_at = now + max(4, len(leaves) // 16)

    def _learn(self, now: int) -> None:
        waiting, step = self._history.sample(_SAMPLE)
        half_life = 4096.0 + 2 * step * len(waiting)
        self._table.learn(waiting, step, now, half_life, now - self._learned)
        self._learned = now
        self._learn_at = now + min(max(16, now // 4), 512)
        self._sort_at = now
        self._density.learned()

    def _compare(self) -> None:
        """Ends a window: decides which rule is followed."""
        history = self._history
        self._window_requests = history.now + _WINDOW
        self._window_tokens = history.entered_tokens + self.capacity_tokens // 4
        for number, shadow in enumerate(self._shadows):
            self._scores[number] = self._scores[number] * _MEMORY + shadow.hits - self._seen[number]
            self._seen[number] = shadow.hits
        best = max(range(len(self._scores)), key=self._scores.__getitem__)
        if self._scores[best] - self._scores[self._rule] > _LEAD * self.capacity_tokens:
            self._rule = best
            self._sort(history.now)
