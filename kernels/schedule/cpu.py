"""The cost of a tree schedule on a CPU, and its distribution among threads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import numpy as np

from coppice.kernels.attention.interface import AttentionPlan
from coppice.kernels.schedule.cost import CostModel, SharedRange, choose_shared
from coppice.kernels.schedule.items import TreeSchedule, build_tree_schedule
from coppice.kernels.schedule.tiles import Tile, Tiles

# The cost of the first partial results, in bytes that could have been read meanwhile: some
# microseconds for the memory and the call of the merge.
_LAUNCH_BYTES = 50_000

#: The work, in keys of few lanes times KV heads, for which it pays to wake threads: below, that
#: takes longer. A key takes some 30 to 40 ns with heads of 64.
WAKING_PAYS_FROM = 2048

# The same for threads that are awake, which then only meet.
_SHARED_FROM = 128

# How much longer a key takes with a whole vector of lanes than with few lanes, which wait for
# memory: 66 ns for a head of 64 instead of 40.
_VECTOR_WORK = 1.5

# Tokens by which sequences may grow after a schedule is made: until then the work of each thread
# and the lengths of ranges hardly change.
_MOST_GROWTH = 32


@dataclass(frozen=True, slots=True)
class CpuCostModel(CostModel):
    """A processor with vectors of ``lanes``: computing takes it as long as reading."""

    lanes: int = 1

    merge_work: ClassVar[int] = 2  # by one thread
    start_keys: ClassVar[int] = 64

    def key_work(self, rows: np.ndarray) -> np.ndarray:
        used = rows * self.group
        return np.where(2 * used <= self.lanes, 1.0, _VECTOR_WORK * -(-used // self.lanes))


@dataclass(frozen=True, slots=True, eq=False)
class CpuSchedule:
    """A tree schedule as ``numba_items.attend_items`` takes it.

    ``items`` int32 ``[n, 8]`` are those of all launches, ``tasks`` int32 ``[m, 3]`` and ``shares``
    int64 ``[threads + 1]`` as documented there. ``work`` is counted in keys of few lanes times KV
    heads.
    """

    tree: TreeSchedule
    items: np.ndarray
    tasks: np.ndarray
    shares: np.ndarray
    work: float


@lru_cache(maxsize=64)
def cpu_cost_model(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    lanes: int,
    most_lanes: int,
    keys: int,
    threads: int,
) -> CpuCostModel:
    """The cost model of a CPU on which an item has up to ``most_lanes`` query heads and rows.

    What fits one vector of ``lanes`` is worked with all heads together. A KV head may have
    ``most_lanes`` query heads: ``ValueError``.
    """
    group = heads // kv_heads
    few = -(-group // lanes) * lanes
    if few > most_lanes:
        raise ValueError(f"q has {group} heads for each KV head; it must have up to {most_lanes}")
    tiles = Tiles(Tile(few, keys, 1, 1, 1, kv_heads), Tile(most_lanes, keys, 1, 1, 1))
    return CpuCostModel(
        tiles, group, kv_heads, head_dim, 8 * head_dim, threads, _LAUNCH_BYTES, lanes
    )


def build_cpu_schedule(plan: AttentionPlan, window: int | None, model: CpuCostModel) -> CpuSchedule:
    """The schedule of a checked plan for layers with that sliding window; O(rows + pages)."""
    tree = build_tree_schedule(plan, window, model)
    items = np.concatenate([launch.items for launch in tree.launches])
    threads = model.multiprocessors
    costs = (items[:, 4] - items[:, 3] + model.start_keys) * model.key_work(items[:, 1])
    # Items of many rows are worked head by head, so that a head's keys stay in the cache for the
    # next item of the same sequence; those of few, all heads at once: keys are read in order.
    many = items[:, 1] * model.group > model.lanes
    if len(items) < threads and costs.sum() * model.kv_heads >= _SHARED_FROM:
        many[:] = True
    alone = np.flatnonzero(many)
    alone = alone[np.argsort(items[alone, 2], kind="stable")]
    heads = np.repeat(np.arange(model.kv_heads), len(alone))
    together = np.flatnonzero(~many)
    tasks = np.concatenate(
        [
            np.column_stack([np.tile(alone, model.kv_heads), heads, heads + 1]),
            np.column_stack(
                [together, np.zeros_like(together), np.full_like(together, model.kv_heads)]
            ),
        ]
    ).astype(np.int32)
    cost = costs[tasks[:, 0]] * (tasks[:, 2] - tasks[:, 1])
    order, shares = _shares(cost, len(heads), threads)
    return CpuSchedule(tree, items, tasks[order], shares, float(cost.sum()))


def _shares(cost: np.ndarray, longer: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """An order of the tasks, and where it is cut, int64 ``[threads + 1]``, into similar work.

    The first tasks, ``longer`` of them, take longer than the rest. They are divided first, and the
    others by what the threads then lack, so that few long tasks leave no thread idle. Each thread
    has neighbours of both.
    """
    if cost.sum() < _SHARED_FROM:
        threads = 1
    long = _cut(cost[:longer], np.full(threads, 1.0))
    taken = np.array([cost[i:j].sum() for i, j in pairwise(long)])
    lacking = np.maximum(cost.sum() / threads - taken, 0)
    short = longer + _cut(cost[longer:], lacking)
    tasks = np.arange(len(cost))
    order = [
        tasks[cuts[share] : cuts[share + 1]] for share in range(threads) for cuts in (long, short)
    ]
    return np.concatenate(order), long + short - longer


def _cut(cost: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Where tasks are cut, int64 ``[parts + 1]``, so that their costs are in that proportion."""
    ends = np.cumsum(cost)
    whole = parts.sum()
    targets = np.cumsum(parts)[:-1] * (cost.sum() / whole if whole else 0)
    # To the nearest end of a task: the middle of the one that the target falls into decides.
    cuts = np.searchsorted(ends - cost / 2, targets)
    return np.concatenate([[0], cuts, [len(cost)]]).astype(np.int64)


class GrowingSchedule:
    """The schedule of a step in which all decode, for the steps after it.

    While the same keys are read together and each sequence has only grown, just the items that end
    where a sequence ended get a later end. For one sequence that takes a sixth of the time of a new
    schedule, which takes longer than a layer. The sequences of a step may differ from those before,
    as those of beams do.
    """

    __slots__ = ("_growing", "_plan", "_schedule", "_sequence", "_table")

    def __init__(self, plan: AttentionPlan, schedule: CpuSchedule) -> None:
        """``schedule`` is that of ``plan``, whose sequences have a row each, without a window."""
        self._plan, self._schedule = plan, schedule
        items = schedule.items
        row = schedule.tree.rows[items[:, 0]]
        # What is shared lies below every member's cached length, and never grows.
        self._growing = (items[:, 1] == 1) & (items[:, 4] == plan.context_len[row])
        self._sequence = row
        self._table = np.searchsorted(plan.page_indptr, items[:, 2], side="right") - 1

    def schedule(self, plan: AttentionPlan, model: CpuCostModel) -> CpuSchedule | None:
        """The schedule of a later plan; None if a new one is needed.

        O(items + rows), and O(members) where the plan has new stretches. ``model`` is that of the
        first schedule.
        """
        before, tree = self._plan, self._schedule.tree
        if (
            plan.num_sequences != before.num_sequences
            or plan.num_rows != before.num_sequences
            or plan.page_size != before.page_size
        ):
            return None
        if plan.stretches != before.stretches:  # other objects, perhaps of the same content
            if not _same(choose_shared(plan, None, model), tree.shared):
                return None
            # Later plans with these objects need no such comparison.
            self._plan = before = replace(before, stretches=plan.stretches)
        grown = plan.context_len - before.context_len
        if grown.min() < 0 or grown.max() > _MOST_GROWTH:
            return None
        items = self._schedule.items.copy()
        items[:, 4] += np.where(self._growing, grown[self._sequence], 0)
        items[:, 2] = plan.page_indptr[self._table]
        positions = tree.positions + grown
        return replace(self._schedule, tree=replace(tree, positions=positions), items=items)


def _same(some: tuple[SharedRange, ...], others: tuple[SharedRange, ...]) -> bool:
    """Whether the same keys of the same sequences are shared."""
    return len(some) == len(others) and all(
        one.begin == other.begin
        and one.end == other.end
        and np.array_equal(one.members, other.members)
        for one, other in zip(some, others, strict=True)
    )
