"""A device without a GPU, whose streams run as late as they may.

Tensors lie in main memory. Operations of torch on them are queued within `SimulatedStreams`, and
what they write is garbage until they run. An operation runs when the host or the other stream waits
for an event after it, or when chance has it run. So what doesn't wait, and should, reads garbage.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_GARBAGE = 0xA5


class SimulatedEvent:
    """Has happened once its stream has come to it."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self.happened = False
        self._streams = streams

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self._streams.run_until(self)


class SimulatedStreams:
    """Stands for `CudaStreams`: "steps", the current stream, and "copies".

    Attributes:
        waits: how often a stream was to wait for an event.
        foreign: addresses of memory of one stream that the other one used, and of which `used` was
            not told yet.
    """

    def __init__(self, rng: random.Random, *, steps_late: bool = True, eager: float = 0.0) -> None:
        """`eager`: the chance that an operation is run after another one was queued.

        Without `steps_late` work on the current stream is done at once.
        """
        self._rng, self._eager, self._steps_late = rng, eager, steps_late
        self._lock = threading.RLock()  # a thread that stores pages waits for them
        self._current = "steps"
        self._queues: dict[str, deque[Callable[[], bool]]] = {"steps": deque(), "copies": deque()}
        self._homes: dict[int, str] = {}  # of memory: the stream on which it was made
        self._kept: list[torch.Tensor] = []  # so that no address comes twice
        self.waits = 0
        self.foreign: set[tuple[int, str]] = set()

    # -- what is tested calls ----------------------------------------------------------------

    @contextmanager
    def copying(self) -> Iterator[None]:
        before, self._current = self._current, "copies"
        try:
            with _Queueing(self):
                yield
        finally:
            self._current = before

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Within it work on the current stream is queued, too."""
        with _Queueing(self):
            yield

    @staticmethod
    def host() -> AbstractContextManager[object]:
        """Within it the host works, at once."""
        return _disable_current_modes()

    def record(self) -> SimulatedEvent:
        event = SimulatedEvent(self)

        def happen() -> bool:
            event.happened = True
            return True

        self.queue(happen)
        return event

    def wait(self, event: SimulatedEvent) -> None:
        self.waits += 1
        self.queue(lambda: event.happened)

    def used(self, tensor: torch.Tensor) -> None:
        self.foreign.discard((_memory(tensor), self._current))

    # -- the device --------------------------------------------------------------------------

    def queue(self, work: Callable[[], bool]) -> None:
        """Queues work, which returns whether it is done; it is tried again if not."""
        queue = self._queues[self._current]
        with self._lock:
            queue.append(work)
            if self._current == "steps" and not self._steps_late:
                while queue:
                    self._one("steps")
            while self._rng.random() < self._eager:
                if not self._one(self._rng.choice(list(self._queues))):
                    break

    def made(self, tensor: torch.Tensor) -> None:
        """Notes on which stream memory was made."""
        self._homes[_memory(tensor)] = self._current
        self._kept.append(tensor)

    def uses(self, tensor: torch.Tensor) -> None:
        """Notes that the current stream uses a tensor."""
        home = self._homes.get(_memory(tensor))
        if home is not None and home != self._current:
            self.foreign.add((_memory(tensor), self._current))

    def run_until(self, event: SimulatedEvent) -> None:
        """Runs the device until an event has happened."""
        with self._lock:
            while not event.happened:
                self._some()

    def finish(self) -> None:
        """Runs all that is queued."""
        with self._lock:
            while any(self._queues.values()):
                self._some()

    def _some(self) -> None:
        """Runs an operation of a stream that does not wait for the other one."""
        assert any(self._one(name) for name in self._shuffled()), "streams wait for each other"

    def _shuffled(self) -> list[str]:
        return self._rng.sample(list(self._queues), 2)

    def _one(self, name: str) -> bool:
        """Runs the first operation of a stream; returns whether there was one that could run.

        With work on the current stream done at once, what it waits for is run before it.
        """
        queue = self._queues[name]
        if not queue:
            return False
        if queue[0]():
            queue.popleft()
            return True
        if name == "steps" and not self._steps_late:
            return self._one("copies")
        return False


class _Queueing(TorchDispatchMode):
    """Queues operations that read or write tensors, instead of doing them."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        schema = function._schema
        tensors = [each for each in tree_leaves((arguments, options)) if torch.is_tensor(each)]
        aliases = [each.alias_info for each in schema.returns if each.alias_info is not None]
        if schema.is_mutable:
            for each in tensors:
                self._streams.uses(each)
            self._queue(lambda: function(*arguments, **options))
            return arguments[0]
        if aliases:  # a view: it reads nothing
            return function(*arguments, **options)
        result = function(*arguments, **options)
        if not torch.is_tensor(result):
            raise NotImplementedError(f"{function} makes the host wait")
        self._streams.made(result)
        if tensors:
            for each in tensors:
                self._streams.uses(each)
            result.reshape(-1).view(torch.uint8).fill_(_GARBAGE)
            self._queue(lambda: result.copy_(function(*arguments, **options)))
        return result

    def _queue(self, work: Callable[[], Any]) -> None:
        def done() -> bool:
            with _disable_current_modes():
                work()
            return True

        self._streams.queue(done)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
