"""How many replicas the load asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from coppice.runtime.metrics.events.load import Load

#: The name under which replicas report how busy they are.
BUSY = "coppice_busy"
#: How busy replicas are to be: below 1, so that there is room for a burst.
TARGET = 0.7
#: Seconds of waiting at which a replica counts as busy.
WAIT_SECONDS = 2.0


def busy(load: Load, places: int) -> float:
    """How busy an engine is: 1 is as much as it should have to do.

    The greater of two figures: the share of its places that are taken, waiting requests included;
    and the seconds of work that wait, over `WAIT_SECONDS`.
    """
    taken = (load.running_requests + load.waiting_requests) / places
    rate = load.prefill_tokens_a_second
    ahead = load.waiting_tokens + load.running_tokens
    return max(taken, ahead / rate / WAIT_SECONDS if rate > 0 else 0.0)


def wanted(figures: Iterable[float], current: int) -> int:
    """How many replicas would be `TARGET` busy, if `current` ones are as busy as `figures` say.

    Replicas that have not reported yet count as idle: they are new.
    """
    total = sum(figures)
    return max(1, math.ceil(total / TARGET - 1e-9)) if total > 0 or current else 1


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """The autoscaling policy of Ray Serve: a number of replicas within its bounds, and no state.

    `context` is Serve's `AutoscalingContext`.
    """
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    count = wanted(metrics.get(BUSY, {}).values(), context.current_num_replicas)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(count, low), high), {}
