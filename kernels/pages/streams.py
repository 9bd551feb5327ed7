"""The streams of a GPU that copies of pages use: that of the steps, and one of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Event(Protocol):
    """A place in the order of a stream's work."""

    def query(self) -> bool:
        """Whether all work before it is done."""

    def synchronize(self) -> None:
        """Has the host wait until it is."""


class Streams(Protocol):
    """The current stream of a device, on which steps compute, and one for copies.

    Work of one stream runs in the order in which it was queued. That of the other one may run
    before it, after it or at the same time, except where one waits for an event.
    """

    def copying(self) -> AbstractContextManager[object]:
        """Within it the stream for copies is the current one."""

    def record(self) -> Event:
        """An event after all that was queued on the current stream so far."""

    def wait(self, event: Event) -> None:
        """What is queued on the current stream from now on runs after an event."""

    def used(self, tensor: torch.Tensor) -> None:
        """Notes that the current stream uses a tensor that was made on the other one.

        Its memory is given to nobody else before what is queued now has run.
        """


class CudaStreams:
    """Those of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copies)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def used(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


def cuda_streams(device: torch.device) -> Streams:
    """Those of a GPU."""
    return CudaStreams(device)
