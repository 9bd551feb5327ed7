"""The attention backend for an NVIDIA GPU, in Triton: it launches the items of ``schedule.items``.

**What is guaranteed.** Always: the same batch over the same cache gives the same bits, run after
run, since no result depends on the order in which programs finish. With ``deterministic``: a
row's result depends on its query and on the keys and values that it sees, and on nothing else: not
on the rest of the batch, where chunks of prefill were cut, pages or page ids, what other sequences
share, or whether its prefix was computed in this step or found in the cache. To that end every row
walks the same tiles of keys at the same positions in the same order, in one kernel with one tile
shape, split at multiples of ``DETERMINISTIC_SPLIT`` keys; nothing is shared. It holds for one
device, head shape, type and page size, and for attention alone: the caller must give
queries, keys and values with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from coppice.kernels.attention.checks import check_attend
from coppice.kernels.attention.interface import AttentionPlan, LayerCache
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.tiles import choose_tiles, head_blocks
from coppice.kernels.transfer import Outbox
from coppice.kernels.triton.attention import attend_items
from coppice.kernels.triton.base import INTERPRETED, GpuBackend, on
from coppice.kernels.triton.dependent import dependent
from coppice.kernels.triton.merge import merge_partials
from coppice.kernels.triton.plans import PreparedPlan, TritonFixedPlan, fixed_plans

MAX_HEAD_DIM = 256
# Partial results merged at a time; more are taken in further rounds.
_PARTS = 16
# Programs of a merge on a multiprocessor: of four warps each, half of what it holds.
_MERGING = 8


class TritonBackend(GpuBackend):
    """Attention as Triton kernels, beside the cache writes, compiled at their first use.

    ``deterministic`` is explained above; it costs what sharing and splitting finely would save.
    Raises ``ValueError`` for a device that the kernels do not run on.
    """

    name = "triton"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    scaled_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    softcaps = True
    branches: bool = True
    mixed_plans = True

    def __init__(self, device: torch.device, *, deterministic: bool = False) -> None:
        super().__init__(device)
        self.deterministic = deterministic
        self._before: PreparedPlan | None = None  # of the last step
        # The tiles of a row's keys would depend on the branches before it.
        self.branches = not deterministic
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            # What older chips lack instructions for: bfloat16 before 8.0, 8-bit floats before 8.9.
            if capability < (8, 0):
                self.dtypes = (torch.float16, torch.float32)
            if capability < (8, 9):
                self.scaled_dtypes = ()

    def prepare(
        self, plan: AttentionPlan, *, num_pages: int | None = None, outbox: Outbox | None = None
    ) -> PreparedPlan:
        plan.check(num_pages)
        self._check_tables(plan)
        if plan.branches is not None and self.deterministic:
            raise ValueError(
                "branches of the plan are given; with deterministic the triton backend takes only "
                "None"
            )
        made = PreparedPlan(plan, self.device, self.deterministic, self.tables)
        if outbox is not None:
            if self._before is not None:
                made.expect(self._before.asked, outbox)
            self._before = made
        return made

    def fixed_plans(
        self,
        sizes: Sequence[int],
        *,
        page_size: int,
        num_pages: int,
        max_pages: int,
        branches: bool = False,
        most_sequences: int | None = None,
    ) -> Sequence[Sequence[TritonFixedPlan]]:
        return fixed_plans(
            sizes,
            device=self.device,
            page_size=page_size,
            num_pages=num_pages,
            max_pages=max_pages,
            deterministic=self.deterministic,
            branches=branches,
            tables=self.tables,
        )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        prepared: PreparedPlan | TritonFixedPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        lse_read: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_attend(self, prepared.plan, q, k, v, cache, sliding_window, logit_softcap)
        rows, heads, head_dim = q.shape
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"q has heads of {head_dim}; it must be at most {MAX_HEAD_DIM}")
        if not scale >= 0:
            raise ValueError(f"scale is {scale}; it must be 0 or more")
        model = self.cost_model(heads, cache.k.shape[2], head_dim, q.dtype, cache.k.dtype)
        sent = prepared.schedule(sliding_window, model)
        upcast = INTERPRETED and q.dtype != torch.float32
        place: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        out = torch.empty(q.shape, dtype=torch.float32 if upcast else q.dtype, device=q.device)
        lse = torch.empty((rows, heads), **place)
        partials = max(sent.num_partials, 1)
        partial_out = torch.empty((partials, heads, head_dim), **place)
        partial_lse = torch.empty((partials, heads), **place)
        with on(self.device):
            for tile, phased, items, count in sent.launches:
                block_d, rest_d = head_blocks(
                    head_dim, tile.queries, eight_bits=cache.scales is not None
                )
                programs = len(items) * model.programs
                persistent = isinstance(prepared, TritonFixedPlan)
                grid = min(programs, self._multiprocessors * tile.resident)
                attend_items[(grid if persistent else programs,)](
                    q, cache.k, cache.v, *(cache.scales or (lse, lse)), out, lse, partial_out,
                    partial_lse, items, sent.rows, sent.slots, sent.positions, sent.branches,
                    sent.page_indices, count,
                    q.stride(0), float(scale), float(logit_softcap or 0), sliding_window or 0,
                    GROUP=model.group, PACKED=model.packed, KV_HEADS=model.kv_heads,
                    HEAD_DIM=head_dim, BLOCK_D=block_d, REST_D=rest_d, QUERIES=tile.queries,
                    KEYS=tile.keys, PAGE_SIZE=prepared.plan.page_size,
                    WINDOWED=sliding_window is not None,
                    SOFTCAPPED=logit_softcap is not None, BRANCHED=len(sent.branches) > 0,
                    SCALED=cache.scales is not None,
                    HALF=cache.scales is not None and q.dtype.itemsize == 2,
                    PARTIAL=len(sent.slots) > 0, PHASED=phased, PERSISTENT=persistent,
                    UPCAST=upcast,
                    num_warps=tile.warps, num_stages=tile.stages, **dependent(self.device),
                )  # fmt: skip
            if len(sent.merges):
                grid = min(len(sent.merges) * heads, self._multiprocessors * _MERGING)
                merge_partials[(grid,)](
                    partial_out, partial_lse, sent.merges, sent.num_merges, out, lse,
                    HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
                    PARTS=_PARTS, num_warps=4, **dependent(self.device),
                )  # fmt: skip
        return out.to(q.dtype), lse

    def cost_model(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
    ) -> CostModel:
        """The cost model of schedules for heads of that shape and those types."""
        group = heads // kv_heads
        tiles = choose_tiles(head_dim, dtype.itemsize, group, deterministic=self.deterministic)
        key_bytes = 2 * head_dim * cache_dtype.itemsize
        return CostModel(tiles, group, kv_heads, head_dim, key_bytes, self._multiprocessors)
