"""Transfers of a step's small arrays to the device and back, without the host waiting for it.

A copy from ordinary memory makes the host wait until the device has finished all that is queued
before it. A copy from pinned memory is queued like a kernel, and the host continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import ClassVar, NamedTuple, Protocol

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
    return _views(_packed(arrays, starts, device), starts, arrays)


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device, in one transfer; later changes do not reach them.

    On a GPU they are views of one piece of memory, each at a multiple of 16 bytes, and the transfer
    is queued on the current stream; torch keeps the pinned copy until it is done. O(bytes).
    """
    outbox = Outbox(device)
    parcel = outbox.add(arrays)
    outbox.send()
    return parcel.tensors


class Landing:
    """Arrays at fixed places of the device's memory, which graphs read.

    A step may fill them in part; the rest keeps its former contents.
    """

    def __init__(self, arrays: Sequence[tuple[tuple[int, ...], DTypeLike]], memory: torch.Tensor):
        """``arrays``: shapes and types; ``memory``: at least ``size(arrays)`` of uint8."""
        self._shapes = [(shape, np.dtype(dtype)) for shape, dtype in arrays]
        starts = _starts([_bytes(*each) for each in self._shapes])
        self.memory = memory
        self.arrays = [
            _view(memory, start, *each) for start, each in zip(starts, self._shapes, strict=False)
        ]

    @staticmethod
    def size(arrays: Sequence[tuple[tuple[int, ...], DTypeLike]]) -> int:
        """Bytes that arrays of these shapes and types take together."""
        return _starts([_bytes(shape, np.dtype(dtype)) for shape, dtype in arrays])[-1]

    def fits(self, arrays: Sequence[np.ndarray]) -> bool:
        """Whether none has too many rows.

        They have the types and shapes given to the constructor, except for the number of rows.
        """
        room = zip(arrays, self._shapes, strict=True)
        return all(len(array) <= shape[0] for array, (shape, _) in room)

    def put(self, arrays: Sequence[np.ndarray]) -> bool:
        """Queue the transfer of ``arrays``; return False, and do nothing, if they do not fit."""
        outbox = Outbox(self.memory.device)
        if not outbox.put(self, arrays):
            return False
        outbox.send()
        return True


class Parcel:
    """Arrays that an outbox sends: ``tensors`` are on the device when it has been sent."""

    __slots__ = ("arrays", "tensors")

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = list(arrays)
        self.tensors: list[torch.Tensor] = []


class Delivery(NamedTuple):
    """``words`` 32-bit words, of those that were sent, for ``target``, which is contiguous.

    They begin at byte ``start``. Without ``places`` they go to its first words, else each to the
    word whose number is at its place in the int32 numbers that begin at byte ``places``.
    """

    target: torch.Tensor
    start: int
    words: int
    places: int | None = None


class Deliverer(Protocol):
    """Puts words to their places in one launch, by a table that is sent with them."""

    def table(self, deliveries: Sequence[Delivery]) -> np.ndarray:
        """What the launch reads, beside the words."""

    def launch(self, words: torch.Tensor, table: torch.Tensor) -> None:
        """Queue it; ``words`` int32 are all that was sent."""


class Outbox:
    """What a step needs on the device, packed and sent in one transfer, and put to its places.

    Places are fixed ones (``put``), numbered words (``write``), or new memory (``add``). All that
    is queued is queued by ``send``, on the current stream. On a CPU nothing is packed.
    """

    #: Whether things are packed on a CPU, too, for tests and measurements.
    packs: ClassVar[bool] = False

    def __init__(self, device: torch.device, deliverer: Deliverer | None = None) -> None:
        """Without a ``deliverer`` operations of torch put things to their places, one by one."""
        self._device = device
        self._deliverer = deliverer
        self._parcels: list[Parcel] = []
        self._puts: list[tuple[torch.Tensor, np.ndarray]] = []
        self._writes: list[tuple[torch.Tensor, np.ndarray, np.ndarray]] = []
        self._then: list[Callable[[], None]] = []

    def add(self, arrays: Sequence[np.ndarray]) -> Parcel:
        """The arrays as tensors; later changes do not reach them after ``send``."""
        parcel = Parcel(arrays)
        self._parcels.append(parcel)
        return parcel

    def put(self, landing: Landing, arrays: Sequence[np.ndarray]) -> bool:
        """Fill a landing, whose arrays are of 32 or 64 bits a number; False if they do not fit."""
        if not landing.fits(arrays):
            return False
        pairs = zip(landing.arrays, arrays, strict=True)
        self._puts += [(tensor, array) for tensor, array in pairs if len(array)]
        return True

    def write(self, target: torch.Tensor, places: np.ndarray, values: np.ndarray) -> None:
        """``target[places[i]] = values[i]``; all int32, and no place twice."""
        if len(places):
            self._writes.append((target, places, values))

    def then(self, call: Callable[[], None]) -> None:
        """Call this when all has been queued."""
        self._then.append(call)

    def send(self) -> None:
        """Send everything."""
        if self._device.type == "cpu" and not self.packs:
            for parcel in self._parcels:
                parcel.tensors = [torch.from_numpy(array.copy()) for array in parcel.arrays]
            for target, array in self._puts:
                target[: len(array)].copy_(torch.from_numpy(array))
            for target, places, values in self._writes:
                index = torch.from_numpy(places.astype(np.int64))
                target[index] = torch.from_numpy(values.copy())
        else:
            self._send()
        for call in self._then:
            call()

    def _send(self) -> None:
        added = [array for parcel in self._parcels for array in parcel.arrays]
        fixed = [array for _, array in self._puts]
        numbered = [array for _, *pair in self._writes for array in pair]
        arrays = [*added, *fixed, *numbered]
        if not arrays:
            return
        starts = _starts([array.nbytes for array in arrays])
        first = iter(starts[len(added) :])
        deliveries = [
            Delivery(target, next(first), array.nbytes // 4) for target, array in self._puts
        ]
        for target, places, _ in self._writes:
            at = next(first)
            deliveries.append(Delivery(target, next(first), len(places), at))
        if deliveries and self._deliverer is not None:
            arrays.append(self._deliverer.table(deliveries))
            starts.append(starts[-1] + arrays[-1].nbytes)
        packed = _packed(arrays, starts, self._device).to(self._device, non_blocking=True)
        # What goes to its place needs no view of its own; each costs some operations of torch.
        views = iter(_views(packed, starts, added))
        for parcel in self._parcels:
            parcel.tensors = [next(views) for _ in parcel.arrays]
        words = packed.view(torch.int32)
        if deliveries and self._deliverer is not None:
            table = arrays[-1]
            self._deliverer.launch(words, _view(packed, starts[-2], table.shape, table.dtype))
        else:
            for each in deliveries:
                _deliver(words, each)


def _deliver(words: torch.Tensor, delivery: Delivery) -> None:
    """As operations of torch."""
    count, places = delivery.words, delivery.places
    target = delivery.target.reshape(-1).view(torch.int32)
    part = words[delivery.start // 4 :][:count]
    if places is None:
        target[:count].copy_(part)
    else:
        target.index_copy_(0, words[places // 4 :][:count].long(), part)


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
    rounded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return list(accumulate(rounded, initial=0))


def _packed(
    arrays: Sequence[np.ndarray], starts: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The bytes of the arrays at their places, in pinned memory for a GPU."""
    size = max(starts[-1], _ALIGNMENT)
    made = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed = made.numpy()
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return made


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


@cache
def _torch_type(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def take(tensor: torch.Tensor, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
    """A copy of some rows of a tensor, without waiting as ``tensor[rows]`` does."""
    (index,) = send([np.array(rows, np.int64)], tensor.device)
    return tensor.index_select(0, index)
