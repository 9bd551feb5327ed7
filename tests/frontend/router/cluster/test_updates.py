"""Serve deploys an application again and kills nothing; what is killed does not take the socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.frontend.router.cluster.processes import Family, free_port
from tests.frontend.router.cluster.traffic import TEXT, Load, complete, report, until

pytest.importorskip("ray")

SCRIPT = """
import json, sys, ray
from ray import serve
from coppice.frontend.router import app
ray.init("local", include_dashboard=False, object_store_memory=100 << 20)
serve.start(proxy_location="Disabled")
arguments = json.loads(sys.argv[1])
for line in sys.stdin:
    arguments |= json.loads(line)
    try:
        serve.run(app(arguments), name="coppice", route_prefix=None)
    except RuntimeError:
        print("failed", flush=True)
    else:
        print("deployed", flush=True)
"""


class Deployments(Family):
    """An application on a Ray of its own, which is deployed with one set of options after another.

    No command of ours runs: the ingress gets its listening socket from the `Door`.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        arguments = {"model": str(checkpoint), "host": "127.0.0.1", "port": port, "replicas": 2}
        arguments |= {
            "log_level": "warning",
            "served_model_name": ["tiny"],
            "max_num_seqs": 8,
            "replica_cpus": 0.5,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environ,
        )

    async def deploy(self, outcome: str = "deployed", **options: Any) -> None:
        """Deploys it with these options beside those that it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(options), file=self._process.stdin, flush=True)
        while (line := await asyncio.to_thread(self._process.stdout.readline)) != f"{outcome}\n":
            assert line not in ("", "deployed\n", "failed\n"), line

    async def end(self) -> None:
        """Ends Ray, and checks that nothing is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.to_thread(self._process.wait, 60)
        await asyncio.to_thread(self.check_gone)


@pytest.fixture
async def deployments(checkpoint: Path) -> AsyncIterator[Deployments]:
    made = Deployments(checkpoint)
    yield made
    await made.end()


async def names(session: aiohttp.ClientSession, url: str) -> set[str]:
    """Of the replicas that take requests."""
    return {each["name"] for each in (await report(session, url))["replicas"]}


@pytest.mark.slow
async def test_an_update_fails_no_request(
    deployments: Deployments, session: aiohttp.ClientSession
) -> None:
    """An option of the ingress changes, then one of replicas; each time Serve replaces both.

    Meanwhile there are requests on connections of their own, requests on one connection, and long
    streams.
    """
    url = deployments.url
    await deployments.deploy()
    async with (
        aiohttp.ClientSession() as keeping,
        Load(session, url, 5, max_tokens=30) as load,
        Load(keeping, url, 2, max_tokens=30) as kept,
        Load(session, url, 3, stream=True) as streams,
    ):
        for change in ({"max_stream_delay": 0.2}, {"kv_cache_tokens": 8192}):
            await load.more(10)
            await kept.more(3)
            await streams.more(3)
            replicas, (ingress,) = await names(session, url), deployments.ingresses
            assert len(replicas) == 2
            await deployments.deploy(**change)

            async def replaced(old: set[str] = replicas, ingress: int = ingress) -> bool:
                now, there = await names(session, url), deployments.ingresses
                return len(now) == 2 and not now & old and len(there) == 1 and ingress not in there

            await until(replaced)
        await load.more(10)
        await kept.more(3)
        await streams.more(3)
    assert not load.failures + kept.failures + streams.failures


@pytest.mark.slow
async def test_an_update_to_which_old_replicas_do_not_belong_fails_no_request(
    deployments: Deployments, session: aiohttp.ClientSession
) -> None:
    """The next ingress waits for the first of the new replicas; the old ones keep theirs."""
    url = deployments.url

    async def longest() -> int:
        async with session.get(f"{url}/v1/models") as response:
            return int((await response.json())["data"][0]["max_model_len"])

    await deployments.deploy()
    assert await longest() == 512
    async with (
        Load(session, url, 5, max_tokens=30) as load,
        Load(session, url, 3, stream=True, max_tokens=100) as streams,
    ):
        await load.more(10)
        await streams.more(3)
        replicas, (ingress,) = await names(session, url), deployments.ingresses
        await deployments.deploy(max_model_len=450)

        async def replaced() -> bool:
            now, there = await names(session, url), deployments.ingresses
            return len(now) == 2 and not now & replicas and len(there) == 1 and ingress not in there

        await until(replaced)
        assert await longest() == 450
        await load.more(10)
        await streams.more(3)
    assert not load.failures + streams.failures


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_an_update_that_can_not_start_leaves_what_runs(
    deployments: Deployments, session: aiohttp.ClientSession
) -> None:
    """Ingresses load adapters, and take replicas of their own settings only: none may be left."""
    url, short = deployments.url, {"drain_grace": 0, "drain_timeout": 1}
    await deployments.deploy(**short)
    replicas = await names(session, url)
    async with Load(session, url, 2, max_tokens=30) as load:
        await load.more(3)
        await deployments.deploy("failed", lora_modules=["legal=/is/not/there"])
        await asyncio.sleep(12)  # until Serve would have killed what it had told to end
        await load.more(10)
    assert not load.failures
    left = await names(session, url)  # Serve has ended one to make room
    assert left and left <= replicas


@pytest.mark.slow
async def test_connections_wait_at_the_door_for_the_next_ingress(
    deployments: Deployments, session: aiohttp.ClientSession
) -> None:
    """The ingress is killed twice under load: what it had fails, and no connection is refused."""
    url = deployments.url
    await deployments.deploy()
    first = await complete(session, url, TEXT)
    for _ in range(2):
        async with Load(session, url, 6, max_tokens=30) as load:
            await load.more(10)
            (ingress,) = deployments.ingresses
            os.kill(ingress, signal.SIGKILL)
            await load.more(20)
        assert all("refused" not in text for _, text in load.failures)
        # One request of each client was on its way; the next one of each waited.
        assert max(Counter(number for number, _ in load.failures).values(), default=0) <= 1
        assert await complete(session, url, TEXT) == first
        assert ingress not in deployments.ingresses
