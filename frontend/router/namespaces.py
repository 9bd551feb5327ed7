"""Namespaces as a router knows them: replicas call an adapter by more than its name."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from coppice.radix.mirror.changes import Change, Opened


def namespace_of(more: Mapping[str, Any]) -> Hashable:
    """The namespace of a request with the keyword arguments `more`, as far as it is known here."""
    lora = more.get("lora_request")
    name = None if lora is None else lora.lora_name
    return name, more.get("cache_salt"), more.get("tenant")


def shared(change: Change) -> Change:
    """A replica's change with the namespace as `namespace_of` gives it: adapters by their names."""
    if isinstance(change, Opened):
        place = change.namespace
        adapter = getattr(place, "adapter", None)
        name = None if adapter is None else adapter.rpartition("@")[0]
        key = (name, getattr(place, "cache_salt", None), getattr(place, "tenant", None))
        return change._replace(namespace=key)
    return change
