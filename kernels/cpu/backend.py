"""The attention backend for a machine without a GPU: compiled kernels over pages where they lie.

The work is the items of a tree schedule, as on a GPU: a shared stretch is read once for all rows
below it, whether they decode or prefill; the rest of its context each sequence reads on its own.
``schedule.cpu`` assigns the items to threads, and ``numba_items`` computes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import torch

from coppice.kernels.attention.checks import check_attend, check_cache, check_copy
from coppice.kernels.attention.interface import AttentionBackend, AttentionPlan, LayerCache
from coppice.kernels.cpu.attention import torch_items
from coppice.kernels.cpu.attention.arguments import Inputs, Items, Results, items_of
from coppice.kernels.cpu.code import threads
from coppice.kernels.cpu.layer.rows import bits, flat_heads, row_kernels
from coppice.kernels.schedule.cpu import (
    WAKING_PAYS_FROM,
    CpuSchedule,
    GrowingSchedule,
    build_cpu_schedule,
    cpu_cost_model,
)
from coppice.kernels.transfer import Outbox

_log = logging.getLogger(__name__)

#: What a schedule depends on beside its plan: window, heads, KV heads, size of a head, threads.
Shape = tuple[int | None, int, int, int, int]


class PreparedPlan:
    """A checked plan with its schedules, each made for the first layer with that window.

    ``grown`` keeps schedules of earlier steps.
    """

    __slots__ = ("_grown", "_schedules", "num_threads", "plan")

    def __init__(self, plan: AttentionPlan, grown: dict[Shape, GrowingSchedule]) -> None:
        # A copy: the kernels are compiled for arrays that can be written to.
        self.plan = replace(plan, page_indices=plan.page_indices.copy())
        self.num_threads = threads.use_torch_threads()
        self._schedules: dict[Shape, CpuSchedule] = {}
        self._grown = grown

    def schedule(
        self, window: int | None, heads: int, kv_heads: int, head_dim: int, kernels: ModuleType
    ) -> CpuSchedule:
        key = (window, heads, kv_heads, head_dim, self.num_threads)
        schedule = self._schedules.get(key)
        if schedule is None:
            model = cpu_cost_model(
                heads,
                kv_heads,
                head_dim,
                lanes=kernels.LANES,
                most_lanes=kernels.MOST_LANES,
                keys=kernels.TILE,
                threads=self.num_threads,
            )
            if key in self._grown:
                schedule = self._grown[key].schedule(self.plan, model)
        if schedule is None:
            schedule = build_cpu_schedule(self.plan, window, model)
            self._grown.pop(key, None)
            if window is None and self.plan.num_rows == self.plan.num_sequences:
                self._grown[key] = GrowingSchedule(self.plan, schedule)
        self._schedules[key] = schedule
        return schedule


class CpuBackend(AttentionBackend):
    """Attention in float32 on the CPU, over pages in float32 or bfloat16.

    Other types are refused by name.

    The constructor compiles the kernels or loads them from numba's cache. Where numba is missing or
    fails, plain torch does their work, several times slower, and a warning gives the reason.
    """

    name = "cpu"
    dtypes = (torch.float32,)
    rounded_dtypes = (torch.bfloat16,)
    softcaps = True
    branches = True

    def __init__(self) -> None:
        threads.calm_waiting_threads()
        self._kernels = _load_kernels()
        self._rows = row_kernels()
        self._grown: dict[Shape, GrowingSchedule] = {}

    def compiles(self, heads: int, kv_heads: int) -> bool:
        """Whether attention with these numbers of heads runs in numba's kernels.

        Where a KV head has more query heads than a row of lanes (64 with AVX-512, 24 with AVX2),
        plain torch computes it.
        """
        return self._kernels_for(heads, kv_heads) is not torch_items

    def schedule(
        self,
        prepared: PreparedPlan,
        window: int | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> CpuSchedule:
        """The schedule of ``attend`` for layers with that window and heads of that shape."""
        kernels = self._kernels_for(heads, kv_heads)
        return prepared.schedule(window, heads, kv_heads, head_dim, kernels)

    def _kernels_for(self, heads: int, kv_heads: int) -> ModuleType:
        return self._kernels if heads // kv_heads <= self._kernels.MOST_LANES else torch_items

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        check_cache(self, k, v, cache)
        cache.k.flatten(0, 1).index_copy_(0, slots, k.to(cache.k.dtype))
        cache.v.flatten(0, 1).index_copy_(0, slots, v.to(cache.v.dtype))

    def write_rotated(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = qk.shape[1] - v.shape[1]
        check_cache(self, qk[:, heads:], v, cache)
        rotated = self._rows.rotate_write(qk, v, cos, signed_sin, cache.k, cache.v, slots)
        return rotated[:, :heads], rotated[:, heads:]

    def copy_pages(
        self, caches: Sequence[LayerCache], src: Sequence[int], dst: Sequence[int]
    ) -> None:
        for pages in {len(layer.k) for layer in caches}:
            check_copy(pages, src, dst)
        if not caches or not len(src):
            return
        for layer in caches:
            for cache in (layer.k, layer.v):
                assert cache.is_contiguous() and cache.stride(0) == caches[0].k.stride(0)
        # A step of a beam of 4 copies some hundred pages in 30 layers: one by one, with torch, that
        # takes 1 ms more.
        addresses = [cache.data_ptr() for layer in caches for cache in (layer.k, layer.v)]
        size = caches[0].k.stride(0) * caches[0].k.element_size()
        self._rows.copy_pages(addresses, size, src, dst)

    def prepare(
        self, plan: AttentionPlan, *, num_pages: int | None = None, outbox: Outbox | None = None
    ) -> PreparedPlan:
        plan.check(num_pages)
        return PreparedPlan(plan, self._grown)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        prepared: PreparedPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        lse_read: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_attend(self, prepared.plan, q, k, v, cache, sliding_window, logit_softcap)
        rows, heads, dim = q.shape
        if dim % 2:
            raise ValueError(f"q has heads of {dim}; the cpu backend needs an even number")
        kv_heads = cache.k.shape[2]
        schedule = self.schedule(prepared, sliding_window, heads, kv_heads, dim)
        out = torch.empty(q.shape)
        lse = torch.empty(q.shape[:2])
        partials = schedule.tree.num_partials
        items = items_of(
            schedule,
            prepared.plan,
            kv_heads=kv_heads,
            dim=dim,
            scale=scale,
            window=sliding_window,
            softcap=logit_softcap,
        )
        if schedule.work < WAKING_PAYS_FROM:
            items = items._replace(shares=np.array([0, len(items.tasks)], np.int64))
        inputs = Inputs(
            flat_heads(q.detach()),
            q.stride(0),
            bits(cache.k),
            bits(cache.v),
        )
        results = Results(
            out.view(rows, -1).numpy(),
            lse.numpy(),
            np.empty((partials, heads * dim), np.float32),
            np.empty((partials, heads), np.float32),
        )
        self._kernels_for(heads, kv_heads).attend_items(items, inputs, results)
        return out, lse


def _load_kernels() -> ModuleType:
    """The compiled kernels, tested on a small batch; plain torch, with a warning, if that fails."""
    try:
        from coppice.kernels.cpu.attention import numba_items

        _try_out(numba_items)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.warning(
            "CPU attention runs in plain torch, several times slower: numba's kernels could not "
            "be used (%s: %s)",
            type(error).__name__,
            str(error).strip().split("\n")[0],
        )
        return torch_items
    return numba_items


def _try_out(kernels: ModuleType) -> None:
    """Runs the kernel, on one thread's share and on two, so that a failure to compile shows here.

    The batch is one row of two query heads over four keys, all ones, in two items that are merged;
    then as many rows as fill each width of lanes.
    """
    dim = kernels.LANES
    cache = np.ones(4 * dim, np.float32)
    table = np.zeros(1, np.int32)
    for rows in sorted({1, kernels.LANES, *(kernels.LANES * n // 2 for n in kernels.VECTORS)}):
        q = np.ones((rows, 2 * dim), np.float32)
        out, partial_out = np.empty_like(q), np.empty((2 * rows, 2 * dim), np.float32)
        lse, partial_lse = np.empty((rows, 2), np.float32), np.empty((2 * rows, 2), np.float32)
        items = np.array([[0, rows, 0, 0, 2, 0, 0, 0], [0, rows, 0, 2, 4, 0, 0, rows]], np.int32)
        slots = np.concatenate([np.arange(rows) * 2, np.arange(rows) * 2 + 1]).astype(np.int32)
        merges = np.column_stack([np.arange(rows), np.arange(rows) * 2, np.full(rows, 2)])
        inputs = Inputs(q.reshape(-1), 2 * dim, cache, cache)
        results = Results(out, lse, partial_out, partial_lse)
        for shares in ([0, 2], [0, 1, 2]):
            out[:] = 0
            work = Items(
                np.array([[0, 0, 1], [1, 0, 1]], np.int32), np.array(shares), items,
                merges.astype(np.int32), table, np.arange(rows, dtype=np.int32), slots,
                np.full(rows, 3, np.int32), np.zeros((0, 2), np.int64), 4, 1, dim,
                np.float32(1), 0, np.float32(0),
            )  # fmt: skip
            kernels.attend_items(work, inputs, results)
            if not np.allclose(out, 1):
                raise ArithmeticError("the compiled kernels give wrong results on a batch of ones")
