"""Packed pages on their way between a cache and main memory, beside the steps of an engine.

On a GPU a stream of its own crosses the bus, and nothing else:

    out    steps    gather the pages  ->  ... the next step may overwrite them
           copies                     ->  to main memory   ->  `ready`
    fill   copies   layer 0 | layer 1 | ...  to the device, an event after each
           steps    layer 0: wait, put its part into the pages, compute | layer 1: wait, put ...

Pages are read and written on the stream of the steps alone, whose order is that of the calls here.
So no page is read before it was filled, or overwritten before it was read, whatever the other
stream does; a step only has to fill what it touches, and waits for no layer before it needs it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.pages.packing import (
    HostBlocks,
    gather,
    host_rows,
    layer_bytes,
    pack,
    put,
    unpack,
)
from coppice.kernels.pages.streams import Event, Streams, cuda_streams
from coppice.kernels.transfer import send

#: Layers' parts of pages are gathered on the device, at most this many bytes at once.
_GATHERED = 256 * 2**20


class Staged(NamedTuple):
    """Packed pages in main memory, ready to be copied to a cache.

    Attributes:
        parts: uint8 ``[pages, bytes]``: one for all layers; for a GPU one for each, pinned.
        whole: of a divided model, the pages with the parts of all ranks; else None.
    """

    parts: Sequence[torch.Tensor]
    whole: torch.Tensor | None = None


class StagedRows(NamedTuple):
    """Some neighbouring pages of a `Staged`."""

    staged: Staged
    first: int
    size: int


class Copied(NamedTuple):
    """Packed pages that were copied to main memory, uint8 ``[count, page_bytes]``.

    `ready` waits until they are there, and raises what fails; it is called once, in any thread.
    None: they are.
    """

    rows: torch.Tensor
    ready: Callable[[], None] | None


class PageTransfers:
    """Copies pages of a cache in main memory, at once; and the interface for all devices.

    One thread calls it, except for `room` and `stage`.

    Attributes:
        marks: of other ranks' parts of pages, see `mark`; empty for a model that is not divided.
    """

    marks: Sequence[bytes] = ()

    def __init__(self, caches: Callable[[], Sequence[LayerCache]]) -> None:
        """`caches` gives the tensors of the pages, which may be others after `forget`."""
        self._caches = caches
        layers = caches()
        self._widths = [layer_bytes(layer) for layer in layers]
        self._device = layers[0].k.device

    @property
    def page_bytes(self) -> int:
        """Bytes of a packed page."""
        return sum(self._widths)

    def mark(self) -> bytes:
        """A digest, 16 bytes, of what packed pages need beside themselves: the scales."""
        state = hashlib.blake2b(digest_size=16)
        for layer in self._caches():
            for scale in layer.scales or ():
                state.update(scale.detach().cpu().float().contiguous().numpy().tobytes())
        return state.digest()

    def room(self, count: int) -> torch.Tensor:
        """Memory that pages can be read to, uint8 ``[count, page_bytes]``. In any thread.

        Raises MemoryError if there is none.
        """
        return host_rows(count, self.page_bytes, torch.device("cpu"))

    def stage(self, rows: torch.Tensor) -> Staged:
        """Packed pages, uint8 ``[count, page_bytes]``, as `fill` takes them. In any thread."""
        return Staged([rows])

    def out(self, pages: Sequence[int], into: torch.Tensor | None = None) -> list[Copied]:
        """Pages as they are after all that was queued so far, in pieces that follow each other.

        They are copied to `into`, uint8 ``[len(pages), page_bytes]``, if given. The pages may be
        overwritten by what is queued from now on.
        """
        if into is None:
            into = host_rows(len(pages), self.page_bytes, self._device)
        pack(self._caches(), pages, into)
        return [Copied(into, None)]

    def fill(self, pages: Sequence[int], rows: Sequence[StagedRows]) -> None:
        """Fills pages with what follows each other in `rows`.

        Everything that reads or writes them after that calls `needed` or `layers` before.
        """
        caches, begin = self._caches(), 0
        for staged, first, size in rows:
            part = staged.parts[0][first : first + size]
            unpack(caches, pages[begin : begin + size], part)
            begin += size

    def needed(self, pages: Sequence[int] | np.ndarray) -> None:
        """Has what is queued from now on find these pages filled."""

    def layers(self, pages: Sequence[int] | np.ndarray) -> Sequence[LayerCache]:
        """The caches for a step over these pages; each layer is filled when it is asked for."""
        return self._caches()

    def settle(self) -> None:
        """Fills pages whose content has come, for which nothing has to wait."""

    def forget(self) -> None:
        """Fills nothing of what is on its way: the caches will be others."""


@dataclass(slots=True)
class _Arrival:
    """Pages whose content is on its way.

    `parts` and `came`: of each layer the bytes on the device, and the event after their copy.
    `filled`: the first layers that are in the pages, for all that is queued from now on.
    """

    pages: np.ndarray
    index: torch.Tensor
    parts: list[torch.Tensor]
    came: list[Event]
    filled: int = 0


class DeviceTransfers(PageTransfers):
    """Copies pages of a GPU on a stream of its own."""

    def __init__(
        self, caches: Callable[[], Sequence[LayerCache]], streams: Streams | None = None
    ) -> None:
        """`streams`: None: those of the caches' GPU."""
        super().__init__(caches)
        self._streams = cuda_streams(self._device) if streams is None else streams
        self._pages = len(caches()[0].k)
        self._blocks = HostBlocks(self.page_bytes, self._device)
        self._arrivals: deque[_Arrival] = deque()  # in the order in which pages were filled

    def stage(self, rows: torch.Tensor) -> Staged:
        # Layers are copied one after another, so each lies in one piece. Torch gives pinned memory
        # to nobody else before the copies from it are done, and keeps it then: of each power of two
        # up to the largest read, the most that was in use at any time. Rows of one read are not
        # freed in the order of reads, so that parts of blocks would be held for longer.
        memory = host_rows(1, len(rows) * self.page_bytes, self._device)[0]
        parts, begin, at = list[torch.Tensor](), 0, 0
        for width in self._widths:
            size = len(rows) * width
            part = memory[begin : begin + size].view(len(rows), width)
            part.copy_(rows[:, at : at + width])
            parts.append(part)
            begin, at = begin + size, at + width
        return Staged(parts)

    def out(self, pages: Sequence[int], into: torch.Tensor | None = None) -> list[Copied]:
        self.needed(pages)
        caches, streams = self._caches(), self._streams
        [index] = send([np.array(pages, np.int64)], self._device)
        most = max(1, _GATHERED // self.page_bytes)
        copied = list[Copied]()
        for begin in range(0, len(pages), most):
            part = index[begin : begin + most]
            shape = (len(part), self.page_bytes)
            gathered = torch.empty(shape, dtype=torch.uint8, device=self._device)
            gather(caches, part, gathered)
            there, at = streams.record(), 0
            with streams.copying():
                streams.wait(there)
                for rows in self._blocks.rows(len(part)):
                    rows.copy_(gathered[at : at + len(rows)], non_blocking=True)
                    ready = streams.record().synchronize
                    if into is not None:  # which is not pinned
                        pinned, rows = rows, into[begin + at : begin + at + len(rows)]
                        ready = partial(_copy_when, ready, pinned, rows)
                    at += len(rows)
                    copied.append(Copied(rows, ready))
                streams.used(gathered)
        return copied

    def fill(self, pages: Sequence[int], rows: Sequence[StagedRows]) -> None:
        streams = self._streams
        [index] = send([np.array(pages, np.int64)], self._device)
        arrival = _Arrival(np.array(pages, np.int64), index, [], [])
        with streams.copying():
            for layer, width in enumerate(self._widths):
                shape = (len(pages), width)
                part = torch.empty(shape, dtype=torch.uint8, device=self._device)
                begin = 0
                for staged, first, size in rows:
                    source = staged.parts[layer][first : first + size]
                    part[begin : begin + size].copy_(source, non_blocking=True)
                    begin += size
                arrival.parts.append(part)
                arrival.came.append(streams.record())
        self._arrivals.append(arrival)

    def coming(self) -> set[int]:
        """Pages whose content is on its way, and is put into them when they are needed."""
        return {page for each in self._arrivals for page in each.pages.tolist()}

    def _touched(self, pages: Sequence[int] | np.ndarray) -> list[_Arrival]:
        """Of what is on its way, all up to the last one with one of these pages.

        What came for a page before is always put into it before what came later.
        """
        if not self._arrivals:
            return []
        marked = np.zeros(self._pages, bool)
        marked[np.asarray(pages, np.int64)] = True
        touched = [bool(marked[each.pages].any()) for each in self._arrivals]
        last = max((at for at, each in enumerate(touched) if each), default=-1)
        return list(self._arrivals)[: last + 1]

    def _fill(self, arrival: _Arrival, layers: int) -> None:
        """Puts the first `layers` layers of what comes into its pages, once they are there."""
        caches, streams = self._caches(), self._streams
        while arrival.filled < layers:
            layer = arrival.filled
            streams.wait(arrival.came[layer])
            part = arrival.parts[layer]
            put(caches[layer], arrival.index, part)
            streams.used(part)
            arrival.filled += 1
        if arrival.filled == len(self._widths) and arrival is self._arrivals[0]:
            self._arrivals.popleft()

    def needed(self, pages: Sequence[int] | np.ndarray) -> None:
        for arrival in self._touched(pages):
            self._fill(arrival, len(self._widths))

    def layers(self, pages: Sequence[int] | np.ndarray) -> Sequence[LayerCache]:
        caches = self._caches()
        if not (touched := self._touched(pages)):
            return caches

        def fill(layer: int) -> None:
            for arrival in touched:
                self._fill(arrival, layer + 1)

        return _FilledLayers(caches, fill)

    def settle(self) -> None:
        while self._arrivals and self._arrivals[0].came[-1].query():
            self._fill(self._arrivals[0], len(self._widths))

    def forget(self) -> None:
        self._arrivals.clear()


def _copy_when(ready: Callable[[], None], source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies rows once they are there."""
    ready()
    target.copy_(source)


class _FilledLayers(Sequence[LayerCache]):
    """Caches of all layers, each of which is filled when it is taken."""

    def __init__(self, caches: Sequence[LayerCache], fill: Callable[[int], None]) -> None:
        self._caches, self._fill = caches, fill

    def __len__(self) -> int:
        return len(self._caches)

    def __getitem__(self, layer):  # type: ignore[no-untyped-def]
        if isinstance(layer, slice):
            return [self[each] for each in range(*layer.indices(len(self)))]
        self._fill(range(len(self))[layer])
        return self._caches[layer]

    def __iter__(self) -> Iterator[LayerCache]:
        for layer in range(len(self)):
            yield self[layer]


def page_transfers(caches: Callable[[], Sequence[LayerCache]]) -> PageTransfers:
    """The transfers for the device on which a cache lies."""
    cuda = caches()[0].k.is_cuda
    return DeviceTransfers(caches) if cuda else PageTransfers(caches)
