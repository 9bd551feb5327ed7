"""How events travel: as vLLM's blocks, and in our own format, both in MessagePack.

vLLM's batch has a time, events and the rank. Each event has the name of its kind and its fields:
as an array, which most routers read, or as a map, which newer versions of vLLM send. Both were read
off `vllm/distributed/kv_events.py`. docs/kv-events.md describes our own format.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import msgspec

from coppice.radix.mirror.blocks import Event, PagesRemoved, PagesStored
from coppice.radix.mirror.changes import Change, Cleared, Cut, Opened, Split, Stored
from coppice.radix.mirror.page_hashes import root_hash
from coppice.radix.namespace import Namespace

#: What vLLM calls the place of blocks that its engine computes with, whatever the device.
MEDIUM = "GPU"
_KINDS: dict[str, type[Change]] = {
    "opened": Opened, "stored": Stored, "split": Split, "cut": Cut, "cleared": Cleared,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _KINDS.items()}
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def block_batch(time: float, events: Iterable[Event], block_size: int, *, maps: bool) -> bytes:
    """A batch of vLLM's; `maps`: as newer versions of vLLM write it."""
    made = [_block_event(event, block_size) for event in events]
    if maps:
        return _pack({"ts": time, "events": made, "data_parallel_rank": 0})
    return _pack([time, [list(event.values()) for event in made], 0])


def _block_event(event: Event, block_size: int) -> dict[str, Any]:
    """The fields of an event in vLLM's order; of those with a default only what differs from it."""
    if isinstance(event, PagesStored):
        namespace = event.namespace
        first = event.parent_hash == root_hash(namespace, 0)
        tokens = array("i", event.tokens)
        fields: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": None if first else event.parent_hash,
            "token_ids": tokens.tolist(),
            "block_size": block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": _adapter_name(namespace),
        }
        keys = _extra_keys(namespace)
        if keys is not None:
            fields["extra_keys"] = [keys] * len(event.hashes)
        return fields
    if isinstance(event, PagesRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": MEDIUM}
    return {"type": "AllBlocksCleared"}


def _adapter_name(namespace: Hashable) -> str | None:
    """As requests name it; in a namespace the adapter's version follows."""
    adapter = getattr(namespace, "adapter", None)
    return None if adapter is None else adapter.rpartition("@")[0] or adapter


def _extra_keys(namespace: Hashable) -> list[str] | None:
    """What tells blocks of this namespace from others with the same tokens.

    A digest, since a salt or the name of a tenant may be a secret. It is another one for each
    version of an adapter.
    """
    if not isinstance(namespace, Namespace) or not any(namespace[1:]):
        return None
    return [f"{root_hash(namespace, 0):016x}"]


def change_batch(time: float, instance: str, items: Sequence[Any]) -> bytes:
    """A batch of our own: `items` are of `change_item` and `load_item`."""
    return _pack([time, instance, items])


def change_item(change: Change) -> list[Any]:
    """A change as it travels: its kind and fields; a namespace by its key."""
    if isinstance(change, Opened):
        namespace = change.namespace
        adapter = getattr(namespace, "adapter", None)
        return ["opened", change.node, namespace_key(namespace), adapter]
    return [_NAMES[type(change)], *change]


def load_item(load: Any) -> list[Any]:
    """A load as it travels."""
    return ["load", load._asdict()]


def namespace_key(namespace: Hashable) -> int:
    """What stands for a namespace in our own format, equal in every process."""
    return root_hash(namespace, 0)


def read_changes(batch: bytes) -> tuple[float, str, list[Change | dict[str, Any]]]:
    """Time, instance, and changes of a batch; a load comes as a dict.

    Namespaces are their keys (`namespace_key`). Raises ValueError for what is no batch.
    """
    try:
        time, instance, items = _unpack(batch)
        found: list[Change | dict[str, Any]] = []
        for name, *fields in items:
            if name == "load":
                found.append(fields[0])
            elif name == "opened":
                found.append(Opened(fields[0], fields[1]))
            else:
                found.append(_KINDS[name](*fields))
    except (msgspec.DecodeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"batch: it is no batch of changes: {error}") from None
    return time, instance, found
