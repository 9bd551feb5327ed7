"""Servers that keep pages."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis_server import PROGRAM, RedisServer


@pytest.fixture
def serve() -> Iterator[Callable[..., RedisServer]]:
    """Starts servers with further options; they end with the test."""
    if PROGRAM is None:
        pytest.skip("redis-server is not installed")
    with ExitStack() as ending:

        def start(*options: str) -> RedisServer:
            # The path of a socket has at most 107 bytes, so it is not in the test's own folder.
            folder = Path(tempfile.mkdtemp(prefix="redis-"))
            ending.callback(shutil.rmtree, folder, ignore_errors=True)
            server = RedisServer(folder, *options)
            ending.callback(server.end)
            return server

        yield start


@pytest.fixture
def server(serve: Callable[..., RedisServer]) -> RedisServer:
    """A server without a password."""
    return serve()
