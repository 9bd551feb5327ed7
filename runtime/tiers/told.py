"""What tiers have done since the engine's start: counts that only grow."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(slots=True)
class TierCounts:
    """Of one tier.

    Attributes:
        loaded_tokens, loaded_pages, loaded_bytes: that came back into the pool's pages.
        load_seconds: that threads took to read.
        written_pages, written_bytes: that were stored; pages that it had already do not count.
        write_seconds: that the thread took to store them.
        failures: calls that the tier could not serve.
        slow: loads that were given up, since the tier took much longer than before.
        warmed_tokens: that came back before anybody asked for them.
    """

    loaded_tokens: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    written_pages: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    failures: int = 0
    slow: int = 0
    warmed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier as reports have it: its `TierCounts`, and what it keeps now.

    Attributes:
        name: of the tier.
        loaded_tokens, loaded_pages, loaded_bytes, load_seconds, written_pages, written_bytes,
            write_seconds, failures, slow, warmed_tokens: see `TierCounts`.
        damaged: pages that were found damaged, and computed again.
        used_bytes, capacity_bytes: of what it keeps; None where it can't say.
    """

    name: str
    loaded_tokens: int
    loaded_pages: int
    loaded_bytes: int
    load_seconds: float
    written_pages: int
    written_bytes: int
    write_seconds: float
    failures: int
    slow: int
    warmed_tokens: int
    damaged: int
    used_bytes: int | None
    capacity_bytes: int | None

    def plus(self, other: TierReport) -> TierReport:
        """What two engines did with their tiers of this name, and what these keep together.

        What one of them can't say, both together can't.
        """
        values: dict[str, Any] = {"name": self.name}
        for name in (each.name for each in fields(self) if each.name != "name"):
            parts = getattr(self, name), getattr(other, name)
            values[name] = None if None in parts else sum(parts)
        return TierReport(**values)

    def ended(self) -> TierReport:
        """What stays of it once its engine has ended: the counts."""
        return replace(
            self,
            used_bytes=None if self.used_bytes is None else 0,
            capacity_bytes=None if self.capacity_bytes is None else 0,
        )


@dataclass(frozen=True, slots=True)
class TiersReport:
    """All tiers of an engine.

    Attributes:
        stores: each of them, the fastest first.
        found_tokens, requests, computed_instead, saved_seconds, unwritten_pages: see `TiersTold`.
        waiting_bytes: of pages that wait to be stored now.
    """

    stores: tuple[TierReport, ...]
    found_tokens: int
    requests: int
    computed_instead: int
    saved_seconds: float
    unwritten_pages: int
    waiting_bytes: int

    @property
    def loaded_tokens(self) -> int:
        """Tokens that came back from all tiers."""
        return sum(each.loaded_tokens for each in self.stores)

    def plus(self, other: TiersReport) -> TiersReport:
        """What two engines did together."""
        found = {each.name: each for each in self.stores}
        for each in other.stores:
            found[each.name] = found[each.name].plus(each) if each.name in found else each
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name)
                for each in fields(self) if each.name != "stores"}  # fmt: skip
        return TiersReport(stores=tuple(found.values()), **sums)

    def ended(self) -> TiersReport:
        """What stays of it once its engine has ended: the counts."""
        return replace(self, stores=tuple(each.ended() for each in self.stores), waiting_bytes=0)


@dataclass(slots=True)
class TiersTold:
    """Of all tiers together.

    Attributes:
        tiers: counts of each, by its name.
        found_tokens: that a tier had when a request asked.
        requests: for which something was loaded.
        computed_instead: tokens that a tier had and that were computed, which was faster.
        saved_seconds: time that computing the loaded tokens would have taken, by the measured times
            of steps, less what reading them takes at the tiers' measured rates.
        unwritten_pages: that left the pool and were not stored, since too much waited to be.
    """

    tiers: dict[str, TierCounts] = field(default_factory=dict)
    found_tokens: int = 0
    requests: int = 0
    computed_instead: int = 0
    saved_seconds: float = 0.0
    unwritten_pages: int = 0
