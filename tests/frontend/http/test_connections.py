"""Requests that are sent in part: they do not hold a connection for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.server.application import Server
from coppice.frontend.text.engine import TextEngine

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.slow
async def test_half_of_a_request(
    text_engine: TextEngine, engine_client: Callable[[TextEngine], EngineClient]
) -> None:
    engine = engine_client(text_engine)
    await engine.start()
    server = Server(engine, "tiny", ServerOptions(header_timeout=0.4, body_timeout=0.4))
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    assert runner.server is not None
    watching = asyncio.create_task(server.connections.watch(runner.server))
    port = runner.addresses[0][1]

    async def answer(data: bytes) -> bytes:
        """All that comes after these bytes until the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        received = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return received

    nothing, headers, body, chunks = await asyncio.gather(
        answer(b""),
        answer(HEAD),
        answer(HEAD + b'Connection: close\r\nContent-Length: 99\r\n\r\n{"model": "tiny", '),
        answer(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\r\n"),
    )
    assert nothing == headers == b""
    for late in (body, chunks):
        assert late.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within 0.4 s (body_timeout)" in late

    # A connection that was used may rest, and an answer may take longer.
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(2):
        writer.write(health)
        status = await reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(len(b'{"status": "ok"}'))
        await asyncio.sleep(1.0)
    writer.close()
    watching.cancel()
    await runner.cleanup()
    await engine.stop()


async def test_closed_connections_are_forgotten() -> None:
    from coppice.frontend.http.connections import Connections

    connections = Connections(100.0)

    class Listening:
        connections: list[Any] = []  # noqa: RUF012

    listening: Any = Listening()
    connections._used.add("gone")  # type: ignore[arg-type]
    connections._since["gone too"] = 0.0  # type: ignore[index]
    watching = asyncio.create_task(connections.watch(listening))
    while connections._used or connections._since:
        await asyncio.sleep(0.05)
    watching.cancel()
