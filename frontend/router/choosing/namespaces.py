"""Namespaces as a router knows them: replicas call an adapter by more than its name."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from coppice.radix.mirror.changes import Change, Opened

# Versions of an adapter that are looked for: what an older one wrote leaves the replicas with it.
_VERSIONS = 8


class Place(NamedTuple):
    """What must be equal for two prompts to share KV: an adapter, a salt and a tenant, or None.

    A request names its adapter; in a replica's namespace the adapter's version is told, too.
    """

    adapter: str | None
    cache_salt: str | None
    tenant: str | None


def place_of(more: Mapping[str, Any]) -> Place:
    """That of a request with the keyword arguments `more`."""
    lora = more.get("lora_request")
    name = None if lora is None else lora.lora_name
    return Place(name, more.get("cache_salt"), more.get("tenant"))


class AdapterVersions:
    """The versions of each adapter that replicas have reported.

    While an adapter is replaced in place a replica has two namespaces of one name. They must be two
    here as well: what is removed from one would else leave the other.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, ...]] = {}  # by name, the latest at the end

    def placed(self, change: Change) -> Change:
        """A replica's change, whose namespace becomes a `Place` with the adapter's version."""
        if not isinstance(change, Opened) or not hasattr(change.namespace, "cache_salt"):
            return change  # it is None, or no engine's
        place = Place(*(getattr(change.namespace, name) for name in Place._fields))
        if place.adapter is not None:
            self._note(place.adapter)
        return change._replace(namespace=_bare(place))

    def _note(self, version: str) -> None:
        name = version.rpartition("@")[0]
        others = [each for each in self._known.get(name, ()) if each != version]
        self._known[name] = (*others[1 - _VERSIONS :], version)

    def places(self, place: Hashable) -> list[Hashable]:
        """Where replicas may hold prompts of a request's place: one for each version.

        An adapter of which no replica has reported a version may be one that tokens invoke. Its
        prompts are with those of the base model.
        """
        if not isinstance(place, Place) or place.adapter is None:
            return [_bare(place) if isinstance(place, Place) else place]
        known = self._known.get(place.adapter) or (None,)
        return [_bare(place._replace(adapter=version)) for version in known]


def _bare(place: Place) -> Place | None:
    """A place; None is that of the base model without a salt and a tenant, as in trees."""
    return place if any(each is not None for each in place) else None
