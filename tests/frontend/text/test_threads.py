"""Work for the tokenizer waits for work of its own length only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from coppice.frontend.text.threads import LONG_BYTES, VERY_LONG_BYTES, TokenizerThreads

KINDS = {
    "short": {"size": LONG_BYTES},
    "long": {"size": LONG_BYTES + 1},
    "long by itself": {"size": 0, "long": True},
    "very long": {"size": VERY_LONG_BYTES + 1, "long": True},
}


@pytest.fixture
async def threads() -> AsyncIterator[TokenizerThreads]:
    made = TokenizerThreads()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("holds", "free"),
    [
        ("short", ["long", "long by itself", "very long"]),
        ("long", ["short", "very long"]),
        ("very long", ["short", "long", "long by itself"]),
    ],
)
async def test_work_that_holds_a_thread(
    threads: TokenizerThreads, holds: str, free: list[str]
) -> None:
    done = threading.Event()
    holding = asyncio.create_task(threads.run(done.wait, 20, **KINDS[holds]))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for kind in free:
        assert await threads.run(lambda: 7, **KINDS[kind]) == 7  # type: ignore[arg-type]
    assert not holding.done()
    done.set()
    assert await holding, f"{holds} work held up another kind"
