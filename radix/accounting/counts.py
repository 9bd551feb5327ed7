"""Counts over the last minute, the last ten minutes and since the start, by namespace."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.seen.hashes import Ints
from coppice.radix.accounting.shares import ESTIMATED, Shares

MAX_NAMESPACES = 64
"""Namespaces that are counted separately; all further ones are counted together."""

TIERS = ("host", "disk", "shared")
"""The names of the tiers beyond the pool, the fastest first."""

_SLOTS = 8  # at first: one for each of 7 namespaces, and one for all further ones


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of prompts by what became of them.

    `prompt_tokens == hit_tokens + computed_tokens`, and each computed token has one cause. These
    are of requests' first admissions. Tokens that a request reuses of its own sequences, or that
    come back after a preemption, are counted apart, so that they do not raise the hit rate.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0  # whose KV was reused, from the pool or from a tier beyond it
    last_token: int = 0  # computed for its logits, though all before it hit
    in_flight: int = 0  # another request was computing them
    other_replica: int = 0  # another replica holds them
    prompt_logprobs: int = 0  # computed before, and again for the logprobs that were asked for
    evicted: int = 0  # computed before under the same prefix, and evicted since; in no tier
    namespace: int = 0  # the same prefix is known under another namespace only
    diverged: int = 0  # known content, but after another prefix
    cold: int = 0  # never seen
    not_loaded: int = 0  # a tier had them, and computing them was faster
    no_cache: int = 0  # there is no cache
    loaded_host: int = 0  # hit tokens that came back from main memory
    loaded_disk: int = 0  # from a disk
    loaded_shared: int = 0  # from a server that replicas share
    loaded_evicted: int = 0  # of the loaded ones, those that this pool had evicted
    ideal_tokens: int = 0  # hit tokens of an unlimited cache, one for all replicas
    evicted_idle: int = 0  # evicted tokens times the seconds since each was last used
    same_tokens: int = 0  # prompt tokens of further sequences of a request
    same_hit_tokens: int = 0
    preempted_tokens: int = 0  # tokens of sequences that came back after a preemption
    preempted_hit_tokens: int = 0
    # Computed tokens whose cause was estimated from a sample; they count among the causes, too. By
    # cause, the square of the estimate's standard error in tokens.
    estimated_tokens: int = 0
    prompt_logprobs_variance: float = 0.0
    evicted_variance: float = 0.0
    namespace_variance: float = 0.0
    diverged_variance: float = 0.0
    cold_variance: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*(getattr(self, name) + getattr(other, name) for name in _ALL))

    @property
    def standard_errors(self) -> dict[str, float]:
        """The standard error in tokens of each cause that was estimated; empty if none was."""
        if not self.estimated_tokens:
            return {}
        return {name: math.sqrt(getattr(self, f"{name}_variance")) for name in ESTIMATED}

    @property
    def standard_error(self) -> float:
        """The largest of them as a share of the prompt tokens; 0 if none was estimated."""
        most = max(self.standard_errors.values(), default=0.0)
        return most / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens

    @property
    def causes(self) -> dict[str, int]:
        """The computed tokens by cause."""
        return {name: getattr(self, name) for name in CAUSES}

    @property
    def loaded(self) -> dict[str, int]:
        """The hit tokens that came from each tier beyond the pool."""
        return {tier: getattr(self, f"loaded_{tier}") for tier in TIERS}

    @property
    def loaded_tokens(self) -> int:
        """The hit tokens that came from all tiers beyond the pool."""
        return sum(self.loaded.values())

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ideal_hit_rate(self) -> float:
        """The hit rate that an unlimited cache would have had on the same requests.

        It has what other replicas hold, too: no replica and no way of routing can do better.
        """
        return self.ideal_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def evicted_idle_seconds(self) -> float:
        """How long ago the evicted tokens had been used last, on average."""
        return self.evicted_idle / self.evicted if self.evicted else 0.0


_ALL = tuple(field.name for field in fields(Counts))

FIELDS = tuple(name for name in _ALL if not name.endswith("_variance"))
"""The columns of a row of counts, in order."""

_COLUMNS = len(FIELDS) + len(ESTIMATED)  # and the chosen places of each of these causes
_ESTIMATED_COLUMNS = [FIELDS.index(name) for name in ESTIMATED]
_REST, _IDEAL, _IDLE = map(FIELDS.index, ("estimated_tokens", "ideal_tokens", "evicted_idle"))
_EVICTED = ESTIMATED.index("evicted")

FOUND_CAUSES = (
    "last_token", "in_flight", "other_replica", "prompt_logprobs", "evicted", "namespace",
    "diverged", "cold",
)  # fmt: skip
"""Why a prompt token was computed though there is a cache, as what was seen before tells."""

CAUSES = (*FOUND_CAUSES, "not_loaded", "no_cache")
"""Why a prompt token was computed."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The same counts over three windows. The rolling ones are exact to one of 60 buckets."""

    last_minute: Counts
    last_ten_minutes: Counts
    since_start: Counts


class _Rolling:
    """For each slot, sums over the last 60 buckets of `bucket_seconds`, with the present one."""

    BUCKETS = 60

    def __init__(self, slots: int, bucket_seconds: int) -> None:
        self.bucket_seconds = bucket_seconds
        self._sums = np.zeros((0, self.BUCKETS, _COLUMNS), np.int64)
        self._numbers = np.zeros((0, self.BUCKETS), np.int64)
        self.reserve(slots)

    def reserve(self, slots: int) -> None:
        """Grows to `slots` slots, more than there are."""
        more = slots - len(self._sums)
        self._sums = np.append(self._sums, np.zeros((more, *self._sums.shape[1:]), np.int64), 0)
        self._numbers = np.append(self._numbers, np.full((more, self.BUCKETS), -1, np.int64), 0)

    def add(self, slots: Ints, seconds: Ints, rows: Ints) -> None:
        """Adds rows; sorted by slot, then by second."""
        numbers = seconds // self.bucket_seconds
        kept = numbers > numbers.max() - self.BUCKETS
        slots, numbers, rows = slots[kept], numbers[kept], rows[kept]
        begins = np.flatnonzero(np.diff(slots << 40 | numbers, prepend=-1))
        slots, numbers = slots[begins], numbers[begins]
        sums = np.add.reduceat(rows, begins, axis=0)
        at = numbers % self.BUCKETS
        stale = self._numbers[slots, at] != numbers
        self._sums[slots[stale], at[stale]] = 0
        self._numbers[slots, at] = numbers
        self._sums[slots, at] += sums

    def sums(self, second: int) -> Ints:
        """The sums of all slots as of `second`. Shape (slots, columns)."""
        now = second // self.bucket_seconds
        live = (self._numbers > now - self.BUCKETS) & (self._numbers <= now)
        return (self._sums * live[:, :, None]).sum(axis=1)

    def forget(self, slot: int) -> None:
        self._numbers[slot] = -1


class RollingCounts:
    """Adds rows of counts, and sums them by window and namespace.

    Memory is bounded: the first `MAX_NAMESPACES` namespaces are counted separately. A further
    one takes the place of one that had no request in the last ten minutes, whose counts then pass
    to "all others"; if there is none, it is counted with these. Seconds are counted from any start.
    """

    _OTHERS = 0  # the slot of all further namespaces

    def __init__(self) -> None:
        slots = _SLOTS  # twice as many when these are taken
        self._minute = _Rolling(slots, 1)
        self._ten_minutes = _Rolling(slots, 10)
        self._start = np.zeros((slots, _COLUMNS), np.int64)
        self._shares = Shares(slots)
        self._used = np.zeros(slots, np.int64)  # the last second with a row
        self._slots: dict[Hashable, int] = {}

    def add(self, rows: Ints, namespaces: Iterable[Hashable], seconds: Sequence[int]) -> None:
        """Adds rows (columns: `FIELDS`), each of a namespace and a second.

        O(rows log rows). Seconds must not decrease from call to call.
        """
        if not len(rows):
            return
        slots = self._slots_of(namespaces, seconds)
        slot, second = np.array(slots, np.int64), np.array(seconds, np.int64)
        order = np.argsort(slot << 40 | second, kind="stable")
        places = np.zeros((len(rows), len(ESTIMATED)), np.int64)
        self._add(slot[order], second[order], np.concatenate((rows, places), 1)[order])

    def add_estimated(
        self,
        rows: Ints,
        places: Ints,
        idle: NDArray[np.float64],
        namespaces: Iterable[Hashable],
        seconds: Sequence[int],
    ) -> None:
        """Adds rows as `add` does, of requests whose `estimated_tokens` are still without causes.

        They are divided among the causes so that each namespace's sums since the start stay as near
        to the shares of its places as they can without ever falling.

        Args:
            rows: columns `FIELDS`.
            places: for each row, its chosen places by cause. Columns: `ESTIMATED`.
            idle: for each row, the idle seconds of its places that were evicted, summed.
            namespaces, seconds: of each row.
        """
        slots = self._slots_of(namespaces, seconds)
        slot, second = np.array(slots, np.int64), np.array(seconds, np.int64)
        order = np.argsort(slot << 40 | second, kind="stable")
        slot, second = slot[order], second[order]
        rows = np.concatenate((rows, places), 1)[order]
        begins = np.flatnonzero(np.diff(slot << 40 | second, prepend=-1))
        slot, second = slot[begins], second[begins]
        rows = np.add.reduceat(rows, begins, axis=0)
        away = np.add.reduceat(idle[order], begins)
        for at, row in enumerate(rows):
            found = self._shares.divide(int(slot[at]), int(row[_REST]), row[len(FIELDS) :])
            row[_ESTIMATED_COLUMNS] += found
            evicted = int(found[_EVICTED])
            row[_IDEAL] += evicted
            row[_IDLE] += round(evicted * self._shares.idle(int(slot[at]), float(away[at])))
        self._add(slot, second, rows)

    def add_groups(self, causes: Ints, groups: Ints) -> None:
        """Chosen places by cause (index in `ESTIMATED`) and group, from which errors are told."""
        self._shares.add_groups(causes, groups)

    def _add(self, slot: Ints, second: Ints, rows: Ints) -> None:
        self._minute.add(slot, second, rows)
        self._ten_minutes.add(slot, second, rows)
        begins = np.flatnonzero(np.diff(slot, prepend=-1))
        self._start[slot[begins]] += np.add.reduceat(rows, begins, axis=0)

    def _slots_of(self, namespaces: Iterable[Hashable], seconds: Sequence[int]) -> list[int]:
        """The slot of each row; that of one like the row before is not looked up again."""
        slots: list[int] = []
        before: tuple[Hashable, int] | None = None
        for row in zip(namespaces, seconds, strict=True):
            if row != before:
                slot, before = self._slot(*row), row
            slots.append(slot)
        return slots

    def _slot(self, namespace: Hashable, second: int) -> int:
        slot = self._slots.get(namespace)
        if slot is None:
            if len(self._slots) < MAX_NAMESPACES:
                if len(self._slots) + 1 == len(self._used):
                    self._reserve(min(2 * len(self._used), MAX_NAMESPACES + 1))
                slot = self._slots[namespace] = len(self._slots) + 1
            else:
                oldest = min(self._slots, key=lambda name: self._used[self._slots[name]])
                if self._used[self._slots[oldest]] > second - 660:
                    return self._OTHERS
                slot = self._slots[namespace] = self._slots.pop(oldest)
                self._start[self._OTHERS] += self._start[slot]
                self._start[slot] = 0
                self._shares.move(slot, self._OTHERS)
                self._minute.forget(slot)
                self._ten_minutes.forget(slot)
        self._used[slot] = second
        return slot

    def _reserve(self, slots: int) -> None:
        more = slots - len(self._used)
        self._minute.reserve(slots)
        self._ten_minutes.reserve(slots)
        self._start = np.append(self._start, np.zeros((more, _COLUMNS), np.int64), 0)
        self._shares.reserve(more)
        self._used = np.append(self._used, np.zeros(more, np.int64))

    def overall(self, second: int) -> Windows:
        """All namespaces together, as of `second`."""
        return self._windows(
            self._minute.sums(second).sum(axis=0),
            self._ten_minutes.sums(second).sum(axis=0),
            self._start.sum(axis=0),
        )

    def by_namespace(self, second: int) -> tuple[dict[Hashable, Windows], Windows]:
        """Each namespace that is counted separately, and all others together, as of `second`."""
        minute, ten_minutes = self._minute.sums(second), self._ten_minutes.sums(second)

        def of(slot: int) -> Windows:
            return self._windows(minute[slot], ten_minutes[slot], self._start[slot])

        return {name: of(slot) for name, slot in self._slots.items()}, of(self._OTHERS)

    def _windows(self, *rows: Ints) -> Windows:
        return Windows(
            *(
                Counts(
                    *row[: len(FIELDS)].tolist(),
                    *self._shares.variances(int(row[_REST]), row[len(FIELDS) :]),
                )
                for row in rows
            )
        )
