"""Whole pages of all layers as contiguous bytes, and back: how pages leave the device and return.

A packed page holds, for each layer in order, its keys and then its values, each
``[page_size, num_kv_heads, head_dim]`` in the cache's type. Scales are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache

_BLOCK_BYTES = 8 * 2**20  # of main memory that a GPU's pages are copied to


def packed_bytes(caches: Sequence[LayerCache]) -> int:
    """Bytes of one packed page."""
    return sum(map(layer_bytes, caches))


def layer_bytes(cache: LayerCache) -> int:
    """Bytes that one layer has of a packed page."""
    return cache.k[0].nbytes + cache.v[0].nbytes


def pack(caches: Sequence[LayerCache], pages: Sequence[int], out: torch.Tensor) -> None:
    """Copies pages in main memory to ``out``, uint8 ``[len(pages), packed_bytes]``. O(bytes)."""
    gather(caches, torch.tensor(pages, dtype=torch.int64), out)


def unpack(caches: Sequence[LayerCache], pages: Sequence[int], packed: torch.Tensor) -> None:
    """Copies packed pages, uint8 ``[len(pages), packed_bytes]``, to these, in main memory.

    O(bytes).
    """
    index = torch.tensor(pages, dtype=torch.int64)
    at, word = 0, _word(caches, packed)
    words = packed.view(word)
    for cache in caches:
        at = _put(cache, index, words, at)


def gather(caches: Sequence[LayerCache], index: torch.Tensor, out: torch.Tensor) -> None:
    """Packs the pages ``index``, int64, to ``out``, all on one device."""
    at, word = 0, _word(caches, out)
    words = out.view(word)
    for cache in caches:
        for each in (cache.k, cache.v):
            lines = _lines(each, word)
            words[:, at : at + lines.shape[1]] = lines.index_select(0, index)
            at += lines.shape[1]


def put(cache: LayerCache, index: torch.Tensor, packed: torch.Tensor) -> None:
    """Copies the part of one layer, uint8 ``[len(index), layer_bytes]``, to its pages ``index``.

    All lie on one device.
    """
    _put(cache, index, packed.view(_word([cache], packed)), 0)


def _put(cache: LayerCache, index: torch.Tensor, words: torch.Tensor, at: int) -> int:
    """Copies keys and values that begin at column ``at``; returns where they end."""
    for each in (cache.k, cache.v):
        lines = _lines(each, words.dtype)
        lines.index_copy_(0, index, words[:, at : at + lines.shape[1]])
        at += lines.shape[1]
    return at


def _lines(cache: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """One tensor of a layer as numbers of another type, a row a page."""
    return cache.view(cache.shape[0], -1).view(word)


def _word(caches: Sequence[LayerCache], packed: torch.Tensor) -> torch.dtype:
    """The widest type that divides the rows: copies by bytes take three times as long.

    `packed` may be some columns of wider rows, which begin anywhere.
    """
    widths = [each[0].nbytes for cache in caches for each in (cache.k, cache.v)]
    widths += [int(packed.stride(0)), int(packed.storage_offset())]
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


class HostBlocks:
    """Room for packed pages in main memory that is taken in blocks of one size.

    Torch never gives pinned memory back: it keeps what it has made of each size, rounded up to a
    power of two, for the next one who asks for that size. So whoever asks for many sizes in turn
    comes to hold the most that was in use of each at any time, together several times what is in
    use. Of one size it is the most that was in use, once. A block is free when all of its rows are;
    where rows are freed in the order in which they were taken, all blocks together have at most the
    rows in use and two blocks more.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        """Takes no memory yet; ``width``: bytes of a packed page."""
        self._width, self._device = width, device
        self._size = max(1, _BLOCK_BYTES // width)
        self._block, self._used = host_rows(0, width, torch.device("cpu")), 0

    def rows(self, count: int) -> Iterator[torch.Tensor]:
        """Room for ``count`` pages, in pieces that follow each other: uint8 ``[part, width]``.

        O(pieces).
        """
        while count:
            if self._used == len(self._block):
                self._block, self._used = host_rows(self._size, self._width, self._device), 0
            piece = self._block[self._used : self._used + count]
            self._used += len(piece)
            count -= len(piece)
            yield piece
