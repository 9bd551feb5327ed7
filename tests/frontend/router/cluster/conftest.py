"""Clusters of Ray on this machine, over the tiny checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.frontend.router.cluster.processes import Cluster


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
