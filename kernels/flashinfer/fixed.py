"""FlashInfer's wrappers for CUDA graphs: plans of decoding steps in fixed places on the device.

A wrapper in FlashInfer's graph mode keeps its number of groups and the addresses of its arrays, and
its grids follow from them. So the levels of a graph are fixed. Each covers all rows and has the
greatest number of groups; groups that a step lacks have no rows, and a level that a step lacks has
one group without pages. The launches of such a level take time all the same, hence several plans of
every size: one without shared levels, for steps in which sharing does not pay, and others with
some. A step takes the plan with the fewest levels that has all of its own. Of a tree with more
levels than any plan, the levels that save the most are shared, and each sequence reads the rest.

After these, each size has a plan for our own kernels, which takes what FlashInfer's do not: steps
with rows of prompts or drafts, sequences that lie in another order, and batches that FlashInfer
does not split. Kernel by kernel such a step would take the host longer than its attention takes a
GPU with any kernels.

All plans share their memory: only one is loaded at a time, and a load is queued after the last
replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from coppice.kernels.attention.checks import check_fixed
from coppice.kernels.attention.interface import AttentionPlan, FixedPlan
from coppice.kernels.flashinfer.choice import waits_for_the_longest
from coppice.kernels.flashinfer.levels import (
    Level,
    LevelSchedule,
    SharedLevel,
    build_levels,
    choose_levels,
)
from coppice.kernels.flashinfer.wrappers import LayerKind, SentSchedule, Wrappers
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.transfer import Outbox
from coppice.kernels.triton.plans import TritonFixedPlan

#: Shared levels of the graphs of a size, and the least size of each: fewer sequences seldom make so
#: deep a tree, and each graph takes time at start.
LEVELS = {0: 1, 2: 2, 4: 8}
# Groups of a shared level, as a fraction of its rows: with fewer, FlashInfer takes larger tiles.
_ROWS_A_GROUP = 4
# Entries of page tables: 4 MiB.
_MOST_PAGES = 2**20


def num_groups(size: int) -> int:
    """Groups of a shared level over ``size`` rows: one that shares, and the rows beside it, fit."""
    return min(size, max(3, size // _ROWS_A_GROUP))


class FixedMemory:
    """What the wrappers of one kind of layers read and write on the device, for all sizes.

    ``pages``: entries that a level's page tables may have together. ``workspace`` is for the
    partial results of launches, and taken if it is large enough.
    """

    def __init__(
        self,
        kind: LayerKind,
        largest: int,
        pages: int,
        model: CostModel,
        workspace: torch.Tensor,
    ) -> None:
        self.kind = kind
        self.pages = min(pages, _MOST_PAGES)
        self._largest = largest
        self._arrays: dict[str, dict[str, torch.Tensor]] = {}
        most = max(
            self._partial_bytes(largest, groups, model) for groups in (largest, num_groups(largest))
        )
        self.workspace = workspace
        if workspace.numel() < most:
            self.workspace = torch.zeros(most, dtype=torch.uint8, device=workspace.device)

    def _partial_bytes(self, rows: int, groups: int, model: CostModel) -> int:
        """Partial results of a launch, which FlashInfer reserves for the worst of steps."""
        kind = self.kind
        packed = (rows - groups + 1) * kind.group
        tile = 128 if packed > 64 and kind.head_dim < 256 else 64 if packed > 16 else 16
        tiles = max(
            2 * model.multiprocessors // kind.kv_heads,
            -(-rows * kind.group // tile) + groups - 1,
        )
        partials = -(-tiles * tile // kind.group)
        return (partials * kind.heads * (kind.head_dim + 1) + 64) * 4

    def place(self, name: str) -> dict[str, torch.Tensor]:
        """The arrays of one launch, of the greatest length that any step needs."""
        if name not in self._arrays:
            lengths = {
                "query_indptr": self._largest + 1,
                "page_indptr": self._largest + 1,
                "last_page_len": self._largest,
                "page_indices": self.pages,
            }
            device = self.workspace.device
            made = {
                each: torch.zeros(length, dtype=torch.int32, device=device)
                for each, length in lengths.items()
            }
            # A few numbers for each tile of queries and each row.
            size = 64 * self._largest + 2**17
            made["plan"] = torch.zeros(size, dtype=torch.uint8, device=device)
            self._arrays[name] = made
        return self._arrays[name]


class FixedWrappers(Wrappers):
    """Wrappers in graph mode, for steps of ``size`` sequences of one row each."""

    def __init__(self, library: Any, kind: LayerKind, memory: FixedMemory, size: int) -> None:
        super().__init__(library, memory.workspace, kind)
        self._memory = memory
        self._size = size
        most = max(LEVELS) + 1
        self._whole = torch.tensor([[0, size]] * most, dtype=torch.int32, device=self.device)

    def _bounds(self, step: SentSchedule) -> torch.Tensor:
        return self._whole  # which stays where it is

    def _decode_wrapper(self) -> Any:
        place = self._memory.place("decode")
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=False,
            paged_kv_indptr_buffer=place["page_indptr"][: self._size + 1],
            paged_kv_indices_buffer=place["page_indices"],
            paged_kv_last_page_len_buffer=place["last_page_len"][: self._size],
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(self._workspace, place["plan"])
        return wrapper

    def _prefill_wrapper(self, name: str, kernels: str) -> Any:
        groups = self._size if name == "decode" else num_groups(self._size)
        place = self._memory.place(name)
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=place["query_indptr"][: groups + 1],
            paged_kv_indptr_buf=place["page_indptr"][: groups + 1],
            paged_kv_indices_buf=place["page_indices"],
            paged_kv_last_page_len_buf=place["last_page_len"][:groups],
            backend=kernels,
        )
        wrapper.reset_workspace_buffer(self._workspace, place["plan"])
        return wrapper


class _Choices:
    """The shared levels of the plan loaded last, chosen once for all graphs that may take it."""

    def __init__(self) -> None:
        self._plan: AttentionPlan | None = None
        self._size = 0
        self._shared: dict[LayerKind, tuple[SharedLevel, ...]] = {}
        self._skewed: dict[LayerKind, bool] = {}

    def load(self, plan: AttentionPlan, size: int, page_size: int, num_pages: int) -> None:
        if plan is not self._plan or size != self._size:
            check_fixed(plan, size, page_size, num_pages)
            self._plan, self._size, self._shared, self._skewed = plan, size, {}, {}

    def shared(self, kind: LayerKind, model: CostModel) -> tuple[SharedLevel, ...]:
        assert self._plan is not None
        if kind not in self._shared:
            self._shared[kind] = choose_levels(self._plan, kind.window, model)
        return self._shared[kind]

    def skewed(self, kind: LayerKind, model: CostModel) -> bool:
        """Whether FlashInfer would wait for the longest sequence; see ``choice``."""
        assert self._plan is not None
        if kind not in self._skewed:
            made = build_levels(self._plan, kind.window, self.shared(kind, model))
            alone = made.decode
            self._skewed[kind] = alone is not None and waits_for_the_longest(alone, model)
        return self._skewed[kind]


@dataclass(eq=False)
class FlashInferFixedPlan(FixedPlan):
    """A plan in fixed places, for each kind of layer, with a number of shared ``levels``.

    It takes the steps that would share at most as many, and the ``deepest`` of its size all steps
    whose sequences lie in depth-first order. ``unsplit``: FlashInfer may not split so many, and
    steps in which it would wait for the longest sequence are left to our own kernels. ``size`` is
    the number of its sequences, ``largest`` the greatest of all plans; plans of all sizes share
    ``memory`` and ``choices``.
    """

    size: int
    levels: int
    memory: dict[LayerKind, FixedMemory]
    choices: _Choices
    deepest: bool
    largest: int
    page_size: int
    num_pages: int
    max_pages: int
    library: Any
    workspace: torch.Tensor
    cost_model: Callable[[LayerKind], CostModel]
    unsplit: bool
    tables: torch.Tensor | None = None
    _kinds: dict[LayerKind, FixedWrappers] = field(default_factory=dict, init=False)

    def load(self, plan: AttentionPlan, outbox: Outbox | None = None) -> bool:
        self.choices.load(plan, self.size, self.page_size, self.num_pages)
        self._plan = plan
        if plan.num_sequences < self.size:  # a sequence has several rows
            return False
        box = outbox or Outbox(self.workspace.device)
        if not all(self._fill(kind, box) for kind in self._kinds):
            return False
        if outbox is None:
            box.send()
        return True

    def wrappers(self, kind: LayerKind) -> FixedWrappers:
        """Those of a kind of layers, planned; made when the first layer of that kind asks."""
        if kind not in self._kinds:
            if kind not in self.memory:
                pages = self.largest * self.max_pages
                model = self.cost_model(kind)
                memory = FixedMemory(kind, self.largest, pages, model, self.workspace)
                self.memory[kind] = memory
            self._kinds[kind] = FixedWrappers(self.library, kind, self.memory[kind], self.size)
            outbox = Outbox(self.workspace.device)
            if not self._fill(kind, outbox, captured=True):
                raise ValueError("the first plan that a graph attends by must fit, and does not")
            outbox.send()
        return self._kinds[kind]

    def _fill(self, kind: LayerKind, outbox: Outbox, *, captured: bool = False) -> bool:
        """Puts a step in place, if the graph takes it; ``captured``: the one that is captured."""
        plan, model = self.plan, self.cost_model(kind)
        shared = self.choices.shared(kind, model)
        if len(shared) > self.levels and not self.deepest:
            return False
        # In the step that is captured every sequence has one key: whom that suits does not matter.
        if self.unsplit and not captured and self.choices.skewed(kind, model):
            return False
        schedule = self._fit(plan, kind.window, shared)
        room = self.memory[kind].pages
        if schedule.rows is not None or any(each.num_pages > room for each in schedule.levels):
            return False
        sent = SentSchedule(schedule, plan, outbox, self.tables)
        outbox.then(partial(self._kinds[kind].plan, sent))
        return True

    def _fit(
        self, plan: AttentionPlan, window: int | None, shared: Sequence[SharedLevel]
    ) -> LevelSchedule:
        """As many levels as the graph has, each of as many groups."""
        levels = sorted(shared, key=_tokens_saved, reverse=True)[: self.levels]
        levels = [level for level in shared if any(level is each for each in levels)]
        while True:
            schedule = build_levels(plan, window, levels)
            wide = [self._whole(level) for level in schedule.shared]
            most = num_groups(self.size)
            if all(len(level.kv_len) <= most for level in wide):
                break
            # Of a level with too many groups, the better half stays.
            levels = [
                _better_half(level) if len(each.kv_len) > most else level
                for level, each in zip(levels, wide, strict=True)
            ]
        nothing = (np.zeros(0, np.int32),) * 2
        while len(wide) < self.levels:
            all_rows = np.array([0, self.size], np.int32)
            zero = np.zeros(1, np.int32)
            wide.append(Level(0, all_rows, np.zeros(2, np.int32), *nothing, zero, zero, False))
        padded = tuple(_with_groups(level, most) for level in wide)
        return replace(schedule, shared=padded)

    def _whole(self, level: Level) -> Level:
        """The level over all rows: those before and after it have no pages."""
        ends = [level.first_row + level.query_indptr]
        before, after = int(level.first_row > 0), int(ends[0][-1] < self.size)
        if before:
            ends.insert(0, np.zeros(1, np.int32))
        if after:
            ends.append(np.full(1, self.size, np.int32))
        return Level(
            first_row=0,
            query_indptr=np.concatenate(ends).astype(np.int32),
            page_indptr=np.pad(level.page_indptr, (before, after), mode="edge"),
            run_starts=level.run_starts,
            run_counts=level.run_counts,
            last_page_len=np.pad(level.last_page_len, (before, after)),
            kv_len=np.pad(level.kv_len, (before, after)),
            causal=False,
        )


def fixed_plans(
    sizes: Sequence[int],
    ours: Mapping[int, TritonFixedPlan],
    *,
    split: int | None,
    most_sequences: int | None,
    **options: Any,
) -> list[tuple[FlashInferFixedPlan | TritonFixedPlan, ...]]:
    """See ``AttentionBackend.fixed_plans``; ``options`` are fields of ``FlashInferFixedPlan``.

    ``ours``: plans of all sizes for our own kernels. ``split``: sequences up to which FlashInfer
    surely splits; None: not known, and taken for all.
    """
    memory: dict[LayerKind, FixedMemory] = {}
    choices = _Choices()
    largest = max(sizes)
    if most_sequences is not None:
        largest = min([size for size in sizes if size >= most_sequences], default=largest)

    def of_size(size: int) -> Iterator[FlashInferFixedPlan | TritonFixedPlan]:
        depths = [levels for levels, least in LEVELS.items() if size >= least]
        unsplit = split is not None and size > split
        given = memory, choices
        for levels in depths if size <= largest else ():
            yield FlashInferFixedPlan(
                size, levels, *given, levels == depths[-1], largest, unsplit=unsplit, **options
            )
        yield ours[size]

    return [tuple(of_size(size)) for size in sizes]


def _tokens_saved(level: SharedLevel) -> int:
    return sum((each.end - each.begin) * (len(each.members) - 1) for each in level)


def _better_half(level: SharedLevel) -> SharedLevel:
    ranges = sorted(level, key=lambda each: _tokens_saved((each,)), reverse=True)
    return tuple(ranges[: len(ranges) // 2])


def _with_groups(level: Level, groups: int) -> Level:
    """The level with this number of groups, of which the last have no rows and no pages."""
    more = groups - len(level.kv_len)
    return replace(
        level,
        query_indptr=np.pad(level.query_indptr, (0, more), mode="edge"),
        page_indptr=np.pad(level.page_indptr, (0, more), mode="edge"),
        last_page_len=np.pad(level.last_page_len, (0, more)),
        kv_len=np.pad(level.kv_len, (0, more)),
    )
