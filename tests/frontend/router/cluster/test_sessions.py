"""Which replicas an ingress takes, and when it lets go of them, as Serve tells who is there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.frontend.router.cluster import sessions
from coppice.frontend.router.cluster.sessions import Sessions
from coppice.frontend.router.cluster.settings import ClusterSettings

OLD, NEW = ("model", 512), ("model", 100)


class FakeHub:
    """A hub whose replicas have as many requests as `busy` says."""

    name = "hub"

    def __init__(self) -> None:
        self.there: dict[str, bool] = {}  # whether each takes requests
        self.busy: dict[str, Callable[[], object]] = {}  # what is called once it has none
        self.lets_join = threading.Event()
        self.lets_join.set()
        self.refuses: set[str] = set()
        self.asked = list[str]()

    @property
    def names(self) -> list[str]:
        return [name for name, takes in self.there.items() if takes]

    def join(self, name: str, host: str, door: Any) -> None:
        self.asked.append(name)
        assert self.lets_join.wait(10)
        if name in self.refuses:
            raise ValueError(f"replica {name} must be of the same model as the others")
        self.there[name] = True

    def drain(self, name: str, emptied: Callable[[], object]) -> None:
        if name not in self.there:
            emptied()
        elif self.there[name]:
            self.there[name] = False
            self.busy[name] = emptied

    def leave(self, name: str, reason: str) -> None:
        self.there.pop(name, None)


class FakeReplicas:
    """Serve's handle; `open` has the replicas that Serve does not end yet, with their kinds."""

    def __init__(self, **kinds: Any) -> None:
        self.kinds, self.open = kinds, set[str]()
        self.kind = SimpleNamespace(remote=self._kind)
        self.session = SimpleNamespace(remote=self._session)

    def options(self, *, stream: bool) -> FakeReplicas:
        assert stream
        return self

    async def _kind(self, name: str) -> Any:
        await asyncio.sleep(0)
        return self.kinds[name]

    def _session(self, name: str, hub: str) -> Any:
        return FakeStream(self, name)


class FakeStream:
    def __init__(self, replicas: FakeReplicas, name: str) -> None:
        self._open, self._name = replicas.open, name

    async def __aiter__(self) -> AsyncIterator[tuple[str, str]]:
        self._open.add(self._name)
        yield "host", "door"
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self._open.discard(self._name)


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.fixture
async def made(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Makes sessions with such replicas, and what they are tried with."""
    monkeypatch.setattr(sessions, "_PAUSE", 0.01)
    found: list[Sessions] = []

    def make(**kinds: Any) -> Any:
        hub, replicas = FakeHub(), FakeReplicas(**kinds)
        found.append(Sessions(hub, replicas, OLD))  # type: ignore[arg-type]

        async def told(*names: str) -> None:
            found[-1].told(frozenset(names))
            await asyncio.sleep(0.05)

        return SimpleNamespace(hub=hub, replicas=replicas, sessions=found[-1], told=told)

    yield make
    for each in found:
        each.end()
    await asyncio.sleep(0)


async def test_replicas_join_and_drain(made: Any) -> None:
    place = made(a=OLD, b=OLD)
    await place.told("a", "b")
    await place.sessions.known(2)
    assert place.replicas.open == {"a", "b"}
    await place.told("b")
    assert place.hub.names == ["b"]
    assert place.replicas.open == {"a", "b"}, "what runs there ends first"
    place.hub.busy.pop("a")()
    await until(lambda: place.replicas.open == {"b"})
    await place.told()
    assert not place.hub.names, "the last one, too, if nobody comes in its place"


async def test_replicas_of_other_settings_are_left_alone(made: Any) -> None:
    """As in an update that changes the model, which has an ingress of its own."""
    place = made(a=OLD, b=OLD, c=NEW, d=NEW)
    await place.told("a", "b")
    await place.told("b", "c")
    await place.sessions.known(1)
    assert place.hub.names == ["b"]
    assert place.hub.asked.count("c") == 0 and not place.sessions.refused
    await place.told("c")
    await place.told("c", "d")
    assert place.hub.names == ["b"], "requests that come here have nowhere else to go"
    place.sessions.end()
    await until(lambda: not place.replicas.open - {"a"})


async def test_an_ingress_waits_for_replicas_of_its_own(made: Any) -> None:
    place = made(a=NEW, b=OLD)
    await place.told("a")
    known = asyncio.create_task(place.sessions.known(1))
    await asyncio.sleep(0.2)
    assert not known.done()
    await place.told("a", "b")
    await known
    assert place.hub.names == ["b"]


async def test_the_last_one_goes_on_until_the_next_has_joined(made: Any) -> None:
    place = made(a=OLD, b=OLD)
    await place.told("a")
    place.hub.lets_join.clear()
    await place.told("b")  # Serve has started one and ends the other
    assert place.hub.names == ["a"]
    place.hub.lets_join.set()
    await until(lambda: place.hub.names == ["b"])


async def test_one_that_is_refused_is_not_waited_for(made: Any) -> None:
    place = made(a=OLD, b=OLD)
    place.hub.refuses.add("b")
    await place.told("a", "b")
    await place.sessions.known(2)
    assert list(place.sessions.refused) == ["b"]
    await place.told("b")
    assert not place.hub.names
    await place.told()
    assert not place.sessions.refused


async def test_one_that_is_to_end_while_it_joins_leaves(made: Any) -> None:
    """The thread that connects goes on when its session has ended."""
    place = made(a=OLD)
    place.hub.lets_join.clear()
    await place.told("a")
    await until(lambda: place.hub.asked == ["a"])
    await place.told()
    place.hub.lets_join.set()
    await asyncio.sleep(0.1)
    assert not place.hub.there
    assert not place.replicas.open


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"max_model_len": 100}, False),
        ({"enable_prefix_caching": False}, False),
        ({"tokenizer": "demo"}, False),
        ({"lora_modules": ["legal=/legal"]}, False),
        ({"kv_cache_tokens": 8192, "max_stream_delay": 0.2, "replicas": 5}, True),
    ],
)
def test_what_an_ingress_and_its_replicas_have_in_common(
    change: dict[str, Any], same: bool
) -> None:
    before = ClusterSettings.of({"model": "demo", "replicas": 2})
    after = ClusterSettings.of({"model": "demo", "replicas": 2} | change)
    for settings in (before, after):
        assert settings.of_ingress().kind == settings.of_replica().kind == settings.kind
    assert (after.kind == before.kind) is same
