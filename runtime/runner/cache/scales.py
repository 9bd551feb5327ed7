"""Scales for a KV cache of 8-bit floats, measured by a run of the model over random tokens.

A float keeps its relative precision over its whole range, which for e4m3 is a factor of 28,672
between its greatest number and its least normal one. So a scale need not be exact: it must keep
what occurs below the greatest number, which is what larger ones are written as, and may waste some
of the range below. Each head's largest key or value among the tokens of the run is laid at a
quarter of that number (Micikevicius et al. 2022, FP8 formats for deep learning).
"""

from __future__ import annotations

import numpy as np
import torch

from coppice.kernels.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    KvScales,
    LayerCache,
)
from coppice.kernels.transfer import send
from coppice.runtime.runner.implementation import Model

#: Tokens of the run; one sequence, so that late positions are among them.
CALIBRATION_TOKENS = 256
#: How many times larger than in the run keys and values may be before they are cut off.
HEADROOM = 4.0


@torch.inference_mode()
def measure_scales(
    decoder: Model,
    attention: AttentionBackend,
    *,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    vocabulary: int,
) -> list[KvScales]:
    """Scales of every layer, by which values of ``dtype`` are kept as ``cache_dtype``.

    Takes a step of ``CALIBRATION_TOKENS`` tokens and the memory of their KV.
    """
    config = decoder.config
    count = min(CALIBRATION_TOKENS, config.max_position)
    num_pages = -(-count // page_size)
    plan = AttentionPlan(
        page_size=page_size,
        query_start=np.array([0, count], np.int32),
        context_len=np.array([count], np.int32),
        page_indptr=np.array([0, num_pages], np.int32),
        page_indices=np.arange(num_pages, dtype=np.int32),
    )
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    caches = [
        LayerCache(*torch.zeros(2, *shape, dtype=dtype, device=device))
        for _ in range(config.num_layers)
    ]
    tokens = np.random.default_rng(0).integers(vocabulary, size=count)
    token_ids, places, nothing = send([tokens, np.arange(count), tokens[:0]], device)
    prepared = attention.prepare(plan, num_pages=num_pages)
    decoder.hidden_states(token_ids, places, places, caches, attention, prepared, nothing)
    room = torch.finfo(cache_dtype).max / HEADROOM
    # A head that is zero throughout may have any scale.
    return [
        (_largest(cache.k).clamp(min=1e-12) / room, _largest(cache.v).clamp(min=1e-12) / room)
        for cache in caches
    ]


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each KV head, float32 ``[num_kv_heads]``."""
    return values.abs().amax(dim=(0, 1, 3)).float()
