"""The Triton kernel that puts what was sent in one transfer to its places on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl

from coppice.kernels.transfer import Delivery

# 32-bit words that a program copies.
_BLOCK = 1024


@triton.jit
def deliver_words(words: tl.tensor, blocks: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Words of ``words`` int32 to other places, a block a program: grid ``(blocks,)``.

    ``blocks`` int64 ``[n, 4]``: the address to which they go, the first word, their number, which
    is at most BLOCK, and either -1, or the word from which on the number of each word is, counted
    from the address, to which it goes.
    """
    block = blocks + tl.program_id(0) * 4
    base = tl.load(block).to(tl.pointer_type(tl.int32))
    first, count, places = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    at = tl.arange(0, BLOCK)
    mask = at < count
    values = tl.load(words + first + at, mask=mask)
    numbered = mask & (places >= 0)
    to = tl.where(places >= 0, tl.load(words + places + at, mask=numbered, other=0), at)
    tl.store(base + to, values, mask=mask)


class Blocks:
    """Delivers words by that kernel, see ``transfer.Deliverer``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def table(self, deliveries: Sequence[Delivery]) -> np.ndarray:
        rows = []
        for each in deliveries:
            address, word = each.target.data_ptr(), each.start // 4
            for at in range(0, each.words, _BLOCK):
                count = min(_BLOCK, each.words - at)
                if each.places is None:
                    rows.append((address + 4 * at, word + at, count, -1))
                else:
                    rows.append((address, word + at, count, each.places // 4 + at))
        return np.array(rows, np.int64)

    def launch(self, words: torch.Tensor, table: torch.Tensor) -> None:
        with torch.cuda.device(self._device) if words.is_cuda else nullcontext():
            deliver_words[(len(table),)](words, table, BLOCK=_BLOCK, num_warps=4)
