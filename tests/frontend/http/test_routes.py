"""Where routes are served below a root path."""

from __future__ import annotations

import pytest
from aiohttp import web

from coppice.frontend.http.routes import Route, add_routes, json_answer


async def answer(request: web.Request) -> web.Response:
    return web.Response()


@pytest.mark.parametrize("root", ["/cache", "/v1", "/v1/load"])
def test_a_root_that_begins_a_path_is_refused(root: str) -> None:
    """Below it a path that only admins may ask for would be taken for another one."""
    paths = ("/cache/report", "/v1/load/adapter", "/v1")
    routes = [Route("GET", path, answer, "A route", json_answer({})) for path in paths]
    with pytest.raises(ValueError, match=rf"root_path must not be the beginning .* got '{root}'"):
        add_routes(web.Application(), routes, root)
    add_routes(web.Application(), routes, "/cach")
    add_routes(web.Application(), routes, "/llm/v1")
