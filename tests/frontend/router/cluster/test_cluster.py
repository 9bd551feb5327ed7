"""`coppice serve --replicas` for real: Ray, replicas, their ingress; what is killed comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from transformers import AutoModelForCausalLM

from tests.frontend.router.cluster.processes import Cluster, refused
from tests.frontend.router.cluster.traffic import TEXT, Load, complete, report, streamed, until
from tests.runtime.helpers.adapter_files import save_adapter

pytest.importorskip("ray")


async def test_replicas_answer_die_and_come_back(
    cluster: Callable[..., Cluster], session: aiohttp.ClientSession
) -> None:
    running = cluster("--replicas", "2", "--max-model-len", "500")
    url = running.url
    first = await complete(session, url, TEXT)

    async def hit() -> bool:
        assert await complete(session, url, TEXT) == first
        told = await report(session, url)
        assert len(told["replicas"]) == 2
        return told["counts"]["since_start"]["hit_tokens"] > 0

    await until(hit)
    async with session.get(f"{url}/metrics") as response:
        metrics = await response.text()
    assert len(re.findall(r"coppice_replica_requests_total\{", metrics)) == 2
    # One engine is killed under load: nothing that had not begun to be shown is lost.
    load = Load(session, url, 6, max_tokens=40, ignore_eos=True)
    streams = [asyncio.create_task(streamed(session, url, f"{TEXT} {n}")) for n in range(4)]
    await until(lambda: len(load.answers) > 10)
    (victim, *_) = running.engines
    os.kill(victim, signal.SIGKILL)
    for line in await asyncio.gather(*streams):
        assert line == "data: [DONE]" or "ended" in line, line
    before = len(load.answers)
    await until(lambda: len(load.answers) > before + 20)

    async def both() -> bool:
        return len((await report(session, url))["replicas"]) == 2

    await until(both, 120)
    assert victim not in running.engines
    await load.end()
    assert not load.failures
    # The ingress is killed: connections wait for the next one.
    (ingress,) = running.ingresses
    os.kill(ingress, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert await complete(session, url, TEXT) == first
    assert ingress not in running.ingresses
    said = running.stop()
    assert "stopping; requests still running: 0" in said


@pytest.mark.slow
async def test_a_replica_is_killed_with_its_engine(
    cluster: Callable[..., Cluster], session: aiohttp.ClientSession
) -> None:
    running = cluster("--replicas", "2", "--max-model-len", "500")
    load = Load(session, running.url, 6, max_tokens=40, ignore_eos=True)
    await until(lambda: len(load.answers) > 10)
    (victim, *_) = running.replicas  # Ray's actor
    engines = running.engines
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(set(running.engines) - set(engines)) == 1)

    async def both() -> bool:
        return len((await report(session, running.url))["replicas"]) == 2

    await until(both, 120)
    await load.end()
    assert not load.failures
    running.stop()


@pytest.mark.slow
async def test_a_replica_that_joins_has_the_adapters_that_the_others_have(
    cluster: Callable[..., Cluster],
    session: aiohttp.ClientSession,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """Those of the options were exchanged over HTTP for another one, which got the same number."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    legal = save_adapter(tmp_path / "legal", model, seed=1)
    medical = save_adapter(tmp_path / "medical", model, seed=2)
    options = ("--replicas", "2", "--max-model-len", "500", "--max-loras", "1")
    running = cluster(*options, "--lora-modules", f"legal={legal}")
    url = running.url
    before = await complete(session, url, TEXT, model="legal")
    for verb, body in (
        ("unload", {"lora_name": "legal"}),
        ("load", {"lora_name": "medical", "lora_path": str(medical)}),
    ):
        async with session.post(f"{url}/v1/{verb}_lora_adapter", json=body) as response:
            assert response.status == 200, await response.text()
    answer = await complete(session, url, TEXT, model="medical")
    assert answer != before
    engines = running.engines
    os.kill(running.replicas[0], signal.SIGKILL)
    await until(lambda: len(set(running.engines) - set(engines)) == 1)

    async def both() -> bool:
        return len((await report(session, url))["replicas"]) == 2

    await until(both, 120)
    async with Load(session, url, 12, model="medical", max_tokens=40) as load:
        await until(lambda: len(load.answers) > 60)
    assert not load.failures
    assert await complete(session, url, TEXT, model="medical") == answer
    assert "404" in await complete(session, url, TEXT, model="legal")
    running.stop()


@pytest.mark.slow
async def test_the_load_decides_how_many_there_are(
    cluster: Callable[..., Cluster], session: aiohttp.ClientSession
) -> None:
    running = cluster(
        *("--replicas", "1", "--max-replicas", "3", "--replica-cpus", "0.5"),
        *("--upscale-delay", "1", "--downscale-delay", "3"),
    )
    assert len(running.engines) == 1
    load = Load(session, running.url, 24, max_tokens=200, ignore_eos=True)
    await until(lambda: len(running.engines) == 3, 90)
    await load.end()
    assert load.answers
    light = Load(session, running.url, 1, max_tokens=4)
    await until(lambda: len(running.engines) == 1, 120)
    await light.end()
    assert not load.failures
    assert not light.failures
    running.stop()


@pytest.mark.slow
async def test_a_stop_lets_streams_end(
    cluster: Callable[..., Cluster], session: aiohttp.ClientSession
) -> None:
    running = cluster("--replicas", "1")
    begun: list[str] = []
    many = [
        asyncio.create_task(streamed(session, running.url, f"{TEXT} {n}", begun)) for n in range(40)
    ]
    await until(lambda: len(begun) >= 4)
    had_begun = set(begun)
    said = await asyncio.to_thread(running.stop)
    assert re.search(r"stopping; requests still running: [1-9]", said), said
    for n, last in enumerate(await asyncio.gather(*many)):
        if last != "data: [DONE]":  # on a busy machine it may come after the signal
            assert "the server is stopping" in last
            assert f"{TEXT} {n}" not in had_begun


JOINED = """
import sys, ray
ray.init("local", include_dashboard=False, object_store_memory=100 << 20)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
async def test_a_cluster_is_joined_and_a_model_divided(
    cluster: Callable[..., Cluster],
    session: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would have to be handed on
    alone = cluster("--replicas", "1")
    wanted = await complete(session, alone.url, TEXT)
    alone.stop()
    there = subprocess.Popen(
        [sys.executable, "-c", JOINED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert there.stdin is not None
    assert there.stdout is not None
    try:
        address = there.stdout.readline().strip()
        for _ in range(2):  # it leaves the cluster as it was
            running = cluster(
                *("--replicas", "1", "--ray-address", address),
                *("--tensor-parallel-size", "2", "--replica-cpus", "2"),
            )
            assert await complete(session, running.url, TEXT) == wanted
            said = await asyncio.to_thread(refused, "--replicas", "1", "--ray-address", address)
            assert "an application 'coppice' runs already; end that one first" in said
            running.stop()
        # What can't be started leaves nothing in the cluster.
        bad = ("--replicas", "1", "--ray-address", address, "--replica-cpus", "1")
        said = await asyncio.to_thread(refused, *bad, "--tensor-parallel-size", "64")
        assert "could not be started: " in said, said
        assert "tensor_parallel_size" in said, said
        cluster("--replicas", "1", "--ray-address", address).stop()
        assert there.poll() is None
    finally:
        there.stdin.close()
        there.wait(60)
