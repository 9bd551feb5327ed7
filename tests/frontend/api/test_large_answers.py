"""Large answers, and what is remembered of long conversations, hold up no other request.

What makes an answer waits until others were served: on the event loop, that would never be.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from coppice.frontend.api.openai.answers import ChatCompletion, Completion
from coppice.frontend.api.openai.responses.answer import ResponseAnswers
from coppice.frontend.api.openai.responses.memory import Remembered
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.http import json_answers
from coppice.frontend.text.engine import TextEngine
from tests.frontend.conftest import serving

Start = Callable[[TextEngine], EngineClient]

WORDS = "The key is under the mat. " * 15
FORCED: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT_LOGPROBS = FORCED | {"prompt": WORDS, "max_tokens": 1, "prompt_logprobs": 20}
ECHO = FORCED | {"prompt": WORDS, "max_tokens": 1, "echo": True, "logprobs": 20}
CHAT = {
    "messages": [{"role": "user", "content": "Where?"}],
    "max_tokens": 100, "logprobs": True, "top_logprobs": 20,
}  # fmt: skip
RESPONSE = {"input": "Where?", "max_output_tokens": 100, "top_logprobs": 20, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_output_tokens": 1, "truncation": "auto"}


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def post(self, path: str, body: Any) -> bytes:
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.read()


@pytest.fixture
async def client(text_engine: TextEngine, engine_client: Start) -> AsyncIterator[Client]:
    async with serving(engine_client(text_engine)) as (session, port):
        yield Client(session, f"http://127.0.0.1:{port}")


class Held:
    """Holds a function until others were served; notes when it was reached."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.others = threading.Event(), threading.Event()
        function = getattr(owner, name)

        def holding(*args: Any, **more: Any) -> Any:
            self.reached.set()
            assert self.others.wait(20), "nobody is served meanwhile"
            return function(*args, **more)

        patch.setattr(owner, name, holding)

    async def while_others_are_served(self, client: Client, path: str, body: Any) -> bytes:
        """The answer to `body` (None: to GET)."""

        async def asked() -> bytes:
            if body is None:
                return json.dumps(await client.get(path)).encode()
            return await client.post(path, body)

        large = asyncio.create_task(asked())
        while not self.reached.is_set() and not large.done():
            await asyncio.sleep(0.002)
        for _ in range(5):
            await client.get("/health")
        assert not large.done(), "the function was not called"
        self.others.set()
        return await large


def events(stream: bytes) -> list[Any]:
    lines = [line for line in stream.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", PROMPT_LOGPROBS, Completion),
        ("/v1/completions", ECHO, Completion),
        ("/v1/completions", ECHO | {"n": 8, "logprobs": 0, "return_token_ids": True}, Completion),
        ("/v1/chat/completions", CHAT | FORCED, ChatCompletion),
        ("/v1/responses", RESPONSE, ResponseAnswers),
    ],
)
async def test_logprobs(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, kind: type
) -> None:
    held = Held(monkeypatch, kind, "whole")
    answer = json.loads(await held.while_others_are_served(client, path, body))
    assert answer["model"] == "tiny"


async def test_the_logprobs_of_a_streamed_echo(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, Completion, "delta")
    stream = await held.while_others_are_served(client, "/v1/completions", ECHO | {"stream": True})
    first = events(stream)[0]["choices"][0]
    assert first["text"] == WORDS
    assert len(first["logprobs"]["top_logprobs"]) > 100


async def test_the_end_of_a_streamed_response(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, ResponseAnswers, "ending")
    stream = await held.while_others_are_served(
        client, "/v1/responses", RESPONSE | {"stream": True}
    )
    found = events(stream)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    last = found[-1]["response"]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    (part,) = last["output"][0]["content"]
    assert part["logprobs"] == [each for delta in deltas for each in delta["logprobs"]]
    assert await client.get(f"/v1/responses/{last['id']}") == last


async def test_small_answers_take_no_thread(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(json_answers, "in_parts")
    small = {"max_tokens": 4, "logprobs": 2}
    for more in ({}, {"stream": True}):
        await client.post("/v1/completions", {"prompt": "The key", **small, **more})
        await client.post("/v1/responses", {"input": "Where?", "max_output_tokens": 4, **more})
    await client.post("/tokenize", {"prompt": "The key"})


async def test_tokens_of_a_long_text(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    text = WORDS * 60
    held = Held(monkeypatch, json_answers, "in_parts")
    answer = json.loads(await held.while_others_are_served(client, "/tokenize", {"prompt": text}))
    assert answer["count"] == len(answer["tokens"]) > 4096
    monkeypatch.undo()
    held = Held(monkeypatch, json_answers, "in_parts")
    ids = answer["tokens"] * 30
    back = json.loads(await held.while_others_are_served(client, "/detokenize", {"tokens": ids}))
    assert back == {"prompt": text * 30}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def begun(client: Client) -> str:
    """The id of a response after which the server remembers a long conversation."""
    body = SHORT | {"input": [user("x" * 70_000), user("?")]}
    made = json.loads(await client.post("/v1/responses", body))
    return str(made["id"])


async def test_a_long_conversation_goes_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await begun(client)
    held = Held(monkeypatch, Remembered, "conversation")
    body = SHORT | {"previous_response_id": first, "input": "On?"}
    answer = json.loads(await held.while_others_are_served(client, "/v1/responses", body))
    assert answer["previous_response_id"] == first
    monkeypatch.undo()
    reached = Held(monkeypatch, Remembered, "own_items")
    items = (await client.get(f"/v1/responses/{first}/input_items"))["data"]
    reference = {"type": "item_reference", "id": items[-1]["id"]}
    body = SHORT | {"input": [reference, user("?")]}
    await reached.while_others_are_served(client, "/v1/responses", body)


async def test_the_input_items_of_a_long_conversation(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_answers, "LARGE_VALUES", 1_000)
    first = await begun(client)
    held = Held(monkeypatch, Remembered, "input_items")
    path = f"/v1/responses/{first}/input_items"
    answer = json.loads(await held.while_others_are_served(client, path, None))
    assert len(answer["data"]) == 2
