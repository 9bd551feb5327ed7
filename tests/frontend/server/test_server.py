"""The server over a real socket: both endpoints, streams, refusals, lost clients, failures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import pytest

from coppice.frontend.chat.template import encode_chat
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.model.generation_config import GenerationDefaults
from coppice.runtime.config import EngineConfig
from tests.frontend.conftest import serving
from tests.frontend.pieces import in_pieces_async

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

Start = Callable[[TextEngine], EngineClient]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "The quick brown fox jumps over the lazy dog"
GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
ENDLESS = GREEDY | {"prompt": PROMPT, "max_tokens": 480}
TOOL = {"type": "function", "function": {"name": "f"}}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]


class Client:
    """A client of one running server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        engine: EngineClient,
        text_engine: TextEngine,
    ) -> None:
        self.session, self.url, self.engine = session, url, engine
        self.text_engine = text_engine  # runs in a thread: to be read between steps only

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def ok(self, path: str, body: Any) -> Any:
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, which has to end with [DONE]."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            raw = (await response.read()).decode()
        parts = raw.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]

    async def pages_held(self) -> int:
        return int((await self.engine.ask("cache_report")).pages_held)

    async def until_idle(self) -> None:
        """Waits until the engine has nothing left to do, and checks that no page is held."""
        for _ in range(2000):
            if not await self.engine.ask("has_unfinished"):
                assert await self.pages_held() == 0
                assert self.engine.running == 0
                return
            await asyncio.sleep(0.005)
        raise AssertionError("requests are still running")


@asynccontextmanager
async def client_of(text_engine: TextEngine, engine: EngineClient) -> AsyncIterator[Client]:
    async with serving(engine) as (session, port):
        yield Client(session, f"http://127.0.0.1:{port}", engine, text_engine)


@pytest.fixture
async def client(text_engine: TextEngine, engine_client: Start) -> AsyncIterator[Client]:
    async with client_of(text_engine, engine_client(text_engine)) as client:
        yield client
        await client.until_idle()


@pytest.fixture(scope="module")
def refusing(checkpoint: Path, live_server: type[LiveServer]) -> Iterator[httpx.Client]:
    """A client of one server for many requests; at the end nothing may run or be held."""
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=4096, max_num_seqs=8)
    server = live_server(TextEngine.load(config))
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client
    server.until_idle()
    server.close()


async def test_models(client: Client) -> None:
    async with client.session.get(client.url + "/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["object"]) == ("tiny", "model")
    async with client.session.get(client.url + "/v1/models/tiny") as response:
        assert await response.json() == card
    async with client.session.get(client.url + "/v1/models/other/one") as response:
        assert response.status == 404


async def test_requests_get_the_models_defaults(
    text_engine: TextEngine, engine_client: Start
) -> None:
    """The model's generation_config.json holds for every endpoint, and is shown."""
    text_engine.defaults = GenerationDefaults({"temperature": 0.0, "top_k": 3}, 5)
    async with client_of(text_engine, engine_client(text_engine)) as client:
        async with client.session.get(client.url + "/v1/models/tiny") as response:
            shown = (await response.json())["default_sampling_params"]
        assert shown == {"temperature": 0.0, "top_k": 3, "max_new_tokens": 5}
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 50, "ignore_eos": True}
        first = await client.ok(COMPLETIONS, body)
        assert first["usage"]["completion_tokens"] == 5
        greedy = await client.ok(COMPLETIONS, body | {"temperature": 0, "top_k": 0})
        assert first["choices"] == greedy["choices"]
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
        answer = await client.ok(CHAT, ask)
        assert answer["usage"]["completion_tokens"] == 5


async def test_a_completion(client: Client) -> None:
    body = GREEDY | {"prompt": PROMPT, "max_tokens": 7}
    answer = await client.ok(COMPLETIONS, body)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    tokenizer = client.text_engine.tokenizer
    count = len(tokenizer.encode(PROMPT))
    assert answer["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": 7,
        "total_tokens": count + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = await client.ok(COMPLETIONS, body)
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": count - 1}


async def test_a_chat_completion(client: Client) -> None:
    answer = await client.ok(CHAT, GREEDY | {"messages": HELLO, "max_completion_tokens": 5})
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    text = "<|system|>Be brief.<|end|><|user|>Where is it?<|end|><|assistant|>"
    same = await client.ok(COMPLETIONS, GREEDY | {"prompt": text, "max_tokens": 5})
    assert choice["message"]["content"] == same["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


async def test_a_chat_answer_may_fill_the_context(client: Client) -> None:
    answer = await client.ok(CHAT, GREEDY | {"messages": HELLO})
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_completion_stream_spells_the_same_text(client: Client) -> None:
    body = GREEDY | {"prompt": PROMPT, "max_tokens": 40}
    whole = await client.ok(COMPLETIONS, body)
    events = await in_pieces_async(lambda: client.events(COMPLETIONS, body), list, 4)
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])
    assert not any("usage" in event for event in events)


async def test_a_chat_stream_spells_the_same_text(client: Client) -> None:
    body = GREEDY | {"messages": HELLO, "max_tokens": 20}
    whole = await client.ok(CHAT, body)
    *events, last = await client.events(CHAT, body | {"stream_options": {"include_usage": True}})
    assert {event["object"] for event in (*events, last)} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    prompt_tokens = whole["usage"]["prompt_tokens"]
    assert last["usage"] == whole["usage"] | {
        "prompt_tokens_details": {"cached_tokens": prompt_tokens - 1}
    }


def counts_of(chunks: list[dict[str, Any]]) -> set[int]:
    return {chunk["usage"]["completion_tokens"] for chunk in chunks}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "seed": 1},
        {"stop": "e"},
        {"use_beam_search": True, "beam_width": 3, "n": 2},
    ],
)
async def test_counts_with_every_chunk(client: Client, path: str, more: dict[str, Any]) -> None:
    """The counts only grow, and end at those of the whole answer."""
    body = {"model": "tiny", "max_tokens": 12, "ignore_eos": True, "temperature": 0.7} | more
    if "use_beam_search" in more:
        del body["temperature"]
    body |= {"prompt": [PROMPT, "The key"]} if path == COMPLETIONS else {"messages": HELLO}
    options = {"include_usage": True, "continuous_usage_stats": True}
    await client.ok(path, body)  # so that the second time has hits
    counted = body | {"stream_options": options}
    chunks = await in_pieces_async(lambda: client.events(path, counted), counts_of, 2)
    counts = [chunk["usage"] for chunk in chunks]
    totals = [count["total_tokens"] for count in counts]
    assert totals == sorted(totals)
    assert {count["prompt_tokens"] for count in counts} == {counts[-1]["prompt_tokens"]}
    for count in counts:
        assert count["total_tokens"] == count["prompt_tokens"] + count["completion_tokens"]
    assert chunks[-1]["choices"] == []
    assert counts[-2] == counts[-1], "nothing comes after the last text"
    assert counts[-1]["prompt_tokens_details"]["cached_tokens"] > 0
    assert counts[0]["completion_tokens"] < counts[-1]["completion_tokens"]
    plain = await client.events(path, body | {"stream_options": {"include_usage": True}})
    assert plain[-1]["usage"] == counts[-1] or "seed" not in more
    assert all(chunk["usage"] is None for chunk in plain[:-1])


async def test_several_prompts_in_one_request(client: Client) -> None:
    prompts = [PROMPT, "The key", PROMPT + " again", "東京"]
    body = GREEDY | {"max_tokens": 9}
    alone = [
        (await client.ok(COMPLETIONS, body | {"prompt": prompt}))["choices"][0]["text"]
        for prompt in prompts
    ]
    answer = await client.ok(COMPLETIONS, body | {"prompt": prompts})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert answer["usage"]["completion_tokens"] == 36
    streamed = [""] * 4
    for event in await client.events(COMPLETIONS, body | {"prompt": prompts}):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == alone


async def test_token_ids_are_a_prompt(client: Client) -> None:
    ids = client.text_engine.tokenizer.encode(PROMPT)
    body = GREEDY | {"max_tokens": 5}
    text = await client.ok(COMPLETIONS, body | {"prompt": PROMPT})
    for prompt in (ids, [ids]):
        answer = await client.ok(COMPLETIONS, body | {"prompt": prompt})
        assert answer["choices"] == text["choices"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string(client: Client, stream: bool) -> None:
    body = GREEDY | {"prompt": PROMPT, "max_tokens": 60}
    text = (await client.ok(COMPLETIONS, body))["choices"][0]["text"]
    stop = text[20:23]
    expected = text[: text.index(stop)]
    if stream:
        events = await client.events(COMPLETIONS, body | {"stop": stop})
        choices = [event["choices"][0] for event in events]
        got = "".join(choice["text"] for choice in choices)
        last = choices[-1]
    else:
        (last,) = (await client.ok(COMPLETIONS, body | {"stop": stop}))["choices"]
        got = last["text"]
    assert got == expected
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


async def test_many_at_once(client: Client) -> None:
    """More requests than a step has room for; each answer is the one that it gets alone."""
    bodies = [
        GREEDY | {"prompt": f"{PROMPT} number {number}", "max_tokens": 3 + number % 5}
        for number in range(24)
    ]
    together = await asyncio.gather(*(client.ok(COMPLETIONS, body) for body in bodies))
    for body, answer in zip(bodies, together, strict=True):
        alone = await client.ok(COMPLETIONS, body)
        assert answer["choices"] == alone["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 3])
async def test_a_client_that_goes_away_frees_its_pages(
    client: Client, stream: bool, count: int
) -> None:
    body = ENDLESS | {"prompt": [PROMPT] * count, "stream": stream}
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(client.url + COMPLETIONS, json=body))
        while client.engine.running < count or not await client.pages_held():
            await asyncio.sleep(0.001)
        if stream:
            response = await request
            await response.content.readany()
            response.close()
        else:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
    await client.until_idle()
    report = await client.engine.ask("cache_report")
    assert report.generated_tokens < 480 * count


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"n": "two"}, "n"),
        (COMPLETIONS, {"use_beam_search": True}, "beam_width"),
        (COMPLETIONS, {"use_beam_search": True, "beam_width": 999}, "beam_width"),
        (COMPLETIONS, {"use_beam_search": True, "beam_width": 2, "n": 3}, "n"),
        (COMPLETIONS, {"use_beam_search": True, "beam_width": 2, "top_p": 0.5}, "top_p"),
        (COMPLETIONS, {"use_beam_search": True, "beam_width": 2, "stop": ""}, "stop"),
        (COMPLETIONS, {"use_beam_search": True, "beam_width": 2, "seed": 1}, "seed"),
        (COMPLETIONS, {"beam_width": 2}, "beam_width"),
        (COMPLETIONS, {"priority": 1}, "priority"),  # the policy is another one
        (COMPLETIONS, {"priority": "high"}, "priority"),
        (COMPLETIONS, {"use_beam_search": 1, "beam_width": 2}, "use_beam_search"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"surprise": 1}, "surprise"),
        (COMPLETIONS, {"temperature": 1000}, "temperature"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [5, 100_000]}, "prompt"),
        (COMPLETIONS, {"prompt": "x " * 600}, "prompt"),
        (COMPLETIONS, {"prompt": [PROMPT, ""]}, "prompt"),
        (COMPLETIONS, {"prompt": "\ud83d"}, "prompt"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, "tools[0].type"),
        (CHAT, {"messages": HELLO, "guided_regex": "("}, "guided_regex"),
        (CHAT, {"messages": HELLO, "guided_json": {"$ref": "#"}}, "guided_json"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        (CHAT, {"messages": [{"role": "assistant"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, "messages[0].content"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_by_name(
    refusing: httpx.Client, path: str, change: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"model": "tiny", "stream": stream}
    if path == COMPLETIONS:
        body["prompt"] = "hello"
    answer = refusing.post(path, content=json.dumps(body | change))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_a_model_that_is_not_served(client: Client) -> None:
    status, answer = await client.post(COMPLETIONS, {"model": "gpt-5", "prompt": "x"})
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert "'gpt-5'" in answer["error"]["message"]
    assert "'tiny'" in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b'{"model": }', b"[" * 100_000, b'{"seed": 1' + b"0" * 5000 + b"}"],
)
async def test_malformed_json(client: Client, body: bytes) -> None:
    async with client.session.post(client.url + COMPLETIONS, data=body) as response:
        assert response.status == 400
        assert "not valid JSON" in (await response.json())["error"]["message"]


async def test_other_paths_and_methods_answer_in_the_same_shape(client: Client) -> None:
    async with client.session.get(client.url + "/v1/moderations") as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with client.session.get(client.url + COMPLETIONS) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "error" in await response.json()


def break_next_step(text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = text_engine.engine.runner.decoder
    forward = decoder.forward

    def broken(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(decoder, "forward", forward)
        raise ArithmeticError("a cosmic ray")

    monkeypatch.setattr(decoder, "forward", broken)


async def test_a_failed_step_is_a_server_error(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_next_step(client.text_engine, monkeypatch)
    status, answer = await client.post(COMPLETIONS, GREEDY | {"prompt": PROMPT})
    assert status == 500
    assert answer["error"]["type"] == "server_error"
    assert "cosmic ray" in answer["error"]["message"]
    break_next_step(client.text_engine, monkeypatch)
    *_, last = await client.events(COMPLETIONS, GREEDY | {"prompt": PROMPT})
    assert "cosmic ray" in last["error"]["message"]
    await client.ok(COMPLETIONS, GREEDY | {"prompt": PROMPT})


async def test_stopping_ends_what_runs_with_a_message(
    text_engine: TextEngine, engine_client: Start
) -> None:
    async with client_of(text_engine, engine_client(text_engine)) as client:
        request = asyncio.create_task(client.post(COMPLETIONS, ENDLESS))
        while not client.engine.running:
            await asyncio.sleep(0.001)
        await client.engine.stop()
        status, answer = await request
        assert status == 503
        assert "stopped" in answer["error"]["message"]
        status, answer = await client.post(COMPLETIONS, GREEDY | {"prompt": PROMPT})
        assert status == 503
        async with client.session.get(client.url + "/health") as response:
            assert response.status == 503


async def test_the_loop_is_free_while_the_engine_works(
    text_engine: TextEngine, engine_client: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that waits for the event loop to answer would never end if it ran on it."""
    import threading

    answered = threading.Event()
    engine = text_engine.engine
    step = engine.step

    def waiting() -> Any:
        assert answered.wait(20), "the event loop did not answer during a step"
        return step()

    monkeypatch.setattr(engine, "step", waiting)
    async with client_of(text_engine, engine_client(text_engine)) as client:
        request = asyncio.create_task(client.ok(COMPLETIONS, GREEDY | {"prompt": PROMPT}))
        async with client.session.get(client.url + "/health") as response:
            assert response.status == 200
        answered.set()
        await request


async def test_only_what_the_service_lists_can_be_asked_for(client: Client) -> None:
    assert (await client.engine.ask("cache_report")).pages_held == 0
    pin = await client.engine.ask("put_pin", "p", [1, 2, 3], cache_salt="mine")
    assert (pin.name, pin.num_tokens) == ("p", 3)
    with pytest.raises(ValueError, match="there is a pin named 'p' already"):
        await client.engine.ask("put_pin", "p", [1, 2, 3])
    assert await client.engine.ask("unpin", "p") is True
    for wrong in ("_namespace", "nothing", "num_pages", "step"):
        allowed = f"method must be one of add_request, .*, check, got '{wrong}'"
        with pytest.raises(ValueError, match=allowed):
            await client.engine.ask(wrong)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_n_continuations_are_choices_of_their_own(
    client: Client, path: str, stream: bool
) -> None:
    body: dict[str, Any] = {"model": "tiny", "n": 3, "seed": 1, "max_tokens": 6, "ignore_eos": True}
    body |= {"prompt": [PROMPT, "another"]} if path == COMPLETIONS else {"messages": HELLO}
    count = 6 if path == COMPLETIONS else 3
    texts = [""] * count
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await client.events(path, body | options)
        ends = []
        for chunk in chunks:
            for choice in chunk["choices"]:
                piece = choice.get("text", choice.get("delta", {}).get("content", ""))
                texts[choice["index"]] += piece
                ends += [choice["index"]] if choice["finish_reason"] else []
        assert sorted(ends) == list(range(count))
        usage = chunks[-1]["usage"]
    else:
        answer = await client.ok(path, body)
        for place, choice in enumerate(answer["choices"]):
            assert choice["index"] == place
            assert choice["finish_reason"] == "length"
            texts[place] = choice["text"] if "text" in choice else choice["message"]["content"]
        usage = answer["usage"]
    assert len(set(texts)) > 1
    assert usage["completion_tokens"] == 6 * count
    once = await client.ok(path, body | {"n": 1})
    assert usage["prompt_tokens"] == once["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_beam_search(client: Client, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"use_beam_search": True, "beam_width": 4, "n": 2, "max_tokens": 6}
    body |= {"model": "tiny", "length_penalty": 0.5, "early_stopping": "never", "ignore_eos": True}
    body |= {"prompt": PROMPT} if path == COMPLETIONS else {"messages": HELLO}
    llm = client.text_engine
    ids = llm.tokenizer.encode(PROMPT) if path == COMPLETIONS else encode_chat(llm.tokenizer, HELLO)
    texts = ["", ""]
    if stream:
        for chunk in await client.events(path, body):
            for choice in chunk["choices"]:
                piece = choice.get("text", choice.get("delta", {}).get("content", ""))
                texts[choice["index"]] += piece
    else:
        answer = await client.ok(path, body)
        for choice in answer["choices"]:
            texts[choice["index"]] = choice.get("text") or choice["message"]["content"]
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["prompt_tokens"] == len(ids)
    assert all(texts) and texts[0] != texts[1]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_best_line_of_a_beam_search_is_streamed_as_it_changes(
    client: Client, path: str
) -> None:
    body: dict[str, Any] = {"model": "tiny", "use_beam_search": True, "beam_width": 4, "n": 2}
    body |= {"max_tokens": 120, "ignore_eos": True, "stop": ["e", "4"], "length_penalty": 0.5}
    body |= {"prompt": [PROMPT, "The key"]} if path == COMPLETIONS else {"messages": HELLO}
    body |= {"stream_options": {"include_usage": True}, "stream": True}
    chunks = await client.events(path, body)
    leaders: dict[int, list[dict[str, Any]]] = {}
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            piece = choice.get("text", choice.get("delta", {}).get("content", "")) or ""
            if "best_so_far" in choice:
                assert not piece and choice["finish_reason"] is None
                assert index not in texts or not texts[index], "before the results"
                leaders.setdefault(index, []).append(choice["best_so_far"])
            else:
                texts[index] = texts.get(index, "") + piece
    prompts = 2 if path == COMPLETIONS else 1
    assert sorted(leaders) == [2 * number for number in range(prompts)], "under the first result"
    del body["stream"], body["stream_options"]
    answer = await client.ok(path, body)
    whole = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert [texts[index] for index in sorted(texts)] == whole
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    for lines in leaders.values():
        assert all(line["tokens"] > 0 and line["score"] < 0 for line in lines)
        assert all("e" not in line["text"] and "4" not in line["text"] for line in lines)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "form",
    [
        {"guided_regex": "[ab]{1,3}!"},
        {"structured_outputs": {"choice": ["a!", "bb!", "aba!"]}},
        {"guided_grammar": 'start: /[ab]{1,3}/ "!"'},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": ["a!", "bb!", "aba!"]}},
            }
        },
    ],
)
async def test_the_results_of_a_beam_search_have_their_form(
    client: Client, path: str, form: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"model": "tiny", "use_beam_search": True, "beam_width": 4, "n": 3}
    body |= {"prompt": PROMPT} if path == COMPLETIONS else {"messages": HELLO}
    answer = await client.ok(path, body | {"max_tokens": 12} | form)
    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == 3
    assert all(re.fullmatch(r'"?[ab]{1,3}!"?', text) for text in texts), texts
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    pieces = ["", "", ""]
    stream = {"max_tokens": 12, "stream": True}
    for event in await client.events(path, body | stream | form):
        for choice in event["choices"]:
            delta = choice.get("text", choice.get("delta", {}).get("content", ""))
            pieces[choice["index"]] += delta or ""
    assert pieces == texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_a_text_need_not_follow_is_named(
    refusing: httpx.Client, path: str, stream: bool
) -> None:
    body: dict[str, Any] = {"model": "tiny", "stream": stream, "max_tokens": 2}
    body |= {"prompt": PROMPT} if path == COMPLETIONS else {"messages": HELLO}
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    named = {"name": "x", "schema": schema}
    form = {"response_format": {"type": "json_schema", "json_schema": named}}
    response = refusing.post(path, json=body | form)
    assert response.status_code == 200, response.text
    assert response.headers["X-Coppice-Relaxed"] == "uniqueItems"
    plain = refusing.post(path, json=body | {"regex": "[ab]"})
    assert "X-Coppice-Relaxed" not in plain.headers
    named["strict"] = True
    response = refusing.post(path, json=body | form)
    assert response.status_code == 400
    assert "uniqueItems" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"


async def test_a_beam_search_with_all_that_sampling_has_too(client: Client) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "use_beam_search": True}
    body |= {"beam_width": 3, "n": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    plain = await client.ok(COMPLETIONS, body)
    tokens = plain["choices"][0]["logprobs"]["tokens"]
    word = next(token for token in tokens if token.isascii() and token.isalnum())
    rules = {"stop": ["o"], "repetition_penalty": 1.2, "bad_words": [word], "min_tokens": 2}
    answer = await client.ok(COMPLETIONS, body | rules)
    ended = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert ended, "a stop string must matter"
    for choice in ended:
        assert choice["stop_reason"] == "o"
        assert "o" not in choice["text"]
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert word not in [token.strip() for token in logprobs["tokens"]]
        assert len(logprobs["tokens"]) > 2
        assert all(len(top) >= 2 for top in logprobs["top_logprobs"])


async def test_the_best_of_several_counts_all_it_made(client: Client) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "seed": 3}
    every = await client.ok(COMPLETIONS, body | {"n": 4, "logprobs": 0})
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]]
    best = await client.ok(COMPLETIONS, body | {"n": 1, "best_of": 4})
    (choice,) = best["choices"]
    assert choice["text"] == every["choices"][sums.index(max(sums))]["text"]
    assert choice["logprobs"] is None
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 20
    assert best["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]


async def test_the_description_names_every_route(client: Client) -> None:
    async with client.session.get(client.url + "/openapi.json") as response:
        document = await response.json()
    assert {COMPLETIONS, CHAT, "/v1/models/{model}", "/health", "/openapi.json"} <= set(
        document["paths"]
    )
