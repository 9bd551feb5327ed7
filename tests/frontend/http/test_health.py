"""Health and version over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

from coppice import __version__

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer


def test_health_and_version(tool_server: LiveServer) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        response = httpx.get(tool_server.url + path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert httpx.get(tool_server.url + "/version").json() == {"version": __version__}


def test_a_server_whose_engine_is_gone_lives_but_is_not_ready(
    live_server: type[LiveServer], text_engine: Any
) -> None:
    server = live_server(text_engine)
    server.run(server.engine.stop())
    assert httpx.get(server.url + "/health/live").status_code == 200
    for path in ("/health", "/health/ready"):
        response = httpx.get(server.url + path)
        assert response.status_code == 503
        assert response.json()["status"] != "ok"
    server.close()
