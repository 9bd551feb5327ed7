"""FlashInfer's wrappers for layers of one kind: they plan the levels of a step, and run them.

**Order on the device.** A plan of FlashInfer's fills pinned memory that its wrapper keeps, and
queues a copy of it. Before the next plan the host waits for the event after that copy. Runs that
were queued before the copy read what it overwrites on the device, so plans and runs must be queued
on one stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.flashinfer.levels import Level, LevelSchedule
from coppice.kernels.transfer import send, stage

#: What FlashInfer's documentation recommends for the partial results of one launch.
WORKSPACE_BYTES = 128 * 2**20

# From this number of query heads of a KV head on, decoding is faster on tensor cores; below, the
# decode wrapper's own kernel serves any number of them.
_TENSOR_CORE_GROUP = 4


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


@dataclass(frozen=True, slots=True, eq=False)
class SentSchedule:
    """A schedule as wrappers take it.

    ``rows``, int64 ``[T]``, is the batch row of each place, ``places`` the place of each batch row;
    both are None where all rows keep their places.
    """

    schedule: LevelSchedule
    shared: tuple[SentLevel, ...]
    decode: SentLevel | None
    prefill: SentLevel | None
    rows: torch.Tensor | None
    places: torch.Tensor | None

    @classmethod
    def of(cls, schedule: LevelSchedule, device: torch.device) -> SentSchedule:
        """Of all levels, in one transfer and one piece of staged memory."""
        levels = schedule.levels
        names = ("query_indptr", "page_indptr", "last_page_len", "kv_len")
        read = iter(stage([getattr(each, name) for each in levels for name in names], device))
        arrays = [each.page_indices for each in levels]
        if schedule.rows is not None:
            arrays += [schedule.rows, np.argsort(schedule.rows)]
        sent = iter(send(arrays, device))
        made = [
            SentLevel(each, next(read), next(read), next(read), next(read), next(sent))
            for each in levels
        ]
        rows, places = next(sent, None), next(sent, None)
        prefill = made.pop() if schedule.prefill is not None else None
        decode = made.pop() if schedule.decode is not None else None
        return cls(schedule, tuple(made), decode, prefill, rows, places)


class Wrappers:
    """FlashInfer's wrappers for layers of one kind, which hold the plan of one step at a time."""

    def __init__(self, library: Any, workspace: torch.Tensor, kind: LayerKind) -> None:
        self._library = library
        self._workspace = workspace
        self._kind = kind
        self._shared: list[Any] = []
        self._prefill: Any = None
        self._decode: Any = None
        self._step: SentSchedule | None = None
        self.device = workspace.device
        self._on_gpu = self.device.type == "cuda"
        self._staged: torch.cuda.Event | None = None

    @property
    def _tensor_cores(self) -> bool:
        return self._kind.group >= _TENSOR_CORE_GROUP or self._kind.cache_dtype.itemsize == 1

    def plan(self, step: SentSchedule) -> None:
        """Plan this step, unless that is what was planned last."""
        if self._step is step:
            return
        if self._staged is not None:
            self._staged.synchronize()
        self._step = None
        while len(self._shared) < len(step.shared):
            self._shared.append(self._shared_wrapper(len(self._shared)))
        for wrapper, level in zip(self._shared, step.shared, strict=False):
            self._plan_rows(wrapper, level)
        if step.prefill is not None:
            self._prefill = self._prefill or self._prefill_wrapper()
            self._plan_rows(self._prefill, step.prefill)
        if step.decode is not None:
            self._decode = self._decode or self._decode_wrapper()
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
            # those of values the result.
            scaled = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            q = torch.mul(q, self._of_queries(cache.scales[0]), out=scaled)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        pages = cache.k, cache.v
        for wrapper, level in self._last(step):
            rows = level.rows
            wrapper.run(q[rows], pages, out=out[rows], lse=lse[rows], return_lse=True)
        for wrapper, level in zip(self._shared, step.shared, strict=False):
            rows = level.rows
            part, part_lse = torch.empty_like(out[rows]), torch.empty_like(lse[rows])
            wrapper.run(q[rows], pages, out=part, lse=part_lse, return_lse=True)
            self._library.merge_state_in_place(out[rows], lse[rows], part, part_lse)
        if cache.scales is not None:
            out.mul_(self._of_queries(cache.scales[1]))
        if lse_read:
            lse.mul_(math.log(2))
        if step.places is not None:
            out = out.index_select(0, step.places)
            lse = lse.index_select(0, step.places) if lse_read else lse
        return out, lse

    def _last(self, step: SentSchedule) -> Iterator[tuple[Any, SentLevel]]:
        if step.decode is not None:
            yield self._decode, step.decode
        if step.prefill is not None:
            yield self._prefill, step.prefill

    def _of_queries(self, scales: torch.Tensor) -> torch.Tensor:
        """The scale of each query head's KV head, ``[Hq, 1]``."""
        return scales.repeat_interleave(self._kind.group, output_size=self._kind.heads)[:, None]

    def _shared_wrapper(self, number: int) -> Any:
        return self._prefill_wrapper()

    def _prefill_wrapper(self) -> Any:
        make = self._library.BatchPrefillWithPagedKVCacheWrapper
        return make(self._workspace, "NHD", backend="fa2")

    def _decode_wrapper(self) -> Any:
        if self._tensor_cores:
            return self._prefill_wrapper()
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=False, backend="fa2"
        )

    def _plan_rows(self, wrapper: Any, level: SentLevel) -> None:
        wrapper.plan(
            level.query_indptr, *self._pages(level), causal=level.level.causal,
            seq_lens=level.kv_len, **self._constants(),
        )  # fmt: skip

    def _plan_decode(self, level: SentLevel) -> None:
        if self._tensor_cores:
            self._plan_rows(self._decode, level)
            return
        self._decode.plan(*self._pages(level), seq_lens=level.kv_len, **self._constants())

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
