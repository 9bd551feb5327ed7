"""Eviction by learned hit density: the tokens least likely to earn a hit in the time they take."""

from __future__ import annotations

from collections.abc import Iterator

from coppice.radix.eviction.order import EvictionOrder, LeafHeap
from coppice.radix.eviction.past_uses import History
from coppice.radix.eviction.records import Record
from coppice.radix.eviction.reuse import ReuseTable
from coppice.radix.eviction.shadows import RecencyShadow
from coppice.radix.node import Node

# Of the waits that have not ended, a sample of at least this size is read, if there are more.
_SAMPLE = 2048

# What is compared with LRU: windows of at least this many requests that enter at least half the
# capacity; the first few only learn, so that a short run is plain LRU.
_WINDOW = 64
_FIRST_WINDOWS = 4
_MEMORY = 0.85  # weight of the windows before in each
_MARGIN = 0.002  # LRU's lead in hits that counts
_LEAST, _MOST = 8, 64  # windows for which LRU decides after it has won


class HitDensity(EvictionOrder):
    """Evicts the leaf whose last tokens have the least hit density first, unless LRU does better.

    What tokens are worth is learned from how those before them fared (`ReuseTable`), evicted ones
    included: a bounded number of ghosts shows what would have been hit. A simulated LRU cache of
    the same size runs beside it (`History`); while that has more hits than the tree, leaves are
    evicted by recency, for longer each time LRU wins.

    Costs beyond the heap of leaves: O(records on the path) a request, O(1) an evicted leaf, and
    amortised O(1) for learning anew and sorting the leaves again now and then.
    """

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._table = ReuseTable()
        self._shadow = RecencyShadow(capacity_tokens, 0)
        self._history = History(capacity_tokens, self._table.ended, [self._shadow])
        self._leaves = LeafHeap()
        self._learned = 0  # request of the last table
        self._learn_at = 16
        self._sort_at = 0
        self._by_recency = True
        self._windows = 0  # since that was decided
        self._sentence = _FIRST_WINDOWS  # windows until LRU must prove itself again
        self._next_sentence = _LEAST
        self._window_requests = _WINDOW
        self._window_tokens = 0
        self._seen = (0, 0)
        self._own = self._lru = 0.0  # hit tokens, fading

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves)

    def add(self, leaf: Node) -> None:
        self._leaves.add(self._key(leaf), leaf)

    def pop(self) -> Node | None:
        now = self._history.now
        if now >= self._learn_at:
            self._learn(now)
        if now >= self._sort_at and not self._by_recency:
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

    # -- order -------------------------------------------------------------------------------

    def _key(self, leaf: Node) -> tuple[int, int]:
        if self._by_recency:
            return 0, leaf.stamp
        record: Record = leaf.policy_data
        return self._table.of(record, self._history.now), leaf.stamp

    def _sort(self, now: int) -> None:
        """Enters all leaves by their present keys. O(leaves log leaves), each quarter of them."""
        leaves = LeafHeap()
        for leaf in self._leaves:
            leaves.add(self._key(leaf), leaf)
        self._leaves = leaves
        self._sort_at = now + max(4, len(leaves) // 4)

    def _learn(self, now: int) -> None:
        waiting, step = self._history.sample(_SAMPLE)
        half_life = 4096.0 + 2 * step * len(waiting)
        self._table.learn(waiting, step, now, half_life, now - self._learned)
        self._learned = now
        self._learn_at = now + min(max(16, now // 4), 512)
        self._sort_at = now

    # -- LRU or not --------------------------------------------------------------------------

    def _compare(self) -> None:
        """Ends a window: decides whether LRU has done better."""
        history = self._history
        own = history.hit_tokens - self._seen[0]
        lru = self._shadow.hits - self._seen[1]
        self._seen = history.hit_tokens, self._shadow.hits
        self._window_requests = history.now + _WINDOW
        self._window_tokens = history.entered_tokens + self.capacity_tokens // 2
        self._windows += 1
        if self._by_recency:
            if self._windows >= self._sentence:
                self._switch(by_recency=False)
            return
        self._own = self._own * _MEMORY + own
        self._lru = self._lru * _MEMORY + lru
        if self._windows >= 2 and self._lru > self._own * (1 + _MARGIN):
            self._sentence = self._next_sentence
            self._next_sentence = min(_MOST, 2 * self._next_sentence)
            self._switch(by_recency=True)
        elif self._own > self._lru * (1 + _MARGIN):
            self._next_sentence = max(_LEAST, self._next_sentence // 2)

    def _switch(self, by_recency: bool) -> None:
        self._by_recency = by_recency
        self._windows = 0
        self._own = self._lru = 0.0
        self._sort(self._history.now)
