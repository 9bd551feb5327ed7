"""What an engine publishes of its cache, if it is asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coppice.radix import RadixTree
from coppice.runtime.config import EngineConfig
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.schedule.load import LoadMeter
from coppice.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:  # its libraries are needed by those alone who ask for events
    from coppice.runtime.metrics.events.stream import KvEvents


class Publishing:
    """The events of an engine's tree; without `kv_events_endpoint` all methods do nothing."""

    def __init__(
        self, config: EngineConfig, scheduler: Scheduler, counters: EngineCounters
    ) -> None:
        """Binds the endpoints. Raises ValueError for one that can't be bound."""
        self._scheduler = scheduler
        self._events = None
        if config.kv_events_endpoint is not None:
            self._events = _started(config, scheduler, counters)

    def flush(self) -> None:
        """Has published what has changed since the last call."""
        if self._events is not None:
            scheduler = self._scheduler
            self._events.flush(idle=not (scheduler.running or len(scheduler.waiting)))

    def move_to(self, tree: RadixTree) -> None:
        """Follows a new tree, which is empty."""
        if self._events is not None:
            self._events.move_to(tree)

    def close(self) -> None:
        """Sends what waits, and frees the endpoints."""
        events, self._events = self._events, None
        if events is not None:
            events.close()


def _started(config: EngineConfig, scheduler: Scheduler, counters: EngineCounters) -> KvEvents:
    assert config.kv_events_endpoint is not None
    try:
        from coppice.runtime.metrics.events.publisher import Publisher
        from coppice.runtime.metrics.events.stream import KvEvents
    except ImportError as error:
        raise ValueError(
            f"kv_events_endpoint is {config.kv_events_endpoint!r}; it needs the packages pyzmq and "
            f"msgspec: pip install 'coppice[events]' ({error})"
        ) from error
    publisher = Publisher(
        config.kv_events_endpoint,
        config.kv_events_replay_endpoint,
        topic=config.kv_events_topic,
        exact_topic=config.kv_events_exact_topic,
        block_size=config.kv_events_block_size,
        maps=config.kv_events_encoding == "maps",
    )
    exact = config.kv_events_exact_topic is not None
    measure = LoadMeter(scheduler, counters).measure if exact else None
    return KvEvents(publisher, scheduler.paging.tree, measure)
