"""Prefixes of prompts that clients ask to keep in the cache for a while, as pins that give way."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from coppice.frontend.errors import EngineStopped
from coppice.runtime.report.snapshot import PinRefused
from coppice.runtime.requests.lora_request import LoRARequest

MOST = 16  # prefixes that are kept for one key at a time


class Asks(Protocol):
    """What is needed of an engine."""

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any: ...


class Prefix(NamedTuple):
    """The beginning of a prompt that is to be kept.

    Attributes:
        tokens: its length.
        seconds: without use, for which it is kept.
    """

    tokens: int
    seconds: float


class _Kept(NamedTuple):
    """A pin: its namespace beside the owner's, its tokens as int32 bytes, and its time."""

    cache_salt: str | None
    tokens: bytes
    seconds: float
    lora_request: LoRARequest | None = None

    def covers(self, other: _Kept) -> bool:
        """Whether the other one need not be kept beside it."""
        return (
            self.cache_salt == other.cache_salt
            and self.lora_request == other.lora_request
            and self.seconds >= other.seconds
            and self.tokens.startswith(other.tokens)
        )


class KeptPrefixes:
    """Pins prefixes for each key, as far as the engine's `pin_budget` allows.

    No request fails for them: a prefix that finds no room takes that of the key's own older ones,
    or is not kept; and one that leaves no room for a request is given up.
    """

    def __init__(self, engine: Asks) -> None:
        self._engine = engine
        self._kept: OrderedDict[str, tuple[str, _Kept]] = OrderedDict()  # name: owner, pin; by use

    async def keep(
        self,
        owner: str,
        tenant: str | None,
        cache_salt: str | None,
        prompt: Sequence[int],
        wanted: Sequence[Prefix],
        lora_request: LoRARequest | None = None,
    ) -> list[Prefix]:
        """Keeps prefixes of a prompt, the longest first; returns those that are kept.

        What is not computed yet is kept as soon as it is. `owner` is the name of the key,
        `lora_request` the adapter that computes the prompt.
        """
        ids = array("i", prompt)
        kept: list[Prefix] = []
        names: set[str] = set()
        for prefix in sorted(wanted, reverse=True):
            if all(each.seconds < prefix.seconds for each in kept):
                part = ids[: prefix.tokens].tobytes()
                pin = _Kept(cache_salt, part, prefix.seconds, lora_request)
                try:
                    name = await self._pin(owner, tenant, pin, names, ids)
                except (EngineStopped, ValueError):  # of the latter, an adapter that was replaced
                    return []
                if name is None:
                    continue
                names.add(name)
            kept.append(prefix)
        return kept

    async def give_way(self) -> bool:
        """Gives up the prefix that was asked for longest ago; False if there is none."""
        while self._kept:
            name, _ = self._kept.popitem(last=False)
            if await self._engine.ask("unpin", name):
                return True
        return False

    async def _pin(
        self,
        owner: str,
        tenant: str | None,
        pin: _Kept,
        beside: Collection[str],
        prompt: Sequence[int],
    ) -> str | None:
        """The name of the pin, which takes no room of those `beside`; None: it finds none."""
        adapter = pin.lora_request
        of = f"{pin.cache_salt!r}{'' if adapter is None else adapter.lora_name}\n"
        secret = of.encode("utf-8", "replace") + pin.tokens
        more: dict[str, Any] = (
            {} if adapter is None else {"lora_request": adapter, "prompt_token_ids": prompt}
        )
        name = f"cache_control {owner} {hashlib.sha256(secret).hexdigest()[:20]}"
        before = self._kept.get(name)
        if before is not None:  # a longer time that was promised is not cut short
            pin = pin._replace(seconds=max(pin.seconds, before[1].seconds))
        tokens = array("i")
        tokens.frombytes(pin.tokens)
        while True:
            try:
                await self._engine.ask(
                    "put_pin", name, tokens, cache_salt=pin.cache_salt, tenant=tenant,
                    ttl=pin.seconds, **more,
                )  # fmt: skip
                break
            except PinRefused:
                others = (each for each in self._of(owner) if each not in {name, *beside})
                oldest = next(others, None)
                if oldest is None:
                    return None
                await self._unpin(oldest)
        self._kept[name] = (owner, pin)
        self._kept.move_to_end(name)
        names = self._of(owner)
        for place, each in enumerate(names):
            if each not in self._kept:  # meanwhile another request has given it up
                continue
            covered = each != name and pin.covers(self._kept[each][1])
            if covered or place < len(names) - MOST:
                await self._unpin(each)
        return name

    def _of(self, owner: str) -> list[str]:
        """The names of the owner's pins, the one that was asked for longest ago first."""
        return [name for name, (whose, _) in self._kept.items() if whose == owner]

    async def _unpin(self, name: str) -> None:
        self._kept.pop(name, None)
        await self._engine.ask("unpin", name)
