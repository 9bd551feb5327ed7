"""Transfers of a step's small arrays to the device and back, without the host waiting for it.

A copy from ordinary memory makes the host wait until the device has finished all that is queued
before it. A copy from pinned memory is queued like a kernel, and the host continues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike

# Kernels are compiled for addresses at multiples of 16 bytes, and a step must not call for another
# kernel than the one before.
_ALIGNMENT = 16


def stage(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the host, in memory from which a copy to the device is queued.

    They are views of one piece of memory, each at a multiple of 16 bytes. O(bytes).
    """
    starts = _starts([array.nbytes for array in arrays])
    return _views(_packed(arrays, starts, starts[-1], device), starts, arrays)


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device, in one transfer; later changes do not reach them.

    On a GPU they are views of one piece of memory, each at a multiple of 16 bytes, and the transfer
    is queued on the current stream; torch keeps the pinned copy until it is done. O(bytes).
    """
    if device.type == "cpu":
        return [torch.from_numpy(array.copy()) for array in arrays]
    starts = _starts([array.nbytes for array in arrays])
    packed = _packed(arrays, starts, starts[-1], device).to(device, non_blocking=True)
    return _views(packed, starts, arrays)


class Landing:
    """Arrays at fixed places of the device's memory, which graphs read; written in one transfer.

    A step may fill them in part: the rest of the last array keeps its former contents, the rest of
    the others becomes zero.
    """

    def __init__(self, arrays: Sequence[tuple[tuple[int, ...], DTypeLike]], memory: torch.Tensor):
        """``arrays``: shapes and types; ``memory``: at least ``size(arrays)`` of uint8."""
        self._shapes = [(shape, np.dtype(dtype)) for shape, dtype in arrays]
        self._starts = _starts([_bytes(*each) for each in self._shapes])
        self._memory = memory
        self.arrays = [
            _view(memory, start, *each)
            for start, each in zip(self._starts, self._shapes, strict=False)
        ]

    @staticmethod
    def size(arrays: Sequence[tuple[tuple[int, ...], DTypeLike]]) -> int:
        """Bytes that arrays of these shapes and types take together."""
        return _starts([_bytes(shape, np.dtype(dtype)) for shape, dtype in arrays])[-1]

    def put(self, arrays: Sequence[np.ndarray]) -> bool:
        """Queue the transfer of ``arrays``; return False, and do nothing, if one has too many rows.

        They have the types and shapes given to the constructor, except for the number of rows.
        """
        room = zip(arrays, self._shapes, strict=True)
        if any(len(array) > shape[0] for array, (shape, _) in room):
            return False
        end = self._starts[len(arrays) - 1] + arrays[-1].nbytes
        packed = _packed(arrays, self._starts, end, self._memory.device)
        self._memory[: len(packed)].copy_(packed, non_blocking=True)
        return True


class Fetched:
    """Tensors on their way back from the device, queued after what computes them.

    They are copied into pinned memory; an event recorded after the copies signals their arrival.
    Until then only operations queued on the same stream may change the tensors.
    """

    __slots__ = ("_event", "_here")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._here = list(tensors)
            return
        self._here = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors
        ]
        for here, tensor in zip(self._here, tensors, strict=True):
            here.copy_(tensor, non_blocking=True)
        with torch.cuda.device(tensors[0].device):
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, as soon as they are there."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._here


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where arrays of these numbers of bytes begin, one after another, and where the last ends."""
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return [int(start) for start in np.cumsum([0, *rounded])]


def _packed(
    arrays: Sequence[np.ndarray], starts: Sequence[int], size: int, device: torch.device
) -> torch.Tensor:
    """The bytes of the arrays at their places, zero between, in pinned memory for a GPU."""
    packed = np.zeros(max(size, _ALIGNMENT), np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    made = torch.from_numpy(packed)
    return made if device.type == "cpu" else made.pin_memory()


def _views(
    memory: torch.Tensor, starts: Sequence[int], arrays: Sequence[np.ndarray]
) -> list[torch.Tensor]:
    return [
        _view(memory, start, array.shape, array.dtype)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _view(
    memory: torch.Tensor, start: int, shape: tuple[int, ...], dtype: np.dtype
) -> torch.Tensor:
    part = memory[start : start + _bytes(shape, dtype)]
    return part.view(_torch_type(dtype)).view(shape)


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _torch_type(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def take(tensor: torch.Tensor, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
    """A copy of some rows of a tensor, without waiting as ``tensor[rows]`` does."""
    (index,) = send([np.array(rows, np.int64)], tensor.device)
    return tensor.index_select(0, index)
