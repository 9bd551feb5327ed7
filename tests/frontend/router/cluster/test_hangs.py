"""An engine that hangs, and a command that is told to end while there is much to do."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable

import aiohttp
import pytest

from tests.frontend.router.cluster.processes import Cluster
from tests.frontend.router.cluster.traffic import TEXT, Load, complete, report, streamed, until

pytest.importorskip("ray")


async def requests_counted(session: aiohttp.ClientSession, url: str) -> float:
    """The requests of all replicas together, by the metrics."""
    async with session.get(f"{url}/metrics") as response:
        found = re.findall(
            r"^coppice_replica_requests_total\{.*\} (\S+)$", await response.text(), re.M
        )
    assert len(found) == 2
    return sum(map(float, found))


@pytest.mark.slow
async def test_an_engine_that_hangs(
    cluster: Callable[..., Cluster], session: aiohttp.ClientSession
) -> None:
    """For a moment, it goes on; for longer, it is replaced, and what it had is done by others."""
    running = cluster("--replicas", "2")
    url = running.url
    (victim, other) = running.engines

    async def both() -> bool:
        return len((await report(session, url))["replicas"]) == 2

    async def one() -> bool:
        return len((await report(session, url))["replicas"]) == 1

    async with Load(session, url, 6) as load:
        await load.more(10)
        os.kill(victim, signal.SIGSTOP)
        await load.more(20)
        os.kill(victim, signal.SIGCONT)
        await load.more(20)
        await until(both)
        assert set(running.engines) == {victim, other}
        counted = await requests_counted(session, url)
        os.kill(victim, signal.SIGSTOP)
        await load.more(20)
        # What it had counted stays in the metrics; the report does without it.
        assert await requests_counted(session, url) >= counted
        await until(one)
        await load.more(20)
        await until(lambda: victim not in running.pids(), 120)
        await until(lambda: len(running.engines) == 2, 120)
        await until(both)
        await load.more(20)
    assert not load.failures
    assert other in running.engines
    running.stop()


@pytest.mark.slow
async def test_a_stop_under_load(
    cluster: Callable[..., Cluster], session: aiohttp.ClientSession
) -> None:
    """New requests get 503, later ones no connection; what takes too long ends with an error."""
    running = cluster("--replicas", "2", "--drain-grace", "3", "--drain-timeout", "4")
    url = running.url
    begun: list[str] = []
    many = [
        asyncio.create_task(streamed(session, url, f"{TEXT} {n}", begun, n=8)) for n in range(80)
    ]
    await until(lambda: len(begun) >= 4)
    running.process.send_signal(signal.SIGTERM)

    async def draining() -> bool:
        async with session.get(f"{url}/health") as response:
            return response.status == 503

    async def refused() -> bool:
        try:
            async with session.get(f"{url}/health"):
                return False
        except aiohttp.ClientConnectorError:
            return True

    await until(draining)
    answer = await complete(session, url, TEXT)
    assert answer.startswith("503 ") and "the server is stopping" in answer
    await until(refused)
    assert running.process.poll() is None
    assert not all(each.done() for each in many)
    said = await asyncio.to_thread(running.ended)
    assert re.search(r"stopping; requests still running: [1-9]", said)
    ends = await asyncio.gather(*many)
    assert any("the engine was stopped" in end for end in ends)
    # On a busy machine some of them may come after the signal.
    known = ("the engine was stopped", "the server is stopping", "data: [DONE]")
    assert all(any(each in end for each in known) for end in ends), set(ends)
