"""How small arrays of a step reach the device: together, and without the host waiting for it.

A copy from ordinary memory makes the host wait until the device has come to it, behind everything
that is queued already; one from pinned memory is queued like a kernel, and the host goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# Kernels are compiled for addresses at multiples of 16 bytes, and a step must not call for another
# kernel than the one before.
_ALIGNMENT = 16


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device, all of them in one transfer; the arrays may change then.

    They are views of one piece of memory, each at a multiple of 16 bytes. On a GPU the transfer is
    queued on the current stream; torch keeps the pinned copy until it is through. O(bytes).
    """
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = np.cumsum([0, *sizes]).tolist()
    packed = np.zeros(max(starts[-1], _ALIGNMENT), np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    sent = torch.from_numpy(packed)
    if device.type != "cpu":
        sent = sent.pin_memory().to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(_torch_type(array.dtype)).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _torch_type(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def take(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of some rows of a tensor, without waiting as ``tensor[rows]`` does."""
    (index,) = send([np.array(rows, np.int64)], tensor.device)
    return tensor.index_select(0, index)
