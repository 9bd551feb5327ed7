"""Replicas without a cluster: engines in threads of the test that take further callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from coppice.frontend.router.client import ReplicasClient
from coppice.frontend.router.hub import Hub
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.config import EngineConfig
from tests.frontend.conftest import LiveReplica


@pytest.fixture
def replica(checkpoint: Path) -> Callable[..., LiveReplica]:
    """Makes one over the tiny checkpoint, or another one, with options of its engine."""
    made: list[LiveReplica] = []

    def make(checkpoint: Path = checkpoint, **options: object) -> LiveReplica:
        # Drafts would end texts that are to be running when a replica ends.
        limits = {"kv_cache_tokens": 4096, "max_num_seqs": 8, "speculation": "off"} | options
        made.append(LiveReplica(TextEngine.load(EngineConfig(str(checkpoint), **limits))))  # type: ignore[arg-type]
        return made[-1]

    yield make  # type: ignore[misc]
    for each in made:
        each.end()


@pytest.fixture
async def cluster(
    replica: Callable[..., LiveReplica], tokenizer: Tokenizer
) -> AsyncIterator[Callable[..., object]]:
    """``await cluster(2, **options)``: a started client of so many replicas, and these."""
    clients: list[ReplicasClient] = []

    async def start(count: int, **options: object) -> tuple[ReplicasClient, list[LiveReplica]]:
        replicas = [replica(**options) for _ in range(count)]
        hub = Hub()
        for number, each in enumerate(replicas):
            await asyncio.to_thread(hub.join, f"r{number}", "127.0.0.1", each.door)
        client = ReplicasClient(hub, tokenizer)
        clients.append(client)
        await client.start()
        return client, replicas

    yield start
    for client in clients:
        await client.stop()
