"""Health and version over HTTP."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coppice import __version__
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.client.process import EngineProcess
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.config import EngineConfig
from tests.frontend.conftest import serving

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer


def test_health_and_version(tool_server: LiveServer) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        response = httpx.get(tool_server.url + path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert httpx.get(tool_server.url + "/-/healthz").text == "success", "as KubeRay expects"
    assert httpx.get(tool_server.url + "/version").json() == {"version": __version__}


def test_a_server_whose_engine_is_gone_lives_but_is_not_ready(
    live_server: type[LiveServer], text_engine: Any
) -> None:
    server = live_server(text_engine)
    server.run(server.engine.stop())
    assert httpx.get(server.url + "/health/live").status_code == 200
    for path in ("/health", "/health/ready", "/-/healthz"):
        response = httpx.get(server.url + path)
        assert response.status_code == 503
        assert response.json()["status"] != "ok"
    server.close()


@pytest.mark.slow
async def test_an_engine_that_hangs_is_not_healthy(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Stopped, it fails health, reports and metrics within seconds; /health/live stays."""
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=1024, max_num_seqs=8)
    engine = EngineClient(partial(EngineProcess, config), tokenizer, timeout=4.0)
    async with serving(engine) as (session, port):

        async def get(path: str) -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                return response.status, await response.text()

        assert (await get("/health"))[0] == 200
        assert "coppice_engine_up 1.0" in (await get("/metrics"))[1]
        process: Any = engine._engine
        os.kill(process.pid, signal.SIGSTOP)
        status, body = await get("/cache/report")
        assert status == 503 and "the engine hangs: it has not answered for" in body
        status, body = await get("/health")
        assert status == 503 and "the engine hangs: it has not answered for" in body
        assert "coppice_engine_up 0.0" in (await get("/metrics"))[1]
        assert (await get("/health/live"))[0] == 200
