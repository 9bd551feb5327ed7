"""Attention in plain torch, slow and obviously right: the yardstick for the other backends.

Every sequence is taken alone, its keys and values gathered token by token through its page table,
all products are float64, and the mask is written out. Only tests use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coppice.kernels.attention.branches import Branches
from coppice.kernels.attention.checks import check_attend, check_cache, check_copy
from coppice.kernels.attention.interface import AttentionBackend, AttentionPlan, LayerCache
from coppice.kernels.transfer import Outbox


class ReferenceBackend(AttentionBackend):
    """The interface by its definition; O(rows x context) memory for each sequence and head."""

    name = "reference"
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    scaled_dtypes = (torch.float8_e4m3fn,)
    rounded_dtypes = (torch.bfloat16,)
    softcaps = True
    branches = True

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        check_cache(self, k, v, cache)
        page_size = cache.k.shape[1]
        if cache.scales is not None:
            limit = torch.finfo(cache.k.dtype).max
            k, v = (
                (new.float() / scale[:, None]).clamp(-limit, limit).to(cache.k.dtype)
                for new, scale in zip((k, v), cache.scales, strict=True)
            )
        for row, slot in enumerate(slots.tolist()):
            cache.k[slot // page_size, slot % page_size] = k[row]
            cache.v[slot // page_size, slot % page_size] = v[row]

    def copy_pages(
        self, caches: Sequence[LayerCache], src: Sequence[int], dst: Sequence[int]
    ) -> None:
        for layer in caches:
            for pages in (layer.k, layer.v):
                check_copy(len(pages), src, dst)
                for source, destination in zip(src, dst, strict=True):
                    pages[destination] = pages[source]

    def prepare(
        self, plan: AttentionPlan, *, num_pages: int | None = None, outbox: Outbox | None = None
    ) -> AttentionPlan:
        plan.check(num_pages)
        return plan

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        prepared: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        lse_read: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = prepared
        check_attend(self, plan, q, k, v, cache, sliding_window, logit_softcap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        group = q.shape[1] // cache.k.shape[2]
        for i in range(plan.num_sequences):
            rows = slice(int(plan.query_start[i]), int(plan.query_start[i + 1]))
            context = int(plan.context_len[i])
            table = plan.page_indices[plan.page_indptr[i] : plan.page_indptr[i + 1]]
            at = range(context)
            pages = [int(table[t // plan.page_size]) for t in at]
            slots = [t % plan.page_size for t in at]
            keys, values = (each[pages, slots].double() for each in (cache.k, cache.v))
            if cache.scales is not None:
                k_scale, v_scale = cache.scales
                keys, values = keys * k_scale[:, None], values * v_scale[:, None]
            keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
            key_at = torch.arange(context, device=q.device)
            row_at = key_at[context - (rows.stop - rows.start) :, None]
            seen = key_at <= row_at
            if sliding_window is not None:
                seen &= key_at > row_at - sliding_window
            if plan.branches is not None and plan.branches.seen[rows.start]:
                seen = _seen_in_tree(plan.branches, rows, context, sliding_window)
                seen = seen.to(q.device)
            scores = torch.einsum("rhd,thd->rht", q[rows].double(), keys) * scale
            if logit_softcap is not None:
                scores = logit_softcap * (scores / logit_softcap).tanh()
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
            out[rows] = torch.einsum("rht,thd->rhd", scores.softmax(-1), values).to(q.dtype)
            lse[rows] = scores.logsumexp(-1).float()
        return out, lse


def _seen_in_tree(
    branches: Branches, rows: slice, context: int, window: int | None
) -> torch.Tensor:
    """Which of a sequence's keys the rows of its tree see, bool ``[rows, context]``."""
    positions = branches.positions[rows].tolist()
    first = context - len(positions)
    at = [*range(first), *positions]  # the position of each key
    seen = torch.zeros(len(positions), context, dtype=torch.bool)
    for row, (position, bits) in enumerate(
        zip(positions, branches.seen[rows].tolist(), strict=True)
    ):
        for key in range(context):
            inside = key < first or bool(bits >> (key - first) & 1)
            near = window is None or at[key] > position - window
            seen[row, key] = inside and near
    return seen
