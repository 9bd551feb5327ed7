"""`coppice serve --replicas` for real: Ray, replicas, their ingress; what is killed comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("ray")

TEXT = "Where is the key? The key is under the mat, and the mat is at the door of the house. "
COMMAND = "import sys; from coppice.frontend.commands import main; sys.exit(main.main())"


class Cluster:
    """A command `coppice serve --replicas`, and the processes that come from it."""

    def __init__(self, checkpoint: Path, *options: str) -> None:
        self._mark = f"COPPICE_TEST={uuid.uuid4()}"
        name, value = self._mark.split("=")
        limits = ["--port", "0", "--kv-cache-tokens", "4096", "--max-num-seqs", "8"]
        limits += ["--drain-grace", "0", "--served-model-name", "tiny"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", checkpoint, *limits, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {name: value},
        )
        self.url, self.lines = "", list[str]()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("url "):
                self.url = line.split()[1]
            if line.startswith("report "):
                break
        assert self.url, "".join(self.lines)

    def pids(self, title: str = "") -> list[int]:
        """Its processes that run, of which the command line contains `title`."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(folder.name)
                marked = self._mark.encode() in (folder / "environ").read_bytes()
                if marked and title.encode() in (folder / "cmdline").read_bytes():
                    found.append(pid)
        return found

    @property
    def engines(self) -> list[int]:
        """The processes of the engines: children of the actors of replicas."""
        actors = self.pids("ServeReplica:coppice:replicas")
        return [pid for pid in self.pids("multiprocessing-fork") if parent(pid) in actors]

    def stop(self) -> str:
        """Ends it in order, and checks that nothing is left; returns what it printed."""
        self.process.send_signal(signal.SIGTERM)
        left, _ = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, left
        deadline = time.monotonic() + 20
        while pids := self.pids():
            assert time.monotonic() < deadline, pids
            time.sleep(0.2)
        return "".join(self.lines) + left


def parent(pid: int) -> int:
    """The process that started it; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@pytest.fixture
def cluster(checkpoint: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts one with options of `coppice serve`; ends it if the test has not."""
    made: list[Cluster] = []

    def start(*options: str) -> Cluster:
        made.append(Cluster(checkpoint, *options))
        return made[-1]

    yield start
    for each in made:
        if each.process.poll() is None:
            each.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Without connections that are kept: each request makes its own."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def complete(session: aiohttp.ClientSession, url: str, prompt: str, **more: Any) -> Any:
    """The answer to a completion, or the error's text."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0} | more
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        return (
            answer["choices"][0]["text"]
            if response.status == 200
            else f"{response.status} {answer}"
        )


async def streamed(
    session: aiohttp.ClientSession, url: str, prompt: str, begun: list[str] | None = None
) -> str:
    """The last line of a long stream, which no draft shortens.

    Its prompt is put into `begun` at its first line.
    """
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 2, "stream": True}
    body |= {"ignore_eos": True}
    last = ""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if not last and begun is not None:
                begun.append(prompt)
            last = line.decode().strip() or last
    return last


async def report(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(f"{url}/cache/report") as response:
        return await response.json()


async def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        result = holds()
        if await result if asyncio.iscoroutine(result) else result:
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


class Load:
    """Requests that go on until it is ended; each answer is kept."""

    def __init__(self, session: aiohttp.ClientSession, url: str, clients: int, **more: Any) -> None:
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._ends = False
        self._tasks = [
            asyncio.create_task(self._client(session, url, number, more))
            for number in range(clients)
        ]

    async def _client(self, session: Any, url: str, number: int, more: dict[str, Any]) -> None:
        turn = 0
        while not self._ends:
            turn += 1
            prompt = f"{TEXT * (number % 3 + 1)} {number} {turn % 5}"
            try:
                text = await complete(session, url, prompt, **more)
            except aiohttp.ClientError as error:
                text = f"connection: {error!r}"
            bad = re.match(r"[45]\d\d |connection", text)
            (self.failures if bad else self.answers).append(text)
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        self._ends = True
        await asyncio.gather(*self._tasks)


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
    # An actor of a replica is killed, and with it its engine.
    (victim, *_) = running.pids("ServeReplica:coppice:replicas")
    engines = running.engines
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(set(running.engines) - set(engines)) == 1)
    await until(both, 120)
    await load.end()
    assert not load.failures
    # The ingress is killed: connections wait for the next one.
    (ingress,) = running.pids("ServeReplica:coppice:ingress")
    os.kill(ingress, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert await complete(session, url, TEXT) == first
    assert ingress not in running.pids("ServeReplica:coppice:ingress")
    said = running.stop()
    assert "stopping; requests still running: 0" in said


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
    said = await asyncio.to_thread(running.stop)
    assert re.search(r"stopping; requests still running: [1-9]", said), said
    assert await asyncio.gather(*many) == ["data: [DONE]"] * 40


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


UPDATE = """
import sys, ray
from ray import serve
from coppice.frontend.router import app
ray.init("local", include_dashboard=False, object_store_memory=100 << 20)
serve.start(proxy_location="Disabled")
arguments = {"model": sys.argv[1], "host": "127.0.0.1", "port": int(sys.argv[2]), "replicas": 2,
             "served_model_name": ["tiny"], "max_num_seqs": 8, "replica_cpus": 0.5}
for line in sys.stdin:
    arguments["kv_cache_tokens"] = int(line)
    serve.run(app(arguments), name="coppice", route_prefix=None)
    print("deployed", flush=True)
"""


@pytest.mark.slow
async def test_an_update_fails_no_request(checkpoint: Path, session: aiohttp.ClientSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", UPDATE, checkpoint, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    url = f"http://127.0.0.1:{port}"

    async def deploy(tokens: int) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        print(tokens, file=process.stdin, flush=True)
        while (line := await asyncio.to_thread(process.stdout.readline)) != "deployed\n":
            assert line, "it ended"
        return await report(session, url)

    try:
        before = await deploy(4096)
        load = Load(session, url, 6, max_tokens=30)
        await until(lambda: len(load.answers) > 10)
        await deploy(8192)
        old = {each["name"] for each in before["replicas"]}
        assert len(old) == 2

        async def replaced() -> bool:
            new = await report(session, url)
            names = {each["name"] for each in new["replicas"]}
            return len(names - old) == 2 and new["pool"]["tokens"] == 2 * 8192

        await until(replaced)
        await load.end()
        assert len(load.answers) > 20
        assert not load.failures
    finally:
        process.stdin.close()
        await asyncio.to_thread(process.wait, 60)


def refused(*options: str) -> str:
    """What `coppice serve` says to options that it refuses at once."""
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, "serve", "demo", "--port", "0", *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode != 0
    return ran.stderr + ran.stdout


@pytest.mark.slow
def test_bad_input_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("--replicas", "2", "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in said
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    address = f"127.0.0.1:{port}"
    said = refused("--replicas", "2", "--ray-address", address)
    assert f"ray_address is '{address}', which can't be reached" in said
    said = refused("--replicas", "2", "--replica-cpus", "1000")
    assert "replicas is 2, each with 1000 CPU; the cluster has" in said
