"""The work items of a plan, for the CPU and for Triton: which rows walk which keys.

Everything that a step attends to is items of one kind::

    item    some rows of the batch over the keys ``begin .. end`` of one page table, causal and
            windowed by the rows' positions

A decoding sequence is one row over all its keys, a chunk of prefill many rows over the cached
prefix and themselves, a shared stretch the rows of all sequences below it over its keys. A long
range is split among programs. The result of a row's only item is its output; rows with several
items have partial results, which are merged by log-sum-exp. ``cost`` decides what to share and how
finely to split.

A schedule depends on the plan, the window and the shape of heads, and on no values. It serves all
layers of a step that have the same window and shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coppice.kernels.attention.interface import AttentionPlan
from coppice.kernels.schedule.cost import (
    CostModel,
    Limits,
    SharedRange,
    Tasks,
    best_split,
    choose_shared,
    least_cost,
)
from coppice.kernels.schedule.tiles import Tile

# Keys of a split in deterministic mode, at multiples of it in every sequence. Smaller ones would
# spread a lone long sequence over more programs, larger ones need less memory for the partial
# results of a prefill: rows * heads * head_dim * 4 bytes for each split of the context.
DETERMINISTIC_SPLIT = 4096

#: Stands for the first key of a tree in rows of none: beyond all keys.
NO_TREE = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """``items`` int32 ``[n, 8]``, the longest first, for one run of the kernel with ``tile``.

    Columns: first entry in ``rows``, number of rows, start of its page table (``table_starts``),
    first key, end of keys, first and end of the keys that need no mask (whole tiles that all its
    rows see), first entry in ``slots``. ``many``: whether it is the launch of wide items.
    """

    tile: Tile
    items: np.ndarray
    many: bool


@dataclass(frozen=True, slots=True, eq=False)
class TreeSchedule:
    """One step's work for the kernels.

    ``rows`` int32 are the batch rows that items name. ``slots`` int32: where each row of each item
    puts its result, the place among the partial ones or -1 for the output itself; empty if every
    result is an output. ``positions`` int32 ``[T]``. ``branches`` int64 ``[T, 2]``, or ``[0, 2]``
    if no rows are a tree: the key from which bits decide what a row sees (``NO_TREE`` if it is in
    none), and these bits (see ``Branches``). ``merges`` int32 ``[m, 3]``: row, first slot, number
    of slots, which are in the order of keys. ``shared``: the stretches that are read once for all.
    ``cost``: the estimate, in bytes.
    """

    launches: tuple[Launch, ...]
    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    merges: np.ndarray
    shared: tuple[SharedRange, ...]
    cost: float

    @property
    def num_partials(self) -> int:
        return int(self.merges[:, 2].sum())

    @property
    def keys_read(self) -> int:
        """Tokens whose K and V are read for each KV head, each counted as often as it is read."""
        return sum(int((e.items[:, 4] - e.items[:, 3]).sum(dtype=np.int64)) for e in self.launches)

    def fits(self, limits: Limits) -> bool:
        """Whether it has no more of anything than that."""
        items = [0, 0]
        for launch in self.launches:
            items[launch.many] = len(launch.items)
        entries = max(len(self.rows), len(self.slots))
        few, many = items
        return few <= limits.few and many <= limits.many and entries <= limits.entries


def build_tree_schedule(
    plan: AttentionPlan,
    window: int | None,
    model: CostModel,
    *,
    deterministic: bool = False,
    limits: Limits | None = None,
) -> TreeSchedule:
    """The cheapest schedule of a checked plan for layers with that sliding window.

    Where sharing does not pay, nothing is shared. O(rows + pages) in numpy, with a Python loop over
    stretches. ``deterministic``: nothing is shared, ranges are split at multiples of
    ``DETERMINISTIC_SPLIT``, and slots are never empty, so that one compiled kernel serves all.
    With ``limits`` it is the cheapest that fits. If none does, and in deterministic mode, where
    there is only one, the caller finds out by ``TreeSchedule.fits``.
    """
    shared = () if deterministic else choose_shared(plan, window, model)
    if not shared:
        return _schedule(plan, window, model, (), deterministic, limits)
    tree = _schedule(plan, window, model, shared, False, limits)
    fits = limits is None or tree.fits(limits)
    if fits and tree.cost <= least_cost(plan, window, model):
        return tree
    plain = _schedule(plan, window, model, (), False, limits)
    return tree if fits and tree.cost < plain.cost else plain


def row_positions(plan: AttentionPlan) -> np.ndarray:
    """The position of each row in its sequence, int32 ``[T]``."""
    return row_slots(plan) if plan.branches is None else plan.branches.positions


def row_slots(plan: AttentionPlan) -> np.ndarray:
    """The number of the slot with each row's own key in its page table, int32 ``[T]``."""
    shift = plan.context_len - plan.query_start[1:]
    rows = np.arange(plan.num_rows, dtype=np.int32)
    return rows + np.repeat(shift, np.diff(plan.query_start))


def row_branches(plan: AttentionPlan, window: int | None) -> np.ndarray:
    """``TreeSchedule.branches`` of a plan."""
    if plan.branches is None:
        return np.zeros((0, 2), np.int64)
    seen = plan.branches.windowed(window, plan.query_start)
    counts = np.diff(plan.query_start)
    starts = np.repeat(plan.context_len - counts, counts)
    return np.column_stack([np.where(plan.branches.seen != 0, starts, NO_TREE), seen])


def _schedule(
    plan: AttentionPlan,
    window: int | None,
    model: CostModel,
    shared: tuple[SharedRange, ...],
    deterministic: bool,
    limits: Limits | None,
) -> TreeSchedule:
    positions = row_positions(plan)
    tasks = Tasks.of(plan, shared)
    # What a row surely sees, and the last key that it may see: in a tree only what is before it.
    sure = last = positions
    branches = row_branches(plan, window)
    if len(branches):
        sure, last = np.minimum(positions, branches[:, 0]), row_slots(plan)
    blocks = _cut_rows(tasks, sure, last, window, model)
    items, cost = _cut_keys(blocks, model, deterministic, limits)
    begin, end = items[:, 3], items[:, 4]

    # Entries: a row of an item each, in the order of items; those of one row are in order of keys.
    counts = items[:, 1]
    starts = np.cumsum(counts) - counts
    which = np.repeat(np.arange(len(items)), counts)
    entry_row = tasks.rows[items[which, 0] + np.arange(len(which)) - starts[which]]
    per_row = np.bincount(entry_row, minlength=plan.num_rows)
    merged = np.flatnonzero(per_row > 1)
    slots = np.zeros(0, np.int32)
    merges = np.zeros((0, 3), np.int32)
    if len(merged):
        first = np.zeros(plan.num_rows, np.int64)
        first[merged] = np.cumsum(per_row[merged]) - per_row[merged]
        order = np.argsort(entry_row, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        slots = np.where(per_row[entry_row] > 1, first[entry_row] + rank, -1).astype(np.int32)
        merges = np.stack([merged, first[merged], per_row[merged]], axis=1).astype(np.int32)
        cost += model.merge_cost(len(slots[slots >= 0]))
    if deterministic and not len(slots):
        slots = np.full(len(entry_row), -1, np.int32)

    # Tiles lie at multiples of their keys; those that all rows of the item see need no mask.
    low, high = blocks.low[items[:, 7]], blocks.high[items[:, 7]]
    few = blocks.few[items[:, 7]]
    keys = np.where(few, model.tiles.few.keys, model.tiles.many.keys)
    seen_by_all = begin if window is None else np.maximum(begin, high - window + 1)
    clear_end = np.minimum(end, low + 1) // keys * keys
    clear_begin = np.minimum(-(-seen_by_all // keys) * keys, clear_end)
    clear_begin = np.maximum(clear_begin, begin // keys * keys)
    items = np.column_stack(
        [items[:, :5], clear_begin, np.maximum(clear_begin, clear_end), starts]
    ).astype(np.int32)
    launches = []
    for tile, part in ((model.tiles.few, few), (model.tiles.many, ~few)):
        if part.any():
            chosen = items[part]
            # The longest first, so that the last programs to run are short.
            longest = np.argsort(chosen[:, 3] - chosen[:, 4], kind="stable")
            launches.append(Launch(tile, np.ascontiguousarray(chosen[longest]), part is not few))
    cost += len(launches) * model.launch_bytes
    return TreeSchedule(
        tuple(launches), tasks.rows, slots, positions, branches, merges, shared, cost
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Rows that fit one tile, over their task's keys: ``[n, 5]`` as the first columns of an item.

    ``low`` is the last key that all rows of each surely see, ``high`` the last that any may see.
    """

    items: np.ndarray
    few: np.ndarray
    low: np.ndarray
    high: np.ndarray


def _cut_rows(
    tasks: Tasks, sure: np.ndarray, last: np.ndarray, window: int | None, model: CostModel
) -> _Blocks:
    few = tasks.counts <= model.few_rows
    pieces = -(-tasks.counts // np.where(few, model.few_rows, model.many_rows))
    height = -(-tasks.counts // pieces)  # pieces of equal height, not full ones and a remainder
    task = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(task)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = (np.cumsum(tasks.counts) - tasks.counts)[task] + number * height[task]
    count = np.minimum(tasks.counts[task] - number * height[task], height[task])
    low = np.minimum.reduceat(sure[tasks.rows], first).astype(np.int64)
    high = np.maximum.reduceat(last[tasks.rows], first).astype(np.int64)
    end = np.minimum(tasks.end[task], high + 1)
    begin = tasks.begin[task]
    if window is not None:
        begin = np.maximum(begin, low + 1 - window)
    # A row whose window begins past a part of its keys has no work there.
    some = begin < end
    items = np.stack([first, count, tasks.table[task], begin, end], axis=1)
    return _Blocks(items[some], few[task][some], low[some], high[some])


def _cut_keys(
    blocks: _Blocks, model: CostModel, deterministic: bool, limits: Limits | None
) -> tuple[np.ndarray, float]:
    """Split the blocks' ranges: items ``[n, 8]``, whose last column is the block; and the cost."""
    begin, end, rows = blocks.items[:, 3], blocks.items[:, 4], blocks.items[:, 1]
    length = end - begin
    part = np.empty(len(begin), np.int64)
    origin = np.empty(len(begin), np.int64)
    cost = 0.0
    few, many = (None, None) if limits is None else (limits.few, limits.many)
    kinds = [(model.tiles.few, blocks.few, few), (model.tiles.many, ~blocks.few, many)]
    kinds = [kind for kind in kinds if kind[1].any()]
    # Rows of items beyond those of whole blocks: equal parts of what there is room for.
    spare = limits.entries - int(rows.sum()) if limits is not None else 0
    for number, (tile, chosen, most) in enumerate(kinds):
        if deterministic:
            part[chosen] = DETERMINISTIC_SPLIT
            origin[chosen] = begin[chosen] // DETERMINISTIC_SPLIT * DETERMINISTIC_SPLIT
            continue
        bounds = None
        if most is not None:
            bounds = most, int(rows[chosen].sum()) + spare // (len(kinds) - number)
        split, walked = best_split(length[chosen], rows[chosen], tile, model, bounds)
        cost += walked
        spare -= int((rows * (-(-length // split) - 1))[chosen].sum())
        origin[chosen] = begin[chosen] // tile.keys * tile.keys
        whole = end[chosen] - origin[chosen]
        pieces = -(-length[chosen] // split)
        part[chosen] = -(-whole // (pieces * tile.keys)) * tile.keys
    pieces = -(-(end - origin) // part)
    block = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(block)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    items = np.zeros((len(block), 8), np.int64)
    items[:, :5] = blocks.items[block]
    start = origin[block] + number * part[block]
    items[:, 3] = np.maximum(items[:, 3], start)
    items[:, 4] = np.minimum(items[:, 4], start + part[block])
    items[:, 7] = block
    return items, cost
