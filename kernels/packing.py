"""Whole pages of all layers as contiguous bytes, and back: how pages leave the device and return.

A packed page holds, for each layer in order, its keys and then its values, each
``[page_size, num_kv_heads, head_dim]`` in the cache's type. Scales are not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache

#: Layers' parts of pages that lie on a GPU are gathered there, at most this many bytes at once.
_GATHERED = 256 * 2**20


def packed_bytes(caches: Sequence[LayerCache]) -> int:
    """Bytes of one packed page."""
    return sum(each[0].nbytes for cache in caches for each in (cache.k, cache.v))


def pack(caches: Sequence[LayerCache], pages: Sequence[int], out: torch.Tensor) -> None:
    """Copies pages to ``out``, uint8 ``[len(pages), packed_bytes]`` in main memory.

    The content is that of the work queued so far. On a GPU ``out`` should be pinned; it is complete
    once the work that is queued on the current stream is done. O(bytes).
    """
    device = caches[0].k.device
    index = torch.tensor(pages, dtype=torch.int64, device=device)
    if device.type == "cpu":
        _gather(caches, index, out)
        return
    most = max(1, _GATHERED // max(1, out.shape[1]))
    for begin in range(0, len(pages), most):
        part = index[begin : begin + most]
        gathered = torch.empty((len(part), out.shape[1]), dtype=torch.uint8, device=device)
        _gather(caches, part, gathered)
        out[begin : begin + most].copy_(gathered, non_blocking=True)


def unpack(caches: Sequence[LayerCache], pages: Sequence[int], packed: torch.Tensor) -> None:
    """Copies packed pages, uint8 ``[len(pages), packed_bytes]`` in main memory, to these pages.

    On a GPU it is queued on the current stream; ``packed`` should be pinned, and must not change
    before the work is done. O(bytes).
    """
    device = caches[0].k.device
    index = torch.tensor(pages, dtype=torch.int64, device=device)
    if device.type != "cpu":
        packed = packed.to(device, non_blocking=True)
    at, word = 0, _word(caches)
    words = packed.view(word)
    for cache in caches:
        for each in (cache.k, cache.v):
            lines = _lines(each, word)
            lines.index_copy_(0, index, words[:, at : at + lines.shape[1]])
            at += lines.shape[1]


def _gather(caches: Sequence[LayerCache], index: torch.Tensor, out: torch.Tensor) -> None:
    at, word = 0, _word(caches)
    words = out.view(word)
    for cache in caches:
        for each in (cache.k, cache.v):
            lines = _lines(each, word)
            words[:, at : at + lines.shape[1]] = lines.index_select(0, index)
            at += lines.shape[1]


def _lines(cache: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """One tensor of a layer as numbers of another type, a row a page."""
    return cache.view(cache.shape[0], -1).view(word)


def _word(caches: Sequence[LayerCache]) -> torch.dtype:
    """The widest type that divides the rows: copies by bytes take three times as long."""
    widths = [each[0].nbytes for cache in caches for each in (cache.k, cache.v)]
    return next(
        word
        for word in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if not any(width % word.itemsize for width in widths)
    )


def host_rows(count: int, width: int, device: torch.device) -> torch.Tensor:
    """Room for packed pages in main memory, uint8 ``[count, width]``; pinned for a GPU."""
    if device.type == "cuda":
        return torch.empty((count, width), dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.empty((count, width), np.uint8))
