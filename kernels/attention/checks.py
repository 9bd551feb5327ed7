"""Checks of tensors, plans and page copies that all attention backends share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coppice.kernels.attention.interface import AttentionBackend, AttentionPlan, LayerCache, brief


def check_attend(
    backend: AttentionBackend,
    plan: AttentionPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    sliding_window: int | None,
    logit_softcap: float | None = None,
) -> None:
    """Refuse tensors that do not fit the plan or one another: ``ValueError``, by name."""
    check_cache(backend, k, v, cache)
    page_size, kv_heads, head_dim = cache.k.shape[1:]
    if page_size != plan.page_size:
        raise ValueError(
            f"cache has pages of {page_size} tokens; the plan's page_size is {plan.page_size}"
        )
    if q.dim() != 3 or q.shape[0] != plan.num_rows or q.shape[2] != head_dim:
        raise ValueError(f"q is {tuple(q.shape)}; it must be ({plan.num_rows}, Hq, {head_dim})")
    if q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads; it must have a multiple of {kv_heads}")
    if q.dtype != k.dtype:
        raise ValueError(f"q is {q.dtype}; it must be {k.dtype} as k is")
    if k.shape[0] != plan.num_rows:
        raise ValueError(f"k has {k.shape[0]} rows; it must have {plan.num_rows} as q has")
    check_rows(q=q, k=k, v=v)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be None or at least 1")
    if logit_softcap is not None:
        if not backend.softcaps:
            raise ValueError(
                f"logit_softcap is {logit_softcap}; the {backend.name} backend takes only None"
            )
        if not logit_softcap > 0:
            raise ValueError(f"logit_softcap is {logit_softcap}; it must be None or above 0")


def check_cache(
    backend: AttentionBackend, k: torch.Tensor, v: torch.Tensor, cache: LayerCache
) -> None:
    """Refuse keys and values that do not fit the cache of a layer: ``ValueError``, by name."""
    k_cache, v_cache, scales = cache.k, cache.v, cache.scales
    if k_cache.dim() != 4 or not k_cache.is_contiguous():
        raise ValueError(
            f"cache.k is {tuple(k_cache.shape)}, strides {k_cache.stride()}; it must be "
            "contiguous [num_pages, page_size, num_kv_heads, head_dim]"
        )
    scaled = k_cache.dtype in backend.scaled_dtypes
    rounded = k_cache.dtype in backend.rounded_dtypes
    if not (scaled or rounded) and k_cache.dtype not in backend.dtypes:
        kinds = dict.fromkeys((*backend.dtypes, *backend.rounded_dtypes, *backend.scaled_dtypes))
        allowed = ", ".join(str(dtype) for dtype in kinds)
        raise ValueError(
            f"cache.k is {k_cache.dtype}; the {backend.name} backend computes in {allowed}"
        )
    if scaled != (scales is not None):
        needed = "two float32 tensors, one scale for each KV head," if scaled else "None"
        raise ValueError(
            f"cache.scales is {'None' if scales is None else 'given'}; it must be {needed} for a "
            f"cache of {k_cache.dtype}"
        )
    for name, scale in zip(("k", "v"), scales or (), strict=False):
        if scale.shape != k_cache.shape[2:3] or scale.dtype != torch.float32:
            raise ValueError(
                f"cache.scales of {name} is {scale.dtype} {tuple(scale.shape)}; it must be "
                f"torch.float32 ({k_cache.shape[2]},)"
            )
    if v_cache.shape != k_cache.shape or not v_cache.is_contiguous():
        raise ValueError(
            f"cache.v is {tuple(v_cache.shape)}, strides {v_cache.stride()}; it must be "
            f"contiguous {tuple(k_cache.shape)} as cache.k is"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != 3 or tensor.shape[1:] != k_cache.shape[2:]:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}; it must be (T, {k_cache.shape[2]}, "
                f"{k_cache.shape[3]}) for this cache"
            )
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"v has {v.shape[0]} rows; it must have {k.shape[0]} as k has")
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"cache.v is {v_cache.dtype}; it must be {k_cache.dtype} as cache.k is")
    if scaled:
        if k.dtype not in backend.dtypes or v.dtype != k.dtype:
            allowed = ", ".join(str(dtype) for dtype in backend.dtypes)
            raise ValueError(f"k is {k.dtype} and v {v.dtype}; both must be one of {allowed}")
        return
    needed_type = k_cache.dtype
    if rounded and (k.dtype == torch.float32 or needed_type not in backend.dtypes):
        needed_type = torch.float32
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != needed_type and needed_type != k_cache.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype}; it must be {needed_type} for a cache of {k_cache.dtype}"
            )
        if tensor.dtype != needed_type:
            raise ValueError(f"{name} is {tensor.dtype}; it must be {k_cache.dtype} as cache.k is")


def check_rows(**tensors: torch.Tensor) -> None:
    """Refuse tensors ``[T, H, D]`` whose rows are not contiguous: ``ValueError``, by name."""
    for name, tensor in tensors.items():
        if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
            raise ValueError(
                f"{name} has strides {tensor.stride()}; heads and head_dim must be contiguous"
            )


def check_fixed(plan: AttentionPlan, size: int, page_size: int, num_pages: int) -> None:
    """Refuse a plan other than that of a step of ``size`` rows: ``ValueError``."""
    plan.check(num_pages)
    for name, found, needed in (
        ("query_start", plan.num_rows, size),
        ("page_size", plan.page_size, page_size),
    ):
        if found != needed:
            raise ValueError(f"{name} of the plan is of {found}; here it must be of {needed}")


def check_copy(num_pages: int, src: Sequence[int], dst: Sequence[int]) -> None:
    """Refuse a list of page copies whose result would depend on their order: ``ValueError``."""
    if len(src) != len(dst):
        raise ValueError(f"dst has {len(dst)} pages; it must have {len(src)} as src has")
    for name, pages in (("src", src), ("dst", dst)):
        for page in pages:
            if not 0 <= page < num_pages:
                raise ValueError(f"{name} holds page {page}; pages go from 0 to {num_pages - 1}")
    if len(set(dst)) != len(dst) or not set(src).isdisjoint(dst):
        raise ValueError(f"dst is {brief(dst)}; it must name no page twice and none that src names")
