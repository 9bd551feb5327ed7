"""FlashInfer's ways to compute attention, for `kernels_gpu.py`, if it imports and is built.

Each way has its own wrappers, so that its plan is made once and only launches are measured. No
kernel is built here, which would take minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from coppice.kernels.attention.interface import AttentionCase, AttentionPlan, LayerCache
from coppice.kernels.flashinfer.backend import FlashInferBackend
from coppice.kernels.flashinfer.levels import LevelSchedule, build_levels, choose_levels
from coppice.kernels.schedule.cost import CostModel

os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")

Ways = dict[str, Callable[[], torch.Tensor]]


class FlashInferWays:
    """Raises ValueError with the reason if FlashInfer does not support the case."""

    def __init__(self, device: torch.device, case: AttentionCase) -> None:
        self._case = case
        self._plain, self._tree = (FlashInferBackend(device, case) for _ in range(2))

    def of(
        self,
        plan: AttentionPlan,
        model: CostModel,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> Ways:
        """Up to three ways: plain, the tree by our composition, by FlashInfer's cascade wrapper.

        `tensors` are queries, keys and values. The second needs a shared stretch, the third also
        that all rows lie in every level, in order.
        """

        def attend(backend: FlashInferBackend, each: AttentionPlan) -> Callable[[], torch.Tensor]:
            prepared = backend.prepare(each)
            scale = self._case.scale
            return lambda: backend.attend(*tensors, cache, prepared, scale=scale)[0]

        ways = {"flashinfer": attend(self._plain, replace(plan, stretches=()))}
        schedule = build_levels(plan, None, choose_levels(plan, None, model))
        if schedule.shared:
            ways["flashinfer, tree"] = attend(self._tree, plan)
            whole = all(level.num_rows == plan.num_rows for level in schedule.levels)
            if whole and schedule.rows is None:
                made = self._cascade(schedule, tensors[0], cache, plan.page_size, plan.page_indices)
                ways["flashinfer, cascade"] = made
        return ways

    def _cascade(
        self,
        schedule: LevelSchedule,
        q: torch.Tensor,
        cache: LayerCache,
        page_size: int,
        tables: np.ndarray,
    ) -> Callable[[], torch.Tensor]:
        import flashinfer

        case = self._case
        workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
            len(schedule.levels), workspace, "NHD"
        )

        def arrays(name: str) -> list[torch.Tensor]:
            found: list[np.ndarray] = [getattr(level, name) for level in schedule.levels]
            return [torch.from_numpy(each) for each in found]

        wrapper.plan(
            arrays("query_indptr"),
            arrays("page_indptr"),
            [torch.from_numpy(each.page_ids(tables)).to(q.device) for each in schedule.levels],
            arrays("last_page_len"),
            case.num_heads,
            case.num_kv_heads,
            case.head_dim,
            page_size,
            causal=schedule.levels[-1].causal,
            sm_scale=case.scale,
            q_data_type=case.dtype,
            kv_data_type=case.cache_dtype,
        )
        return lambda: wrapper.run(q, (cache.k, cache.v))
