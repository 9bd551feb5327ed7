"""A text that takes a minute to become tokens holds up no shorter one; some are refused before."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.threads import LONG_BYTES, VERY_LONG_BYTES, TokenizerThreads
from tests.frontend.conftest import serving

Start = Callable[[TextEngine], EngineClient]
WORDS = "The key is under the mat. "
LONG = WORDS * (LONG_BYTES // len(WORDS) + 1)
VERY_LONG = WORDS * (VERY_LONG_BYTES // len(WORDS) + 1)


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(self, path: str, body: Any, *, packed: bool = False) -> tuple[int, Any]:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        if packed:
            data, headers = gzip.compress(data), headers | {"Content-Encoding": "gzip"}
        url = self.url + path
        async with self.session.post(url, data=data, headers=headers) as response:
            return response.status, await response.json()


@pytest.fixture
async def client(text_engine: TextEngine, engine_client: Start) -> AsyncIterator[Client]:
    async with serving(engine_client(text_engine)) as (session, port):
        yield Client(session, f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("packed", [False, True])
async def test_a_very_long_text_holds_up_no_shorter_one(
    client: Client, text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    tokenizer = text_engine.tokenizer
    encode, reached, others = tokenizer._ids, threading.Event(), threading.Event()

    def encoding(text: str, **more: Any) -> list[int]:
        if len(text) > VERY_LONG_BYTES:
            reached.set()
            assert others.wait(60), "shorter texts wait for a very long one"
            return [1]
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "_ids", encoding)
    body = {"prompt": VERY_LONG}
    very_long = asyncio.create_task(client.post("/tokenize", body, packed=packed))
    while not reached.is_set() and not very_long.done():
        await asyncio.sleep(0.002)
    async with asyncio.timeout(30):
        status, answer = await client.post("/tokenize", {"prompt": WORDS})
        assert (status, answer["count"]) == (200, len(encode(WORDS, add_special_tokens=True)))
        assert (await client.post("/tokenize", {"prompt": LONG}, packed=packed))[0] == 200
        prompt = {"prompt": WORDS, "max_tokens": 1}
        assert (await client.post("/v1/completions", prompt))[0] == 200
        assert (await client.post("/v1/completions", prompt | {"prompt": LONG}))[0] == 400
        pin = {"name": "p", "prompt": WORDS}
        async with client.session.put(client.url + "/cache/pins", json=pin) as response:
            assert response.status == 200
    assert not very_long.done()
    others.set()
    assert (await very_long)[1]["tokens"] == [1]


async def test_a_conversation_that_is_too_long_is_refused_before_all_of_it_is_encoded(
    client: Client, text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each of its messages is short."""
    tokenizer = text_engine.tokenizer
    encode, lengths = tokenizer._ids, [0]

    def noted(text: str, **more: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "_ids", noted)
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": WORDS * 10} for at in range(1_001)]
    status, answer = await client.post("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == "messages"
    assert max(lengths) < 2 * (8 * 512 + 4096)


async def test_what_is_remembered_counts_as_text(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = TokenizerThreads.run

    async def noted(self: TokenizerThreads, *args: Any, size: int = 0, **more: Any) -> Any:
        sizes.append(size)
        return await run(self, *args, size=size, **more)

    monkeypatch.setattr(TokenizerThreads, "run", noted)
    body: dict[str, Any] = {"max_output_tokens": 1, "truncation": "auto"}
    users = [{"role": "user", "content": text} for text in (LONG, "?")]
    status, first = await client.post("/v1/responses", body | {"input": users})
    assert status == 200, first
    status, _ = await client.post(
        "/v1/responses", body | {"input": "On?", "previous_response_id": first["id"]}
    )
    assert status == 200
    assert len(sizes) == 2
    assert min(sizes) > LONG_BYTES, "a short body goes on with a long text"
