"""Keys, their isolation and their limits, with replicas: the same as of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.frontend.router.cluster.processes import Cluster
from tests.frontend.router.cluster.traffic import TEXT, until

pytest.importorskip("ray")

BODY = {"prompt": TEXT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 400, "temperature": 2}


@pytest.mark.slow
async def test_keys_are_apart_and_have_limits(
    cluster: Callable[..., Cluster], session: aiohttp.ClientSession
) -> None:
    running = cluster(
        *("--replicas", "2", "--isolate-keys", "--admin-api-key", "ops=o"),
        *("--api-key", "ann=a", "--api-key", "bob=b", "--api-key", "eve=e"),
        *("--max-concurrent-requests", "2", "--requests-per-minute", "30"),
    )

    async def ask(path: str, key: str | None, body: Any = None) -> tuple[int, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        method = "GET" if body is None else "POST"
        async with session.request(
            method, running.url + path, json=body, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def complete(key: str | None, body: Any = BODY) -> tuple[int, Any]:
        return await ask("/v1/completions", key, body)

    async def cached(key: str) -> int:
        status, answer = await complete(key)
        assert status == 200
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for wrong in (None, "c"):
        status, answer = await complete(wrong)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    # What one key left is found again by that key, and by no other, on no replica.
    assert await cached("a") == 0

    async def hit() -> bool:
        return await cached("a") > 0

    await until(hit)
    assert await cached("b") == 0
    # Reports are for admins; they show the namespaces by the names of keys, and each replica.
    assert (await ask("/cache/report", "a"))[0] == 403
    status, told = await ask("/cache/report", "o")
    assert (status, len(told["replicas"])) == (200, 2)
    assert {"ann", "bob"} <= {each["name"] for each in told["namespaces"]}
    # Both limits count the requests of a key, whichever replica has them.
    many = [asyncio.create_task(complete("b", LONG)) for _ in range(6)]
    answers = await asyncio.gather(*many)
    refused = [answer["error"] for status, answer in answers if status == 429]
    assert [status for status, _ in answers].count(200) == 2
    assert len(refused) == 4
    assert all("2 requests of this key run already" in error["message"] for error in refused)
    statuses = [(await complete("e"))[0] for _ in range(31)]
    assert statuses == [200] * 30 + [429]
    assert (await complete("a"))[0] == 200
    running.stop()
