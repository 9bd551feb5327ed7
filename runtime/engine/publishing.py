"""What an engine publishes of its cache, if it is asked to."""

from __future__ import annotations

from collections.abc import Callable

from coppice.radix import RadixTree
from coppice.runtime.config import EngineConfig
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.metrics.events.options import Published
from coppice.runtime.metrics.events.publisher import Publisher
from coppice.runtime.metrics.events.stream import KvEvents, Sink
from coppice.runtime.schedule.load import LoadMeter
from coppice.runtime.schedule.scheduler import Scheduler


class Publishing:
    """The events of an engine's tree; all methods do nothing until somebody wants them.

    Attributes:
        when_broken: is called, in any thread, when `flush` is needed though no step is due.
    """

    when_broken: Callable[[], None]

    def __init__(
        self, config: EngineConfig, scheduler: Scheduler, counters: EngineCounters
    ) -> None:
        """Binds the endpoints. Raises ValueError for one that can't be bound."""
        self._scheduler, self._counters = scheduler, counters
        self.when_broken = lambda: None
        self._streams: list[KvEvents] = []
        if config.kv_events_endpoint is not None:
            self._streams.append(_started(config, scheduler, counters, lambda: self.when_broken()))

    def add(self, sink: Sink) -> None:
        """Has `sink` told, too, with the load."""
        meter = LoadMeter(self._scheduler, self._counters)
        self._streams.append(KvEvents(sink, self._scheduler.paging.tree, meter.measure))

    def remove(self, sink: Sink) -> None:
        """Ends that, and closes `sink`."""
        for stream in [each for each in self._streams if each.sink is sink]:
            self._streams.remove(stream)
            stream.close()

    def flush(self) -> None:
        """Has published what has changed since the last call."""
        for stream in self._streams:
            scheduler = self._scheduler
            stream.flush(idle=not (scheduler.running or len(scheduler.waiting)))

    def move_to(self, tree: RadixTree) -> None:
        """Follows a new tree, which is empty."""
        for stream in self._streams:
            stream.move_to(tree)

    def close(self) -> None:
        """Sends what waits, and frees the endpoints."""
        while self._streams:
            self._streams.pop().close()


def _started(
    config: EngineConfig,
    scheduler: Scheduler,
    counters: EngineCounters,
    when_broken: Callable[[], None],
) -> KvEvents:
    assert config.kv_events_endpoint is not None
    published = Published(
        config.kv_events_endpoint,
        config.kv_events_replay_endpoint,
        config.kv_events_topic,
        config.kv_events_exact_topic,
        config.kv_events_block_size,
        config.kv_events_encoding == "maps",
    )
    exact = config.kv_events_exact_topic is not None
    measure = LoadMeter(scheduler, counters).measure if exact else None
    return KvEvents(Publisher(published, when_broken), scheduler.paging.tree, measure)
