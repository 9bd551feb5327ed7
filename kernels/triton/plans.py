"""Plans on a GPU for the Triton kernels: of one step, or in fixed places for steps of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from coppice.kernels.attention.checks import check_fixed
from coppice.kernels.attention.interface import AttentionPlan, FixedPlan
from coppice.kernels.schedule.cost import CostModel, Limits
from coppice.kernels.schedule.items import NO_TREE, TreeSchedule, build_tree_schedule
from coppice.kernels.schedule.tiles import Tile
from coppice.kernels.transfer import Landing, Outbox, Parcel

# What a graph has room for, beside the rows of its step. A program that finds no item costs about a
# nanosecond, a partial result memory: 16 KiB for 32 heads of 128.
_WAVES = 8  # of programs, for ranges that are split
_PARTS = 16  # pieces of a row's keys, on average ...
_MORE_PARTS = 1024  # ... and for few rows, which are split more finely
_MANY_ROWS = 256  # of rows beyond these, most are of prompts, which make work for many programs ...
_FEW_PARTS = 4  # ... in few pieces
_MOST_PAGES = 2**20  # entries of page tables: 4 MiB

_NO_PAGES = np.zeros(0, np.int32)

Kind = tuple[int | None, CostModel]
"""Layers with the same window and shape of heads have one schedule."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSchedule:
    """A schedule with its arrays on the device; see ``TreeSchedule``.

    Arrays may be filled in part. ``launches``: the tile of each, whether it walks in phases, its
    items, and how many these are, as int32 ``[1]``; ``num_merges`` is the same of ``merges``.
    """

    launches: tuple[tuple[Tile, bool, torch.Tensor, torch.Tensor], ...]
    num_partials: int
    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    branches: torch.Tensor
    merges: torch.Tensor
    page_indices: torch.Tensor
    num_merges: torch.Tensor


def _counts(few: int, many: int, merges: int) -> np.ndarray:
    """Numbers that kernels read, each at an address of 16 bytes: they are compiled for such."""
    return np.array([[each, 0, 0, 0] for each in (few, many, merges)], np.int32)


class PreparedPlan:
    """A checked plan with its schedules.

    That of each kind of layer is made when the first layer of that kind asks, or beforehand
    (``expect``), so that it goes with other things to the device. ``asked``: the kinds that asked.
    """

    __slots__ = ("_deterministic", "_device", "_schedules", "_tables", "asked", "plan")

    def __init__(
        self,
        plan: AttentionPlan,
        device: torch.device,
        deterministic: bool,
        tables: torch.Tensor | None = None,
    ) -> None:
        """``tables``: page tables on the device, to which a plan with ``table_start`` points."""
        self.plan = plan
        self._device = device
        self._deterministic = deterministic
        self._tables = tables if plan.table_start is not None else None
        self._schedules: dict[Kind, tuple[TreeSchedule, Parcel] | DeviceSchedule] = {}
        self.asked: set[Kind] = set()

    def schedule(self, window: int | None, model: CostModel) -> DeviceSchedule:
        key = (window, model)
        self.asked.add(key)
        if key not in self._schedules:
            outbox = Outbox(self._device)
            self.expect([key], outbox)
            outbox.send()
        found = self._schedules[key]
        if not isinstance(found, DeviceSchedule):
            found = self._schedules[key] = self._sent(*found)
        return found

    def expect(self, kinds: Iterable[Kind], outbox: Outbox) -> None:
        """Make the schedules of these kinds, which go with ``outbox``."""
        for window, model in kinds:
            made = build_tree_schedule(self.plan, window, model, deterministic=self._deterministic)
            arrays = [made.rows, made.slots, made.positions, made.branches, made.merges]
            lengths = {launch.many: len(launch.items) for launch in made.launches}
            arrays.append(_counts(lengths.get(False, 0), lengths.get(True, 0), len(made.merges)))
            arrays += [launch.items for launch in made.launches]
            if self._tables is None:
                arrays.append(self.plan.page_indices)
            self._schedules[window, model] = made, outbox.add(arrays)

    def _sent(self, made: TreeSchedule, parcel: Parcel) -> DeviceSchedule:
        parts = parcel.tensors
        tables = self._tables if self._tables is not None else parts[-1]
        counts = parts[5]
        launches = tuple(
            (launch.tile, launch.many and not self._deterministic, items, counts[launch.many])
            for launch, items in zip(made.launches, parts[6:], strict=False)
        )
        arrays = [*parts[:5], tables, counts[2]]
        return DeviceSchedule(launches, made.num_partials, *arrays)


@dataclass(frozen=True, slots=True)
class _Room:
    """The most that a schedule of a graph may have."""

    few: int  # items with few packed queries
    many: int  # the others; 0: no launch
    entries: int  # rows of items
    rows: int
    pages: int  # 0: page tables lie elsewhere

    @classmethod
    def of(cls, size: int, max_pages: int, model: CostModel, deterministic: bool) -> _Room:
        held = [
            _WAVES * model.multiprocessors * tile.resident // model.programs
            for tile in (model.tiles.few, model.tiles.many)
        ]
        wide = size > model.few_rows and not deterministic
        return cls(
            few=2 * size + held[0],
            many=2 * size // model.few_rows + held[1] if wide else 0,
            entries=fixed_entries(size),
            rows=size,
            pages=min(size * max_pages, _MOST_PAGES),
        )

    @property
    def limits(self) -> Limits:
        """What a schedule must keep to."""
        return Limits(self.few, self.many, self.entries)

    def arrays(self, branches: bool) -> list[tuple[tuple[int, ...], type]]:
        """Shapes and types, the page tables last."""
        items: list[tuple[int, ...]] = [(self.few, 8)]
        if self.many:
            items.append((self.many, 8))
        entries = (self.entries,)
        first = [(3, 4), *items, entries, entries, (self.rows,)]
        last = [(self.rows, 3), (self.pages,)]
        trees = ((self.rows if branches else 0, 2), np.int64)
        return [*((each, np.int32) for each in first), trees, *((e, np.int32) for e in last)]


@dataclass(eq=False)
class TritonFixedPlan(FixedPlan):
    """A plan in fixed places, for each kind of layer.

    ``size`` is the number of its rows, ``largest`` the greatest of all plans, which share
    ``memory``. The graph contains all launches already, so the choice of sharing and splitting
    leaves out their cost, and splits less finely where there are more items than it has room for.
    With ``branches`` its kernels look for rows of trees in every step. With ``tables``, page tables
    on the device, it takes the plans that point there, otherwise those that do not.
    """

    size: int
    largest: int
    memory: dict[Kind, torch.Tensor]
    device: torch.device
    page_size: int
    num_pages: int
    max_pages: int
    deterministic: bool
    branches: bool = False
    tables: torch.Tensor | None = None
    _kinds: dict[Kind, tuple[Landing, DeviceSchedule, Limits]] = field(
        default_factory=dict, init=False
    )

    def load(self, plan: AttentionPlan, outbox: Outbox | None = None) -> bool:
        check_fixed(plan, self.size, self.page_size, self.num_pages)
        self._plan = plan
        if plan.branches is not None and not self.branches:
            return False
        if (plan.table_start is None) != (self.tables is None):
            return False
        box = outbox or Outbox(self.device)
        if not all(self._fill(kind, box) for kind in self._kinds):
            return False
        if outbox is None:
            box.send()
        return True

    def schedule(self, window: int | None, model: CostModel) -> DeviceSchedule:
        kind = (window, model)
        if kind not in self._kinds:
            self._kinds[kind] = self._place(kind)
            outbox = Outbox(self.device)
            if not self._fill(kind, outbox):
                raise ValueError("the first plan that a graph attends by must fit, and does not")
            outbox.send()
        return self._kinds[kind][1]

    def _place(self, kind: Kind) -> tuple[Landing, DeviceSchedule, Limits]:
        model = kind[1]
        pages = self.max_pages if self.tables is None else 0
        options = pages, model, self.deterministic
        if kind not in self.memory:
            size = Landing.size(_Room.of(self.largest, *options).arrays(self.branches))
            self.memory[kind] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        room = _Room.of(self.size, *options)
        landing = Landing(room.arrays(self.branches), self.memory[kind])
        counts, few, *many = landing.arrays[:-6]
        tables = landing.arrays[-1] if self.tables is None else self.tables
        launches = [(model.tiles.few, False, few, counts[0])]
        launches += [(model.tiles.many, True, items, counts[1]) for items in many]
        arrays = [*landing.arrays[-6:-1], tables, counts[2]]
        sent = DeviceSchedule(tuple(launches), room.entries, *arrays)
        return landing, sent, room.limits

    def _fill(self, kind: Kind, outbox: Outbox) -> bool:
        window, model = kind
        landing, sent, limits = self._kinds[kind]
        made = build_tree_schedule(
            self.plan,
            window,
            replace(model, launch_bytes=0),
            deterministic=self.deterministic,
            limits=limits,
        )
        if not made.fits(limits):
            return False
        items: list[np.ndarray] = [np.zeros((0, 8), np.int32) for _ in sent.launches]
        for launch in made.launches:
            items[launch.many] = launch.items
        slots = made.slots
        if not len(slots):
            slots = np.full(sum(int(each[:, 1].sum()) for each in items), -1, np.int32)
        branches = made.branches
        if self.branches and not len(branches):
            branches = np.full((self.size, 2), NO_TREE, np.int64)
        few, many = items[0], items[1:]
        counts = _counts(len(few), sum(map(len, many)), len(made.merges))
        arrays = [counts, *items, made.rows, slots, made.positions, branches, made.merges]
        pages = self.plan.page_indices if self.tables is None else _NO_PAGES
        return outbox.put(landing, [*arrays, pages])


def fixed_entries(size: int) -> int:
    """Partial results, each of all heads, that a graph of ``size`` rows has room for."""
    more = max(0, size - _MANY_ROWS)
    return _PARTS * (size - more) + _FEW_PARTS * more + _MORE_PARTS


def fixed_plans(sizes: Sequence[int], **options: Any) -> list[tuple[TritonFixedPlan]]:
    """See ``AttentionBackend.fixed_plans``; ``options`` are fields of ``TritonFixedPlan``."""
    memory: dict[Kind, torch.Tensor] = {}
    return [(TritonFixedPlan(size, max(sizes), memory, **options),) for size in sizes]
