"""Where events are published and how, and a check of that before a model is loaded."""

from __future__ import annotations

import re
from typing import NamedTuple

_FORMS = ("tcp://HOST:PORT", "tcp://*:PORT", "ipc://PATH")
_GOOD = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[^:/\s]+):(\d{1,5})|ipc://\S+")

#: How a batch of vLLM's is written.
ENCODINGS = ("arrays", "maps")


def check_endpoint(name: str, value: str | None) -> None:
    """Raises ValueError unless `value` is an address that ZeroMQ can bind, or None."""
    if value is None:
        return
    found = _GOOD.fullmatch(value) if isinstance(value, str) else None
    if found is None or (found[2] is not None and not 0 < int(found[2]) < 65536):
        raise ValueError(f"{name} must be {', '.join(_FORMS)} or None, got {value!r}")


class Published(NamedTuple):
    """The engine's options `kv_events_...`.

    Attributes:
        kept_batches: how many are kept to be sent again.
        waiting_batches: how many a listener may lag behind before it loses some, beside what the
            system's own buffers hold.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    exact_topic: str | None = None
    block_size: int = 16
    maps: bool = False
    kept_batches: int = 10_000
    waiting_batches: int = 10_000
