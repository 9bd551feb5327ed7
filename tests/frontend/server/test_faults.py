"""Faults of production: each ends in a clear answer and a clean pool."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from coppice.frontend.api import event_stream
from coppice.frontend.client import lifecycle
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.client.process import EngineProcess
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.config import EngineConfig
from tests.frontend.conftest import iter_until, serving

Start = Callable[[TextEngine], EngineClient]
COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "temperature": 0, "ignore_eos": True, "prompt": "The key", "max_tokens": 8}
# Drafts of what is drawn so freely are not accepted: each token takes a step.
ENDLESS = BODY | {"max_tokens": 480, "temperature": 2}


class Client:
    def __init__(self, session: aiohttp.ClientSession, port: int, engine: EngineClient) -> None:
        self.session, self.port, self.engine = session, port, engine
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, body: Any) -> tuple[int, Any, Any]:
        async with self.session.post(self.url + COMPLETIONS, json=body) as response:
            return response.status, await response.json(), response.headers

    async def until_idle(self) -> None:
        """Waits until nothing runs; then every page is free or cached."""
        for _ in range(4000):
            if not self.engine.running and not await self.engine.ask("has_unfinished"):
                break
            await asyncio.sleep(0.005)
        report = await self.engine.ask("cache_report")
        assert report.pages_held == 0
        assert report.pages_free + report.pages_cached == report.pages_total
        await self.engine.ask("check")


@asynccontextmanager
async def client_of(engine: EngineClient) -> AsyncIterator[Client]:
    async with serving(engine) as (session, port):
        yield Client(session, port, engine)


@pytest.fixture
async def client(text_engine: TextEngine, engine_client: Start) -> AsyncIterator[Client]:
    async with client_of(engine_client(text_engine)) as client:
        yield client


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def exists(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_an_engine_that_is_killed(
    checkpoint: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "FIRST_PAUSE", 0.3)
    config = EngineConfig(
        model=str(checkpoint), kv_cache_tokens=4096, max_num_seqs=8, speculation="off"
    )
    async with client_of(EngineClient(partial(EngineProcess, config), tokenizer)) as client:
        process: Any = client.engine._engine
        running = [asyncio.create_task(client.post(ENDLESS)) for _ in range(3)]
        streamed = await client.session.post(
            client.url + COMPLETIONS, json=ENDLESS | {"stream": True}
        )
        await streamed.content.readany()
        os.kill(process.pid, signal.SIGKILL)
        for status, answer, headers in await asyncio.gather(*running):
            assert status == 503
            assert "the engine died: it was killed by SIGKILL" in answer["error"]["message"]
            assert int(headers["Retry-After"]) > 0
        *_, last, done, _ = (await streamed.read()).decode().split("\n\n")
        assert "killed by SIGKILL" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        status, answer, headers = await client.post(BODY)
        assert (status, answer["error"]["type"]) == (503, "server_error")
        assert int(headers["Retry-After"]) > 0
        async with client.session.get(client.url + "/health") as response:
            assert response.status == 503
            assert "started again" in (await response.json())["status"]
        while not client.engine.alive:
            await asyncio.sleep(0.05)
        assert (await client.post(BODY))[0] == 200
        await client.until_idle()


@pytest.mark.slow
async def test_an_engine_whose_second_rank_is_killed(
    checkpoint: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with its reason, and is started again with all of its ranks."""
    monkeypatch.setattr(lifecycle, "FIRST_PAUSE", 0.3)
    config = EngineConfig(
        model=str(checkpoint), kv_cache_tokens=4096, max_num_seqs=8, tensor_parallel_size=2
    )
    async with client_of(EngineClient(partial(EngineProcess, config), tokenizer)) as client:
        first: Any = client.engine._engine
        (rank,) = children(first.pid)
        expected = (await client.post(BODY))[1]["choices"][0]["text"]
        running = [asyncio.create_task(client.post(ENDLESS)) for _ in range(3)]
        streamed = await client.session.post(
            client.url + COMPLETIONS, json=ENDLESS | {"stream": True}
        )
        await streamed.content.readany()
        os.kill(rank, signal.SIGKILL)
        reason = "rank 1 of the model: its process was killed by SIGKILL"
        for status, answer, headers in await asyncio.gather(*running):
            assert status == 503
            assert answer["error"]["message"].startswith("the engine died: ")
            assert reason in answer["error"]["message"]
            assert int(headers["Retry-After"]) > 0
        *_, last, done, _ = (await streamed.read()).decode().split("\n\n")
        assert reason in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        while not client.engine.alive:
            await asyncio.sleep(0.05)
        second: Any = client.engine._engine
        ended = [first.pid, rank, second.pid, *children(second.pid)]
        assert len(set(ended)) == 4
        status, answer, _ = await client.post(BODY)
        assert (status, answer["choices"][0]["text"]) == (200, expected)
        await client.until_idle()
        assert not any(map(exists, ended[:2]))
    # A rank ends as soon as it sees that its engine has.
    for _ in range(300):
        if any(map(exists, ended)):
            await asyncio.sleep(0.1)
    assert not any(map(exists, ended))


async def test_a_reader_that_is_slow(client: Client) -> None:
    """It gets everything in the end, and delays no other client meanwhile."""
    body = json.dumps(ENDLESS | {"stream": True, "logprobs": 5}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", client.port))
        slow.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        await asyncio.sleep(0.05)
        assert (await client.post(BODY))[0] == 200
        await client.until_idle()  # its pages are given back though it has not read its answer
        slow.setblocking(False)
        loop, received = asyncio.get_running_loop(), b""
        while piece := await loop.sock_recv(slow, 65536):
            received += piece
    assert b"data: [DONE]" in received
    assert b'"finish_reason":"length"' in received


async def test_a_reader_that_stopped(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "STALLED_SECONDS", 0.2)
    many = ENDLESS | {
        "prompt": ["The key", "The fox", "The band", "The hall"],
        "n": 2,
        "logprobs": 5,
    }
    body = json.dumps(many | {"stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stuck.connect(("127.0.0.1", client.port))
        stuck.sendall(head.encode() + body)
        while not client.engine.running:
            await asyncio.sleep(0.01)
        await client.until_idle()
        assert client.engine.running == 0


async def test_a_prompt_of_ten_megabytes(client: Client) -> None:
    """Refused with a reason, after reading no more of it than the model could take."""
    text = "The key is under the mat. " * 400_000
    encoded = []
    encode = client.engine.tokenizer._ids

    def encoding(piece: str, **options: Any) -> list[int]:
        encoded.append(len(piece))
        return encode(piece, **options)

    client.engine.tokenizer._ids = encoding  # type: ignore[method-assign]
    chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    for path, body in (("completions", {"prompt": text}), ("chat/completions", {"messages": chat})):
        url = f"{client.url}/v1/{path}"
        async with client.session.post(url, json={"model": "tiny"} | body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert "context length is 512 tokens. However, your " in error["message"]
        assert f"{next(iter(body))} resulted in more than " in error["message"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == next(iter(body))
    assert len(encoded) == 2
    assert max(encoded) < 20_000
    status, answer, _ = await client.post(BODY | {"prompt": [2**40]})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    status, answer, _ = await client.post(BODY | {"prompt": [1] * 3_000_000})
    assert status == 400


async def test_a_long_text_of_few_tokens(client: Client) -> None:
    """Length in characters is no reason to refuse a prompt."""
    text = "The quick brown fox jumps over the lazy dog while the band plays on " * 20
    tokenizer = client.engine.tokenizer
    longest = len(tokenizer.encode(text))
    tokenizer.check_length("prompt", text, longest)
    for short in (1, longest // 16):
        with pytest.raises(ValueError, match=f"prompt must be shorter than {short} tokens"):
            tokenizer.check_length("prompt", text * 60, short)


async def test_a_body_that_is_too_large(client: Client) -> None:
    status, answer, _ = await client.post(BODY | {"prompt": "a" * (33 * 2**20)})
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


async def test_a_pool_and_a_queue_that_are_full(checkpoint: Path, engine_client: Start) -> None:
    """What does not fit waits; what may not wait is refused, and may come again."""
    text_engine = TextEngine.load(
        EngineConfig(
            model=str(checkpoint), kv_cache_tokens=512, max_num_seqs=4, max_queued_requests=6
        )
    )
    async with client_of(engine_client(text_engine)) as client:
        body = BODY | {"max_tokens": 200}
        results = await asyncio.gather(*(client.post(body) for _ in range(24)))
        statuses = [status for status, _, _ in results]
        assert set(statuses) == {200, 429}
        for status, answer, headers in results:
            if status == 429:
                assert "the queue is full" in answer["error"]["message"]
                assert int(headers["Retry-After"]) > 0
        await client.until_idle()
        assert (await client.post(BODY))[0] == 200


@contextmanager
def server_process(
    checkpoint: Path, *options: str, stderr: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """A `coppice serve` over the checkpoint, which is killed at the end."""
    command = [Path(sys.executable).parent / "coppice", "serve", checkpoint, "--port", "0"]
    command += ["--drain-grace", "0"]
    server = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        yield server
    finally:
        server.kill()
        server.wait()


async def test_sigterm_under_load(checkpoint: Path) -> None:
    """What runs is answered, what comes is refused, and the server ends with 0.

    A load balancer sees that the server is stopping, and why, before the listener is closed.
    """
    limits = ("--kv-cache-tokens", "4096", "--max-num-seqs", "8")
    with server_process(
        checkpoint, *limits, "--log-format", "json", "--drain-grace", "2"
    ) as server:
        assert server.stdout is not None
        lines = await asyncio.to_thread(list, iter_until(server.stdout, "url "))
        url = lines[-1].split()[1]
        body = ENDLESS | {"model": str(checkpoint), "stream": True}
        async with aiohttp.ClientSession() as session:
            streams = [await session.post(url + COMPLETIONS, json=body) for _ in range(12)]
            server.send_signal(signal.SIGTERM)
            status = 200
            while status == 200:
                async with session.get(url + "/health") as response:
                    status, health = response.status, await response.json()
            assert (status, health) == (503, {"status": "the server is stopping"})
            async with session.post(url + COMPLETIONS, json=body) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) > 0
                assert "the server is stopping" in (await response.json())["error"]["message"]
            for stream in streams:
                assert stream.status == 200
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            refused = False
            while not refused:
                try:
                    await session.get(url + "/health/live")
                except aiohttp.ClientError:
                    refused = True
        out, err = await asyncio.to_thread(server.communicate, None, 60)
        assert server.returncode == 0, err
        assert "stopping" in out
        events = [json.loads(line) for line in err.splitlines()]
        ended = [event for event in events if event["event"] == "request"]
        lengths = [event["completion_tokens"] for event in ended if event["status"] == 200]
        assert [length for length in lengths if length] == [480] * 12


@pytest.mark.slow
async def test_what_still_runs_when_the_time_to_drain_is_over_gets_an_error(
    checkpoint: Path,
) -> None:
    """Also the greeting of a server with keys and a name, and the log of what is not HTTP."""
    with server_process(
        checkpoint,
        "--kv-cache-tokens",
        "8192",
        "--drain-timeout",
        "0.05",
        "--log-format",
        "json",
        "--api-key",
        "secret",
        "--served-model-name",
        "small",
    ) as server:
        assert server.stdout is not None
        lines = await asyncio.to_thread(list, iter_until(server.stdout, "report "))
        greeting = dict(line.strip().split(maxsplit=1) for line in lines)
        url = greeting["url"]
        assert greeting["model"] == str(checkpoint)
        assert '-H "Authorization: Bearer $KEY"' in greeting["try"]
        assert "secret" not in greeting["try"]
        assert greeting["report"] == url + "/cache"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        body = ENDLESS | {"model": "small", "stream": True}
        key = {"Authorization": "Bearer secret"}
        async with aiohttp.ClientSession(headers=key) as session:
            streams = [await session.post(url + COMPLETIONS, json=body) for _ in range(12)]
            server.send_signal(signal.SIGTERM)
            texts = [(await stream.read()).decode() for stream in streams]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert "the engine was stopped" in texts[-1]
        _, err = await asyncio.to_thread(server.communicate, None, 60)
        assert server.returncode == 0, err
        events = [json.loads(line) for line in err.splitlines()]
        assert not any("traceback" in event for event in events)
        assert [event["status"] for event in events if event["event"] == "not HTTP"] == [400]
        assert [event["status"] for event in events if event["event"] == "request"] == [200] * 12


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities there")
@pytest.mark.slow
def test_the_server_gives_way_to_its_engine_and_to_the_one_after_that(checkpoint: Path) -> None:
    """An engine that was started by a thread of lower priority would have that, too."""

    def engine() -> int | None:
        found = [
            int(pid)
            for children in Path(f"/proc/{server.pid}/task").glob("*/children")
            for pid in children.read_text().split()
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return found[0] if found else None

    def priority(thread: int) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread)

    with server_process(
        checkpoint, "--kv-cache-tokens", "1024", stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdout is not None
        url = next(line.split()[1] for line in server.stdout if line.startswith("url"))
        mine, first = priority(0), engine()
        assert first is not None and priority(first) == mine
        assert priority(server.pid) == min(19, mine + lifecycle.NICE)
        os.kill(first, signal.SIGKILL)
        for _ in range(300):
            time.sleep(0.1)
            second = engine()
            if second not in (None, first) and httpx.get(url + "/health").status_code == 200:
                break
        assert second not in (None, first) and priority(second) == mine
        assert priority(server.pid) == min(19, mine + lifecycle.NICE)
