"""The batch's tree, cut into levels as FlashInfer's wrappers take them.

FlashInfer reads keys by groups: the rows of a group, which lie side by side in the batch, read one
list of pages. A level is one launch, a list of groups. Every sequence belongs to one group of each
level that it lies in, and in the last to one of its own, so that all its keys are read once::

    places     s0   s1   s2   s3   s4   s5   s6 (three rows)
    level 0  | system prompt           | no pages ...      |
    level 1  | document A  | document B |
    decode   | .  | .  | .  | .  | .  | .  |                   what is left of each
    prefill                               | s6             |   the same, causal

Groups of a level without pages fill the gaps between those that have some. What no level shares
stays with its sequence: full pages below its cached length, which all its rows see, may come in any
order before the pages of its own rows, since the causal mask counts from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coppice.kernels.attention.interface import AttentionPlan, SharedStretch
from coppice.kernels.schedule.cost import (
    CostModel,
    SharedRange,
    choose_shared,
    saved_bytes,
)

#: Launches that a shared level costs: its own, and the merge of its partial results.
_LEVEL_LAUNCHES = 2

#: Ranges of keys that are read once for their members, of which no two have a member in common.
SharedLevel = tuple[SharedRange, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One launch over the rows from ``first_row`` on, all arrays int32.

    ``query_indptr [G + 1]``: rows of each group, counted from ``first_row``. ``page_indptr
    [G + 1]``: its pages among those of the level, which are ``run_counts [n]`` entries each from
    ``run_starts [n]`` on, in the page tables of the plan (``AttentionPlan.table_starts``).
    ``last_page_len [G]``: tokens of its last page, 0 where it has none. ``kv_len [G]``: its tokens.
    ``causal``: the last of its rows sees the last of its tokens, the one before it one less;
    otherwise all rows see all tokens.
    """

    first_row: int
    query_indptr: np.ndarray
    page_indptr: np.ndarray
    run_starts: np.ndarray
    run_counts: np.ndarray
    last_page_len: np.ndarray
    kv_len: np.ndarray
    causal: bool

    @property
    def num_rows(self) -> int:
        return int(self.query_indptr[-1])

    @property
    def num_pages(self) -> int:
        return int(self.page_indptr[-1])

    def page_ids(self, tables: np.ndarray) -> np.ndarray:
        """The ids of its pages; ``tables`` is what the runs point to."""
        runs = zip(self.run_starts, self.run_counts, strict=True)
        return np.concatenate([tables[:0], *(tables[at : at + count] for at, count in runs)])


@dataclass(frozen=True, slots=True, eq=False)
class LevelSchedule:
    """The levels of a step.

    ``rows`` int64 ``[T]`` is the batch row in each place, or None where that is the place itself.
    The places of ``decode``, sequences of one row, and of ``prefill`` together are all; each may be
    missing, not both. ``shared`` levels are partial results, to be merged into them.
    """

    rows: np.ndarray | None
    shared: tuple[Level, ...]
    decode: Level | None
    prefill: Level | None

    @property
    def levels(self) -> tuple[Level, ...]:
        last = (self.decode, self.prefill)
        return (*self.shared, *(level for level in last if level is not None))


def choose_levels(
    plan: AttentionPlan, window: int | None, model: CostModel
) -> tuple[SharedLevel, ...]:
    """The stretches that ``choose_shared`` would share, by their depth among themselves.

    A depth whose stretches together save less than its launches cost is left out. With a window,
    only sequences all of whose rows see all of their keys share. O(stretches).
    """
    stretches = plan.stretches
    if window is not None:
        whole = plan.context_len <= window
        members = [stretch.members[whole[stretch.members]] for stretch in stretches]
        stretches = tuple(
            SharedStretch(stretch.first_page, stretch.num_pages, left)
            for stretch, left in zip(stretches, members, strict=True)
            if len(left) > 1
        )
    if not stretches:
        return ()
    levels: list[list[SharedRange]] = []
    # All members of a range have the same ranges above it: those that are chosen are nested too.
    depth = np.zeros(plan.num_sequences, np.int64)
    for each in choose_shared(replace(plan, stretches=stretches), None, model):
        at = int(depth[each.members[0]])
        if at == len(levels):
            levels.append([])
        levels[at].append(each)
        depth[each.members] += 1
    counts = np.diff(plan.query_start)
    reads = model.reads(counts)

    def pays(level: Sequence[SharedRange]) -> bool:
        saved = 0.0
        for each in level:
            rows = int(counts[each.members].sum())
            fewer = float(reads[each.members].sum() - model.reads(np.array(rows)))
            saved += saved_bytes(rows, fewer, each.end - each.begin, 1, model)
        return saved > _LEVEL_LAUNCHES * model.launch_bytes

    return tuple(tuple(level) for level in levels if pays(level))


def build_levels(
    plan: AttentionPlan, window: int | None, shared: Sequence[SharedLevel] = ()
) -> LevelSchedule:
    """What each launch of a checked plan is given, for layers with that sliding window.

    ``shared`` is as ``choose_levels`` has it. O(rows), with Python loops over ranges.
    """
    counts = np.diff(plan.query_start)
    everyone = np.arange(plan.num_sequences)
    # Decoding first; members of a range side by side, at every level within those of the level
    # above. The first member stands for its range, once among those that decode and once among the
    # others; sequences beside all ranges stand for themselves.
    many = counts > 1
    groups = []
    for level in shared:
        group = everyone.copy()
        for each in level:
            for part in (each.members[~many[each.members]], each.members[many[each.members]]):
                group[part] = part[:1]
        groups.append(group)
    order = np.lexsort([everyone, *reversed(groups), many])
    starts = np.cumsum([0, *counts[order]])
    levels = tuple(_shared_level(plan, order, starts, level) for level in shared)
    own = _own_pages(plan, window, order, [each for level in shared for each in level])
    decoding = int((~many).sum())
    decode = prefill = None
    if decoding:
        decode = own.part(0, decoding, starts, causal=False)
    if decoding < plan.num_sequences:
        prefill = own.part(decoding, plan.num_sequences, starts, causal=True)
    rows = None if (order == everyone).all() else plan.rows_of(order)
    return LevelSchedule(rows, levels, decode, prefill)


def _shared_level(
    plan: AttentionPlan, order: np.ndarray, starts: np.ndarray, level: SharedLevel
) -> Level:
    """From the first to the last sequence that shares something here, with what lies between."""
    which = np.full(plan.num_sequences, -1)
    for number, each in enumerate(level):
        which[each.members] = number
    which = which[order]
    inside = np.flatnonzero(which >= 0)
    first, stop = int(inside[0]), int(inside[-1]) + 1
    cuts = np.flatnonzero(which[first + 1 : stop] != which[first : stop - 1]) + first + 1
    heads = np.array([first, *cuts])
    kv_len = np.zeros(len(heads), np.int64)
    runs = []
    for place, head in enumerate(heads):
        if which[head] < 0:
            continue
        each = level[which[head]]
        size = plan.page_size
        at = int(plan.table_starts[each.members[0]]) + each.begin // size
        runs.append((at, (each.end - each.begin) // size))
        kv_len[place] = each.end - each.begin
    found = np.array(runs, np.int64).reshape(-1, 2).T
    return _level(plan, starts[[*heads, stop]], kv_len, *found, causal=False)


@dataclass(frozen=True, slots=True, eq=False)
class _OwnPages:
    """What no level shares of each sequence, in the order of places; and whose each run is."""

    plan: AttentionPlan
    kv_len: np.ndarray
    run_places: np.ndarray
    run_starts: np.ndarray
    run_counts: np.ndarray

    def part(self, first: int, stop: int, starts: np.ndarray, *, causal: bool) -> Level:
        runs = slice(*np.searchsorted(self.run_places, (first, stop)))
        return _level(
            self.plan,
            starts[first : stop + 1],
            self.kv_len[first:stop],
            self.run_starts[runs],
            self.run_counts[runs],
            causal=causal,
        )


def _own_pages(
    plan: AttentionPlan, window: int | None, order: np.ndarray, shared: Sequence[SharedRange]
) -> _OwnPages:
    size = plan.page_size
    context = plan.context_len.astype(np.int64)
    cursor = np.zeros(plan.num_sequences, np.int64)
    if window is not None:
        # What lies before the window of a sequence's first row is read by none of its rows.
        first_row = context - np.diff(plan.query_start)
        cursor = np.maximum(first_row + 1 - window, 0) // size
    left_out = cursor * size
    # Runs of pages: what lies before each range for those that have not shared it, then the rest.
    runs = []
    for each in shared:
        at, members = each.begin // size, each.members
        before = members[cursor[members] < at]
        runs.append((before, cursor[before], np.full(len(before), at)))
        cursor[members] = each.end // size
        left_out[members] += each.end - each.begin
    everyone = np.arange(plan.num_sequences)
    runs.append((everyone, cursor, -(-context // size)))
    owner, begin, end = (np.concatenate(column) for column in zip(*runs, strict=True))
    place = np.empty_like(order)
    place[order] = everyone
    sort = np.argsort(place[owner], kind="stable")
    owner, begin, counts = owner[sort], begin[sort], (end - begin)[sort]
    own = context - left_out
    at = plan.table_starts[owner] + begin
    return _OwnPages(plan, own[order], place[owner], at, counts)


def _level(
    plan: AttentionPlan,
    starts: np.ndarray,
    kv_len: np.ndarray,
    run_starts: np.ndarray,
    run_counts: np.ndarray,
    *,
    causal: bool,
) -> Level:
    pages = -(-kv_len // plan.page_size)
    last = kv_len - np.maximum(pages - 1, 0) * plan.page_size
    return Level(
        first_row=int(starts[0]),
        query_indptr=(starts - starts[0]).astype(np.int32),
        page_indptr=np.cumsum([0, *pages]).astype(np.int32),
        run_starts=run_starts.astype(np.int32),
        run_counts=run_counts.astype(np.int32),
        last_page_len=last.astype(np.int32),
        kv_len=kv_len.astype(np.int32),
        causal=causal,
    )
