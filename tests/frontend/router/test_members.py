"""Who may join a hub, and what becomes of it when all of its replicas are replaced."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from coppice.frontend.router.choosing.policy import Router
from coppice.frontend.router.members import Members
from coppice.frontend.router.replica import Replica
from coppice.runtime.process.messages import Ready
from coppice.runtime.requests.pooling_recipe import Recipe
from tests.frontend.router.test_hub import TEXTS, text_of, until

READY = Ready("", 512, 50, Recipe(True, "", ""), max_num_seqs=8)


class Silent(Replica):
    """A replica without a connection."""

    def __init__(self, name: str, **more: Any) -> None:
        self.name, self.ready = name, replace(READY, **more)
        self.number, self.draining, self.flights, self.stats = -1, False, set(), None


def test_replicas_of_another_model_may_come_once_the_others_take_no_more() -> None:
    members = Members(Router(), lambda: 0.0)
    old, new, newer = (Silent("old"), *(Silent(name, max_model_len=100) for name in ("a", "b")))
    members.add(old)
    with pytest.raises(ValueError, match="its max_model_len is 100, theirs is 512"):
        members.add(new)
    old.flights.add("still runs")
    members.drain("old", lambda: None)
    members.add(new)
    assert members.model is not None and members.model.max_model_len == 100
    members.remove(old)
    members.add(newer)
    with pytest.raises(ValueError, match="its max_model_len is 512, theirs is 100"):
        members.add(Silent("late"))
    for each in (new, newer):
        members.remove(each)
    members.add(Silent("late"))


def test_the_router_knows_who_keeps_no_prompts() -> None:
    router = Router()
    members = Members(router, lambda: 0.0)
    members.add(Silent("a", caching=False))
    choice = router.choose([1, 2, 3])
    assert choice is not None
    router.send("request", choice, [1, 2, 3])
    router.began("request")
    assert not len(router._promised)
    assert not router._unreported


async def test_a_client_learns_what_other_replicas_are(cluster: Any, replica: Any) -> None:
    client, (first,) = await cluster(1)
    assert client.max_model_len == 512
    other = replica(max_model_len=100)
    first.end()
    await until(lambda: not client.hub.names)
    await asyncio.to_thread(client.hub.join, "other", "127.0.0.1", other.door)
    await until(lambda: client.max_model_len == 100)
    assert await text_of(client, TEXTS[0][:40])
