"""FlashInfer's wrappers for layers of one kind: they plan the levels of a step, and run them.

**Order on the device.** A plan of FlashInfer's fills pinned memory that its wrapper keeps, and
queues a copy of it. Before the next plan the host waits for the event after that copy. Runs that
were queued before the copy read what it overwrites on the device, so plans and runs must be queued
on one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coppice.kernels.attention.interface import AttentionPlan, LayerCache
from coppice.kernels.flashinfer.choice import tensor_cores
from coppice.kernels.flashinfer.levels import Level, LevelSchedule
from coppice.kernels.transfer import Outbox, stage
from coppice.kernels.triton.levels import gather_runs, merge_parts

#: What FlashInfer's documentation recommends for the partial results of one launch.
WORKSPACE_BYTES = 128 * 2**20

# The page ids of each level begin at a multiple of 16 bytes.
_PAGE_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers must have in common to share a plan."""

    window: int | None
    softcap: float | None
    scale: float
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class SentLevel:
    """A level whose page ids are on the device; FlashInfer reads the rest on the host."""

    level: Level
    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    last_page_len: torch.Tensor
    kv_len: torch.Tensor
    page_indices: torch.Tensor

    @property
    def rows(self) -> slice:
        return slice(self.level.first_row, self.level.first_row + self.level.num_rows)


class SentSchedule:
    """A schedule as wrappers take it, after ``arrive``; until then it is in an outbox.

    ``rows``, int64 ``[T]``, is the batch row of each place, ``places`` the place of each batch row;
    both are None where all rows keep their places. ``bounds`` int32 ``[levels, 2]``: the places of
    the last level, which are all, and of each shared one.
    """

    shared: tuple[SentLevel, ...]
    decode: SentLevel | None
    prefill: SentLevel | None
    bounds: torch.Tensor
    rows: torch.Tensor | None = None
    places: torch.Tensor | None = None

    def __init__(
        self,
        schedule: LevelSchedule,
        plan: AttentionPlan,
        outbox: Outbox,
        tables: torch.Tensor | None = None,
    ) -> None:
        """``tables``: page tables on the device, to which a plan with ``table_start`` points."""
        self.schedule = schedule
        self._tables = tables if plan.table_start is not None else None
        self._arrived = False
        levels = schedule.levels
        ends = np.cumsum(
            [-(-each.num_pages // _PAGE_ALIGNMENT) * _PAGE_ALIGNMENT for each in levels]
        )
        self._firsts = [0, *ends.tolist()]
        counts = np.concatenate([each.run_counts for each in levels])
        begins = [
            first + np.cumsum(each.run_counts) - each.run_counts
            for each, first in zip(levels, self._firsts, strict=False)
        ]
        self._longest = int(counts.max())
        bounds = [(0, plan.num_rows)]
        bounds += [(each.first_row, each.first_row + each.num_rows) for each in schedule.shared]
        arrays = [
            np.concatenate([each.run_starts for each in levels]),
            counts,
            np.concatenate(begins).astype(np.int32),
            np.array(bounds, np.int32),
        ]
        if self._tables is None:
            arrays.append(plan.page_indices)
        if schedule.rows is not None:
            arrays += [schedule.rows, np.argsort(schedule.rows)]
        self._parcel = outbox.add(arrays)

    def arrive(self, device: torch.device) -> None:
        """Gather the page ids of all levels, in one launch; call it when the outbox is sent."""
        if self._arrived:
            return
        self._arrived = True
        starts, counts, begins, self.bounds, *rest = self._parcel.tensors
        tables = rest.pop(0) if self._tables is None else self._tables
        if rest:
            self.rows, self.places = rest
        pages = torch.empty(max(self._firsts[-1], 1), dtype=torch.int32, device=device)
        gather_runs(tables, starts, counts, begins, pages, self._longest)
        levels = self.schedule.levels
        names = ("query_indptr", "page_indptr", "last_page_len", "kv_len")
        read = iter(stage([getattr(each, name) for each in levels for name in names], device))
        made = [
            SentLevel(
                each, next(read), next(read), next(read), next(read),
                pages[first : first + each.num_pages],
            )
            for each, first in zip(levels, self._firsts, strict=False)
        ]  # fmt: skip
        self.prefill = made.pop() if self.schedule.prefill is not None else None
        self.decode = made.pop() if self.schedule.decode is not None else None
        self.shared = tuple(made)


Fa3 = Callable[[Level], bool]
"""Whether fa3's kernels compute a level."""


def never(level: Level) -> bool:
    """fa2's compute all."""
    return False


class Wrappers:
    """FlashInfer's wrappers for layers of one kind, which hold the plan of one step at a time."""

    def __init__(
        self, library: Any, workspace: torch.Tensor, kind: LayerKind, fa3: Fa3 = never
    ) -> None:
        """``fa3``: which levels, of those that do not decode alone, fa3's kernels compute."""
        self._library = library
        self._workspace = workspace
        self._kind = kind
        self._fa3 = fa3
        self._made: dict[tuple[str, str], Any] = {}  # wrappers by what they are for, and by kernels
        self._step: SentSchedule | None = None
        self._launches: list[tuple[int, Any, SentLevel]] = []
        self.device = workspace.device
        self._on_gpu = self.device.type == "cuda"
        self._staged: torch.cuda.Event | None = None

    @property
    def _tensor_cores(self) -> bool:
        kind = self._kind
        return tensor_cores(kind.group, eight_bits=kind.cache_dtype.itemsize == 1)

    def plan(self, step: SentSchedule) -> None:
        """Plan this step, unless that is what was planned last."""
        if self._step is step:
            return
        step.arrive(self.device)
        if self._staged is not None:
            self._staged.synchronize()
        self._step = None
        # Of each launch: its place among the partial results, its wrapper and its level.
        self._launches = []
        for number, level in enumerate(step.shared):
            self._plan_rows(1 + number, f"shared {number}", level)
        if step.prefill is not None:
            self._plan_rows(0, "prefill", step.prefill)
        if step.decode is not None:
            self._plan_decode(step.decode)
        if self._on_gpu:
            self._staged = torch.cuda.Event()
            self._staged.record()
        self._step = step

    def run(
        self, q: torch.Tensor, cache: LayerCache, *, lse_read: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend by the plan that was made last; results as of ``AttentionBackend.attend``."""
        step = self._step
        assert step is not None
        if step.rows is not None:
            q = q.index_select(0, step.rows)
        if cache.scales is not None:
            # FlashInfer has one scale for all heads: so those of keys multiply the queries, and
            # those of values the merged result.
            scaled = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            q = torch.mul(q, self._of_queries(cache.scales[0]), out=scaled)
        pages = cache.k, cache.v
        count = 1 + len(step.shared)
        parts = torch.empty((count, *q.shape), dtype=q.dtype, device=q.device)
        parts_lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
        for number, wrapper, level in self._launches:
            rows = level.rows
            out, lse = parts[number, rows], parts_lse[number, rows]
            wrapper.run(q[rows], pages, out=out, lse=lse, return_lse=True)
        plain = count == 1 and step.places is None and cache.scales is None
        if plain and not lse_read:
            return parts[0], parts_lse[0]
        v_scales = None if cache.scales is None else cache.scales[1]
        bounds = self._bounds(step)
        return merge_parts(parts, parts_lse, bounds, step.places, v_scales, self._kind.group)

    def _bounds(self, step: SentSchedule) -> torch.Tensor:
        return step.bounds

    def _of_queries(self, scales: torch.Tensor) -> torch.Tensor:
        """The scale of each query head's KV head, ``[Hq, 1]``."""
        return scales.repeat_interleave(self._kind.group, output_size=self._kind.heads)[:, None]

    def _wrapper(self, name: str, kernels: str) -> Any:
        key = name, kernels
        if key not in self._made:
            if kernels == "decode":
                self._made[key] = self._decode_wrapper()
            else:
                self._made[key] = self._prefill_wrapper(name, kernels)
        return self._made[key]

    def _prefill_wrapper(self, name: str, kernels: str) -> Any:
        make = self._library.BatchPrefillWithPagedKVCacheWrapper
        return make(self._workspace, "NHD", backend=kernels)

    def _decode_wrapper(self) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=False, backend="fa2"
        )

    def _plan_rows(self, number: int, name: str, level: SentLevel) -> None:
        kernels = "fa3" if name != "decode" and self._fa3(level.level) else "fa2"
        wrapper = self._wrapper(name, kernels)
        wrapper.plan(
            level.query_indptr, *self._pages(level), causal=level.level.causal,
            seq_lens=level.kv_len, **self._constants(),
        )  # fmt: skip
        self._launches.append((number, wrapper, level))

    def _plan_decode(self, level: SentLevel) -> None:
        if self._tensor_cores:
            self._plan_rows(0, "decode", level)
            return
        wrapper = self._wrapper("decode", "decode")
        wrapper.plan(*self._pages(level), seq_lens=level.kv_len, **self._constants())
        self._launches.append((0, wrapper, level))

    def _pages(self, level: SentLevel) -> tuple[Any, ...]:
        kind = self._kind
        pages = level.page_indptr, level.page_indices, level.last_page_len
        return (*pages, kind.heads, kind.kv_heads, kind.head_dim, kind.page_size)

    def _constants(self) -> dict[str, Any]:
        """What every plan of the kind is given. FlashInfer's window leaves the row itself out."""
        kind = self._kind
        return {
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "q_data_type": kind.dtype,
            "kv_data_type": kind.cache_dtype,
            "o_data_type": kind.dtype,
            "non_blocking": True,
        }
