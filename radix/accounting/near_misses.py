"""Groups of requests that would have shared a long prefix had they not diverged early."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

SHOWN_TOKENS = 48
"""Tokens that are kept of each text: before a divergence, on both sides of it, and after it."""

SKETCH = 8
"""Hashes that represent the content a request shares: the smallest ones."""

MAX_GROUPS = 64

EXAMPLES = 4
"""Differences that are kept of a group."""

_RESYNC = 4  # equal tokens that end a difference


@dataclass(frozen=True, slots=True)
class Difference:
    """The tokens of a request where it diverged, and those of the tree there."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]  # empty if it was evicted from the tree


@dataclass(frozen=True, slots=True)
class NearMiss:
    """Requests that computed the same content anew, since the prompt differed before it.

    Texts are token ids, `SHOWN_TOKENS` of each at most.
    """

    namespace: Hashable
    requests: int
    tokens_cost: int  # tokens of known content that these requests computed again
    position: int  # tokens shared before the difference, at least
    before: tuple[int, ...]  # the last ones of these
    differences: tuple[Difference, ...]  # a few examples
    tokens_after: int  # of known content after the difference, on average over the requests
    after: tuple[int, ...]  # the first ones of these


@dataclass(slots=True)
class Sighting:
    """A request with known content after another prefix."""

    namespace: Hashable
    sketch: Sequence[int]  # the smallest hashes of its known content
    cost: int  # tokens of it
    position: int  # tokens shared before the divergence
    before: bytes
    ours: bytes
    theirs: bytes
    after: bytes


@dataclass(slots=True)
class _Group:
    sighting: Sighting  # the one with the earliest divergence
    names: set[int]  # the hashes of content by which it is found
    requests: int = 0
    cost: int = 0
    inherited: int = 0  # cost of the group whose place it took
    differences: list[tuple[bytes, bytes]] = field(default_factory=list)


class NearMisses:
    """Finds the groups as requests come, in memory for `MAX_GROUPS` of them.

    A request belongs to the group that it shares most content with: of the hashes of its known
    content the smallest few are kept (a bottom-k sketch, Broder 1997), so that the order of the
    content does not matter, nor where the prompts diverged; a quarter of them must be the group's.
    When all places are taken, a new group takes that of the one with the lowest cost and its cost
    with it, so that a group that keeps costing rises above the rest (Metwally et al.,
    "Space-Saving", ICDT 2005); reports have only what a group has cost itself.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._by_name: dict[int, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, sighting: Sighting) -> None:
        """Adds a request to its group, or to a new one. O(1), and O(groups) for a new one."""
        names = sighting.sketch[:SKETCH]
        found = [self._by_name[name] for name in names if name in self._by_name]
        group = max(found, key=lambda each: sum(other is each for other in found), default=None)
        if group is not None and 4 * sum(other is group for other in found) < len(names):
            group = None
        if group is None:
            group = self._open(sighting)
        elif sighting.position < group.sighting.position:
            group.sighting = sighting
        for name in names:
            if len(group.names) < 4 * SKETCH and name not in self._by_name:
                group.names.add(name)
                self._by_name[name] = group
        group.requests += 1
        group.cost += sighting.cost
        difference = sighting.ours, sighting.theirs
        if len(group.differences) < EXAMPLES and difference not in group.differences:
            group.differences.append(difference)

    def _open(self, sighting: Sighting) -> _Group:
        group = _Group(sighting, set())
        if len(self._groups) >= MAX_GROUPS:
            least = min(self._groups, key=lambda other: other.cost + other.inherited)
            group.inherited = least.cost + least.inherited
            self._groups.remove(least)
            for name in least.names:
                del self._by_name[name]
        self._groups.append(group)
        return group

    def top(self, count: int) -> tuple[NearMiss, ...]:
        """The up to `count` groups that cost the most tokens, most first."""
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        groups = sorted(self._groups, key=lambda group: group.cost, reverse=True)
        return tuple(
            NearMiss(
                group.sighting.namespace,
                group.requests,
                group.cost,
                group.sighting.position,
                _ids(group.sighting.before),
                tuple(difference(_ids(ours), _ids(theirs)) for ours, theirs in group.differences),
                group.cost // group.requests,
                _ids(group.sighting.after),
            )
            for group in groups[:count]
        )


def difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> Difference:
    """The two sides up to where they are the same again, if they are within what was kept.

    That is where the fewest tokens of both are left out, and the next four, or all that is left of
    one of them (two at least), are equal. O(tokens).
    """
    first: dict[tuple[int, ...], int] = {}  # where each run of ours comes first
    for left in range(len(ours) - _RESYNC + 1):
        first.setdefault(ours[left : left + _RESYNC], left)
    found = []
    for right in range(len(theirs) - _RESYNC + 1):
        if (at := first.get(theirs[right : right + _RESYNC], -1)) >= 0:
            found.append((at + right, at, right))
    for rest in range(2, min(_RESYNC, len(ours) + 1, len(theirs) + 1)):
        left, right = len(ours) - rest, len(theirs) - rest
        if (at := _place(ours[left:], theirs)) >= 0:
            found.append((left + at, left, at))
        if (at := _place(theirs[right:], ours)) >= 0:
            found.append((at + right, at, right))
    _, left, right = min(found, default=(0, len(ours), len(theirs)))
    return Difference(ours[:left], theirs[:right])


def _place(run: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """Where a run comes first in tokens, -1 if it does not."""
    for at in range(len(tokens) - len(run) + 1):
        if tokens[at : at + len(run)] == run:
            return at
    return -1


def _ids(tokens: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(tokens, np.int32)[:SHOWN_TOKENS].tolist())
