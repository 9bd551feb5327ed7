"""The pages of the KV cache as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from coppice.kernels.attention.interface import KvScales, LayerCache
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.runner.cache.size import page_bytes
from coppice.runtime.startup.room import explained


def make_pages(
    model: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: Sequence[KvScales | None],
) -> list[LayerCache]:
    """The KV cache of every layer, empty, with one page more than `num_pages`.

    To that page the rows that pad a graph write their KV. Raises TooLittleMemory.
    """
    shape = num_pages + 1, page_size, model.num_kv_heads, model.head_dim
    with explained(
        "the pages of the KV cache",
        num_pages * page_bytes(model, page_size, dtype),
        device,
        "Give a smaller kv_cache_tokens or kv_cache_memory_fraction",
    ):
        return [
            LayerCache(_zeroed(shape, dtype, device), _zeroed(shape, dtype, device), each)
            for each in scales
        ]


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros, of which main memory is taken only for what is written to it.

    `torch.zeros` writes all of it at once; numpy asks the system for zeroed memory instead, so a
    large cache costs neither memory nor the time to fill it before it is used (`resident` sees to
    that of the first pages).
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
