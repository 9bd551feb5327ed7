"""Shadow caches: what a cache of the same size would hold, and hit, under another policy."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from coppice.radix.eviction.records import Record
from coppice.radix.eviction.reuse import ReuseTable

# Keys are a rank, then a request number of at most this many bits.
_RANK = 40

# Key, minus the start, serial number, last use, record. Of equal keys the deepest is first.
_Entry = tuple[int, int, int, int, Record]


class Shadow:
    """A simulated cache of `capacity_tokens` over the records of a `History`.

    A record is held whole or not at all, rounded so that the cache is full on average. What the
    last request used is never evicted, as if it still ran; what other running requests use may be
    (nothing tells when a request ends), so new tokens may outlive those before them. `hits` are
    the tokens that were used while held. The records at the ends of held paths are kept in a heap
    by `key`, as `order.LeafHeap` keeps leaves; an entry is dead if its record was used since. Costs
    O(log records) amortised for each new, returning or evicted record and O(1) for other uses.
    """

    def __init__(self, capacity_tokens: int, number: int) -> None:
        self.bit = 1 << number  # in `Record.held`
        self.hits = 0
        self.tokens = 0  # held
        self._capacity = capacity_tokens
        self._entries: list[_Entry] = []
        self._serial = 0
        self._limit = 64

    def key(self, record: Record) -> int:
        """What orders evictions: the least first."""
        raise NotImplementedError

    def use(self, record: Record, now: int) -> None:
        """A record is about to be used again by request `now`, and is held from now on."""
        if record.held & self.bit:
            self.hits += record.length
        else:
            self.enter(record)

    def enter(self, record: Record) -> None:
        """Holds a record that it does not hold."""
        record.held |= self.bit
        self.tokens += record.length

    def grow(self, record: Record, tokens: int) -> None:
        """The record of a running request has got so many tokens more."""
        if record.held & self.bit:
            self.tokens += tokens

    def split(self, upper: Record, lower: Record) -> None:
        """`upper` has taken the first tokens of `lower`, which keeps all children."""

    def offer(self, record: Record) -> None:
        """Enters a record, which may be held, into the order of eviction."""
        if record.held & self.bit:
            self._push(self.key(record), record)

    def leave(self, record: Record) -> None:
        """Evicts a record, or forgets it."""
        record.held &= ~self.bit
        self.tokens -= record.length
        above = record.parent
        if above is not None and above.held & self.bit:
            self.offer(above)

    def fit(self, now: int) -> None:
        """Evicts until the rest fits; nothing that request `now` used."""
        kept: list[_Entry] = []
        entries = self._entries
        while (excess := self.tokens - self._capacity) > 0 and entries:
            entry = entries[0]
            record = entry[4]
            if not self._is_live(entry):
                heappop(entries)
            elif record.last == now:
                kept.append(heappop(entries))
            elif 2 * excess < record.length:
                break
            else:
                heappop(entries)
                self.leave(record)
        for entry in kept:
            heappush(entries, entry)

    def clear(self) -> None:
        """The tree was emptied: it holds nothing."""
        self._entries.clear()
        self.tokens = 0

    def _is_live(self, entry: _Entry) -> bool:
        record = entry[4]
        return bool(record.held & self.bit) and record.last == entry[3]

    def _push(self, key: int, record: Record) -> None:
        self._serial += 1
        entries = self._entries
        heappush(entries, (key, -record.start, self._serial, record.last, record))
        if len(entries) > self._limit:
            self._sort()

    def _sort(self) -> None:
        """Orders by present keys; drops dead and double entries."""
        live = {id(entry[4]): entry for entry in self._entries if self._is_live(entry)}
        self._entries.clear()
        for _, start, serial, last, record in live.values():
            self._entries.append((self.key(record), start, serial, last, record))
        heapify(self._entries)
        self._limit = 64 + 4 * len(self._entries)


class RecencyShadow(Shadow):
    """Evicts what was unused for longest."""

    def key(self, record: Record) -> int:
        return record.last


class FrequencyShadow(Shadow):
    """Evicts what was used least often, before its eviction included; of equals the oldest."""

    def key(self, record: Record) -> int:
        return (record.uses << _RANK) + record.last


class SegmentShadow(Shadow):
    """Evicts what was used once before what was used again, as `SegmentedLeastRecentlyUsed`."""

    PROTECTED = 0.8

    def __init__(self, capacity_tokens: int, number: int) -> None:
        super().__init__(capacity_tokens, number)
        # Records that were used more than once, the last time after this request, are protected.
        self._returned = 0
        self._protected_tokens = 0
        self._last_used: dict[int, int] = {}  # protected tokens by the request that used them last
        self._protected: list[_Entry] = []  # oldest first

    def is_protected(self, record: Record) -> bool:
        return record.uses > 1 and record.last > self._returned

    def key(self, record: Record) -> int:
        if self.is_protected(record):
            return (1 << _RANK) + record.last
        return record.returned if record.returned > record.last else record.last

    def use(self, record: Record, now: int) -> None:
        if record.held & self.bit and self.is_protected(record):
            self._count(record.last, -record.length)
        super().use(record, now)
        self._count(now, record.length)

    def leave(self, record: Record) -> None:
        if self.is_protected(record):
            self._count(record.last, -record.length)
        super().leave(record)

    def fit(self, now: int) -> None:
        self._return_oldest(now)
        super().fit(now)

    def clear(self) -> None:
        super().clear()
        self._protected.clear()
        self._last_used.clear()
        self._protected_tokens = 0

    def _count(self, last: int, tokens: int) -> None:
        if last > self._returned:
            self._protected_tokens += tokens
            if total := self._last_used.pop(last, 0) + tokens:
                self._last_used[last] = total

    def offer(self, record: Record) -> None:
        super().offer(record)
        if record.held & self.bit and self.is_protected(record):
            heappush(
                self._protected, (record.last, -record.start, self._serial, record.last, record)
            )
            if len(self._protected) > 64 + 4 * len(self._entries):
                live = {id(entry[4]): entry for entry in self._protected if self._is_live(entry)}
                self._protected = list(live.values())
                heapify(self._protected)

    def _return_oldest(self, now: int) -> None:
        """Puts the least recently used of the protected on probation until the rest fits."""
        while self._protected_tokens > self.PROTECTED * self._capacity:
            self._returned += 1
            self._protected_tokens -= self._last_used.pop(self._returned, 0)
        while self._protected and self._protected[0][0] <= self._returned:
            entry = heappop(self._protected)
            if self._is_live(entry):
                record = entry[4]
                record.returned = now
                self._push(now, record)


class DensityShadow(Shadow):
    """Evicts what has the least hit density."""

    def __init__(self, capacity_tokens: int, number: int, table: ReuseTable) -> None:
        super().__init__(capacity_tokens, number)
        self._table = table
        self._now = 0
        self._sort_at = 0

    def key(self, record: Record) -> int:
        return (self._table.of(record, self._now) << _RANK) + record.last

    def enter(self, record: Record) -> None:
        super().enter(record)
        if record.parent is not None:
            record.parent.held_children += 1

    def leave(self, record: Record) -> None:
        if record.parent is not None:
            record.parent.held_children -= 1
        super().leave(record)

    def split(self, upper: Record, lower: Record) -> None:
        upper.held_children = 1 if lower.held & self.bit else 0

    def offer(self, record: Record) -> None:
        if not record.held_children:
            super().offer(record)

    def fit(self, now: int) -> None:
        self._now = now + 1  # the request that begins
        if now >= self._sort_at:
            self._sort()
            self._sort_at = now + max(4, len(self._entries) // 16)
        super().fit(now)

    def learned(self) -> None:
        """The table is new."""
        self._sort_at = 0

    def _is_live(self, entry: _Entry) -> bool:
        # A record with held children may have a higher key than they; it waits for their leaving.
        return super()._is_live(entry) and not entry[4].held_children
