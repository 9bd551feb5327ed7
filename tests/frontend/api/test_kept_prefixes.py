"""Which prefixes are kept, for whom, and what gives way."""

from __future__ import annotations

import asyncio
from typing import Any

from coppice.frontend.api import kept_prefixes
from coppice.frontend.api.kept_prefixes import KeptPrefixes, Prefix
from coppice.frontend.errors import EngineStopped
from coppice.runtime.report.snapshot import PinRefused

PROMPT = list(range(100))


class Engine:
    """Takes pins of at most so many tokens in all."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pins: dict[str, tuple[list[int], float]] = {}
        self.stopped = False

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)  # others ask, too
        if self.stopped:
            raise EngineStopped("it does not run")
        if method == "unpin":
            return self.pins.pop(*args, None) is not None
        assert method == "put_pin"
        name, tokens = args
        others = sum(len(pin) for other, (pin, _) in self.pins.items() if other != name)
        if others + len(tokens) > self.room:
            raise PinRefused("no room")
        self.pins[name] = (list(tokens), kwargs["ttl"])
        return None

    def shown(self) -> list[tuple[int, float]]:
        return sorted((len(tokens), ttl) for tokens, ttl in self.pins.values())


async def keep(kept: KeptPrefixes, *wanted: tuple[int, float], **more: Any) -> list[Prefix]:
    given = {"owner": "me", "prompt": PROMPT, "cache_salt": None} | more
    return await kept.keep(
        given["owner"],
        None,
        given["cache_salt"],
        given["prompt"],
        [Prefix(*each) for each in wanted],
    )


async def test_a_longer_prefix_keeps_the_shorter_ones() -> None:
    engine = Engine(1000)
    kept = KeptPrefixes(engine)
    assert await keep(kept, (10, 300), (60, 300), (30, 300)) == [(60, 300), (30, 300), (10, 300)]
    assert engine.shown() == [(60, 300)]
    await keep(kept, (80, 300))
    assert engine.shown() == [(80, 300)]
    await keep(kept, (20, 3600), (90, 300))
    assert engine.shown() == [(20, 3600), (90, 300)]
    await keep(kept, (20, 300), prompt=PROMPT)
    assert engine.shown() == [(20, 3600), (90, 300)], "no time that was promised is cut short"
    await keep(kept, (40, 300), prompt=PROMPT[:40] + [7] * 9, cache_salt="other")
    assert engine.shown() == [(20, 3600), (40, 300), (90, 300)]


async def test_what_does_not_fit() -> None:
    engine = Engine(50)
    kept = KeptPrefixes(engine)
    assert await keep(kept, (80, 300), (40, 300)) == [(40, 300)]
    assert await keep(kept, (45, 300), prompt=[7] * 45) == [(45, 300)]
    assert engine.shown() == [(45, 300)], "the key's older prefix gave way"
    assert await keep(kept, (10, 300), owner="you") == []
    assert engine.shown() == [(45, 300)], "another key's did not"
    assert await keep(kept, (30, 300), (25, 3600)) == [(30, 300)]


async def test_each_key_has_so_many() -> None:
    engine = Engine(10**6)
    kept = KeptPrefixes(engine)
    for number in range(kept_prefixes.MOST + 3):
        await keep(kept, (5, 300), prompt=[number] * 5)
        await keep(kept, (5, 300), prompt=[number] * 5, owner="you")
    assert len(engine.pins) == 2 * kept_prefixes.MOST
    assert min(tokens[0] for tokens, _ in engine.pins.values()) == 3


async def test_they_give_way_the_oldest_first() -> None:
    engine = Engine(1000)
    kept = KeptPrefixes(engine)
    for number in (1, 2, 3):
        await keep(kept, (5, 300), prompt=[number] * 5)
    await keep(kept, (5, 300), prompt=[1] * 5)
    engine.pins.pop(next(name for name, (tokens, _) in engine.pins.items() if tokens[0] == 2))
    assert await kept.give_way(), "the one that has ended by itself makes no room"
    assert [tokens[0] for tokens, _ in engine.pins.values()] == [1]
    assert await kept.give_way()
    assert not await kept.give_way()


async def test_no_request_fails_for_them() -> None:
    engine = Engine(1000)
    engine.stopped = True
    assert await keep(KeptPrefixes(engine), (5, 300)) == []


async def test_requests_of_one_key_may_keep_prefixes_at_the_same_time() -> None:
    engine = Engine(10**6)
    kept = KeptPrefixes(engine)

    async def talk(number: int) -> None:
        prompt = [number, *PROMPT]
        for turn in range(10, 90, 10):
            assert await keep(kept, (turn, 300), prompt=prompt) == [(turn, 300)]

    await asyncio.gather(*map(talk, range(6)))
    assert engine.shown() == [(80, 300)] * 6
    assert list(kept._kept) == list(engine.pins)


async def test_a_prefix_that_the_engine_refuses_is_not_kept() -> None:
    """As one of an adapter that was replaced meanwhile."""

    class Refuses(Engine):
        async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("it is loaded from elsewhere")

    assert await keep(KeptPrefixes(Refuses(100)), (10, 300)) == []
