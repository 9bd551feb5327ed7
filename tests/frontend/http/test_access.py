"""Keys, limits, isolation, CORS, timeouts, ids and log lines of the server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.errors import BadRequest
from coppice.frontend.http import logs
from coppice.frontend.http.access import Access
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.text.engine import TextEngine
from tests.frontend import conftest

Start = Callable[[TextEngine], EngineClient]
COMPLETIONS = "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog while the band plays on"
BODY = {"model": "tiny", "temperature": 0, "ignore_eos": True, "prompt": PROMPT, "max_tokens": 4}
# Drafts of what is drawn so freely are not accepted: each token takes a step.
ENDLESS = BODY | {"max_tokens": 440, "temperature": 2}


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, engine: EngineClient) -> None:
        self.session, self.url, self.engine = session, url, engine

    async def ask(
        self, path: str, body: Any = None, key: str | None = None, **headers: str
    ) -> tuple[int, Any, Any]:
        """Status, answer and headers: POST if there is a body, else GET."""
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        method = "GET" if body is None else "POST"
        url = self.url + path
        async with self.session.request(method, url, json=body, headers=headers) as response:
            raw = await response.text()
            return response.status, json.loads(raw) if raw else None, response.headers


@pytest.fixture
def serving(text_engine: TextEngine, engine_client: Start) -> Callable[..., Any]:
    @asynccontextmanager
    async def started(**options: Any) -> AsyncIterator[Client]:
        engine = engine_client(text_engine)
        async with conftest.serving(engine, ServerOptions(**options)) as (session, port):
            yield Client(session, f"http://127.0.0.1:{port}", engine)

    return started


async def test_keys_open_the_server(serving: Callable[..., Any]) -> None:
    async with serving(api_key=("first", "Ann=c2Vjb25k=="), admin_api_key=("root",)) as client:
        for key in (None, "third", "", "Ann", "Ann=c2Vjb25k=="):
            status, answer, headers = await client.ask(COMPLETIONS, BODY, key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer"
        for key in ("first", "c2Vjb25k==", "root"):
            assert (await client.ask(COMPLETIONS, BODY, key))[0] == 200
            assert (await client.ask("/v1/models", key=key))[0] == 200
        assert (await client.ask("/v1/models"))[0] == 401
        assert (await client.ask("/health"))[0] == 200
        # Other keys are refused on the admins' paths, whether or not the path exists.
        status, answer, _ = await client.ask("/cache/nothing", key="first")
        assert (status, answer["error"]["code"]) == (403, "forbidden")
        assert (await client.ask("/cache/nothing", key="root"))[0] == 404


async def test_a_key_of_another_kind(serving: Callable[..., Any]) -> None:
    async with serving(api_key=("first",)) as client:
        status, _, _ = await client.ask("/v1/models", Authorization="Basic first")
        assert status == 401
        status, _, _ = await client.ask("/v1/models", Authorization="bearer first")
        assert status == 200
        for key, expected in (("first", 200), ("second", 401)):
            status, _, _ = await client.ask("/v1/models", **{"X-Api-Key": key})
            assert status == expected


async def test_isolated_keys_share_nothing(serving: Callable[..., Any]) -> None:
    async def cached(client: Client, key: str) -> int:
        status, answer, _ = await client.ask(COMPLETIONS, BODY, key)
        assert status == 200
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with serving(api_key=("a", "b")) as client:
        assert await cached(client, "a") == 0
        assert await cached(client, "b") > 0
    async with serving(api_key=("a", "b"), isolate_keys=True) as client:
        assert await cached(client, "a") == 0
        assert await cached(client, "b") == 0
        assert await cached(client, "a") > 0
        assert (await client.ask("/cache/report", key="a"))[0] == 403


async def test_reports_and_pins_of_isolated_keys(serving: Callable[..., Any]) -> None:
    """Only admins see them, and they show a key's name; the page itself is open."""
    options = {"api_key": ("ann=a", "bob=b"), "admin_api_key": ("ops=o",), "isolate_keys": True}
    async with serving(**options) as client:
        for key in ("a", "a", "b"):
            assert (await client.ask(COMPLETIONS, BODY, key))[0] == 200
        for path in ("/cache/report", "/cache/pins", "/metrics"):
            assert (await client.ask(path))[0] == 401
            assert (await client.ask(path, key="a"))[0] == 403
        _, report, _ = await client.ask("/cache/report", key="o")
        assert [each["name"] for each in report["namespaces"]] == ["ann", "bob"]
        for path in ("/cache", "/cache/page/main.js"):
            async with client.session.get(client.url + path) as response:
                assert response.status == 200
        admin = {"Authorization": "Bearer o"}
        kept = {}
        for tenant in ("bob", None, "cid"):
            pin = {"name": f"for {tenant}", "prompt": PROMPT, "tenant": tenant}
            url = client.url + "/cache/pins"
            async with client.session.put(url, json=pin, headers=admin) as response:
                kept[tenant] = response.status, await response.json()
        assert kept["bob"][1]["namespace"] == "bob"
        assert kept["bob"][1]["cached_tokens"] == kept["bob"][1]["tokens"]
        assert (kept[None][1]["namespace"], kept[None][1]["cached_tokens"]) == ("ops", 0)
        status, answer = kept["cid"]
        assert (status, answer["error"]["param"]) == (400, "tenant")
        assert "the name of a key (ann, bob, ops), got 'cid'" in answer["error"]["message"]


async def test_requests_at_once(serving: Callable[..., Any]) -> None:
    async with serving(api_key=("a", "b"), max_concurrent_requests=2) as client:
        running = [asyncio.create_task(client.ask(COMPLETIONS, ENDLESS, "a")) for _ in range(2)]
        while client.engine.running < 2:
            await asyncio.sleep(0.001)
        status, answer, headers = await client.ask(COMPLETIONS, BODY, "a")
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "2 requests of this key run already" in answer["error"]["message"]
        assert int(headers["Retry-After"]) >= 1
        assert (await client.ask(COMPLETIONS, BODY, "b"))[0] == 200
        assert {status for status, _, _ in await asyncio.gather(*running)} == {200}
        assert (await client.ask(COMPLETIONS, BODY, "a"))[0] == 200


def test_requests_a_minute() -> None:
    now = 100.0
    refusals: list[tuple[int, int | None]] = []
    keys = ServerOptions(api_key=("a=x", "b=y")).keys()
    access = Access(keys, per_minute=6, clock=lambda: now)
    a, b = (access.guest("/v1/models", f"Bearer {secret}") for secret in "xy")

    def begins(guest: Any) -> bool:
        try:
            with access.using(guest, "/v1/completions"):
                return True
        except BadRequest as error:
            refusals.append((error.status, error.retry_after))
            return False

    assert [begins(a) for _ in range(7)] == [True] * 6 + [False]
    assert begins(b)
    now += 9.9
    assert not begins(a)
    now += 0.2
    assert [begins(a) for _ in range(2)] == [True, False]
    now += 1000
    assert [begins(a) for _ in range(7)] == [True] * 6 + [False]
    assert refusals == [(429, 10), (429, 1), (429, 10), (429, 10)]
    with access.using(a, "/health"):  # which is not counted
        assert not begins(a)
    for path in ("/score", "/rerank", "/v2/rerank", "/tokenize", "/detokenize"):
        with pytest.raises(BadRequest), access.using(a, path):
            pass


async def test_a_request_that_takes_too_long(serving: Callable[..., Any]) -> None:
    async with serving(request_timeout=0.15) as client:
        engine = client.engine
        step = engine_step(client)
        status, answer, _ = await client.ask(COMPLETIONS, ENDLESS)
        assert (status, answer["error"]["type"]) == (504, "timeout_error")
        assert "request_timeout, 0.15 s" in answer["error"]["message"]
        async with client.session.post(
            client.url + COMPLETIONS, json=ENDLESS | {"stream": True}
        ) as response:
            raw = (await response.read()).decode()
        *_, last, done, _ = raw.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert done == "data: [DONE]"
        step.set()
        while engine.running or await engine.ask("has_unfinished"):
            await asyncio.sleep(0.005)
        assert (await engine.ask("cache_report")).pages_held == 0


def engine_step(client: Client) -> Any:
    """Slows the steps of the engine down until the event is set."""
    import threading

    launched: Any = client.engine._engine
    engine, fast = launched._engine, threading.Event()
    step = engine.step

    def slow() -> Any:
        fast.wait(0.02)
        return step()

    engine.step = slow
    return fast


async def test_pages_of_other_origins(serving: Callable[..., Any]) -> None:
    page = {"Origin": "https://page.example"}
    preflight = page | {"Access-Control-Request-Method": "POST"}
    async with (
        serving(api_key=("a",)) as client,
        client.session.options(client.url + COMPLETIONS, headers=preflight) as response,
    ):
        assert response.status != 204
        assert "Access-Control-Allow-Origin" not in response.headers
    async with serving() as client:
        status, answer, _ = await client.ask(COMPLETIONS, BODY, **page)
        assert (status, answer["error"]["code"]) == (403, "forbidden")
        assert (await client.ask(COMPLETIONS, BODY, Origin=client.url))[0] == 200
        assert (await client.ask("/v1/models", **page))[0] == 200
    async with serving(api_key=("a",), cors_origin=("https://page.example",)) as client:
        async with client.session.options(client.url + COMPLETIONS, headers=preflight) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == page["Origin"]
            assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
        # As OpenAI's client for browsers sends them.
        wanted = {"Access-Control-Request-Headers": "authorization,x-stainless-os"}
        async with client.session.options(
            client.url + COMPLETIONS, headers=preflight | wanted
        ) as response:
            assert (
                response.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
            )
        for body in (BODY, BODY | {"stream": True}):
            headers = page | {"Authorization": "Bearer a"}
            async with client.session.post(
                client.url + COMPLETIONS, json=body, headers=headers
            ) as response:
                assert response.headers.getall("Access-Control-Allow-Origin") == [page["Origin"]]
                assert len(response.headers.getall("X-Request-Id")) == 1
        _, _, headers = await client.ask("/v1/models", key="b", **page)
        assert headers["Access-Control-Allow-Origin"] == page["Origin"]
        _, _, headers = await client.ask("/v1/models", key="a", Origin="https://other.example")
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("stream", [False, True])
async def test_every_request_has_an_id_and_a_line(
    serving: Callable[..., Any], caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "coppice")
    async with serving(api_key=("Ann=a",)) as client:
        body = BODY | {"stream": stream}
        headers = {"Authorization": "Bearer a", "X-Request-Id": "mine-1"}
        async with client.session.post(
            client.url + COMPLETIONS, json=body, headers=headers
        ) as response:
            await response.read()
            assert response.headers["X-Request-Id"] == "mine-1"
        _, _, headers = await client.ask("/v1/models", **{"X-Request-Id": "x" * 200})
        assert len(headers["X-Request-Id"]) == 32
    lines = [record.fields for record in caplog.records if record.message == "request"]
    assert lines[0].pop("seconds") > 0
    assert lines[0].pop("prompt_tokens") > 4
    assert lines[0] == {
        "request_id": "mine-1",
        "method": "POST",
        "path": COMPLETIONS,
        "status": 200,
        "key": "Ann",
        "stream": stream,
        "cached_tokens": 0,
        "completion_tokens": 4,
    }
    assert lines[1]["status"] == 401
    assert "fox" not in str(lines)


async def test_prompts_are_logged_if_asked_for(
    serving: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coppice")
    async with serving(log_prompts=True) as client:
        await client.ask(COMPLETIONS, BODY)
    (line,) = [record.fields for record in caplog.records if record.message == "request"]
    assert line["prompt"] == (PROMPT,)


async def test_a_refused_request_is_logged_with_parameter_and_reason(
    serving: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Not with what its user wrote."""
    caplog.set_level(logging.INFO, "coppice")
    bodies: list[tuple[dict[str, Any], str | None, str]] = [
        (BODY | {"temperature": -1}, "temperature", "temperature must be greater"),
        (BODY | {"no_such": 1}, "no_such", "no_such is not"),
        (BODY | {"model": "other"}, "model", "model 'other' is not served here"),
        (BODY | {"prompt": {"my": "secret"}}, "prompt", "prompt must be a string"),
        (BODY | {"prompt": "x" * 9999}, "prompt", "maximum context length"),
    ]
    async with serving() as client:
        for body, _, _ in bodies:
            assert (await client.ask(COMPLETIONS, body))[0] in (400, 404)
        await client.ask("/no/such")
    lines = [record.fields for record in caplog.records if record.message == "request"]
    for line, (_, param, reason) in zip(lines[:-1], bodies, strict=True):
        assert line["param"] == param
        assert reason in line["error"]
        assert "secret" not in line["error"] and len(line["error"]) < 310
    assert lines[-1]["status"] == 404 and "/openapi.json" in lines[-1]["error"]
    assert "param" not in lines[-1]


@pytest.mark.parametrize(
    ("param", "message", "shown"),
    [
        ("messages[0].content", "it must be text, got 'my secret'", "it must be text"),
        (None, "a must be b, got [1, 'my secret']", "a must be b"),
        ("tools[1]", 'must be an object, got "my\nsecret"', "must be an object"),
        ("n", "n must be an integer, got 'two'", "n must be an integer, got 'two'"),
        ("prompt", "prompt must have fewer tokens, got 9", "prompt must have fewer tokens, got 9"),
        ("n", "x" * 400, "x" * 300 + "..."),
    ],
)
def test_the_reason_leaves_out_what_users_wrote(
    param: str | None, message: str, shown: str
) -> None:
    found = logs.refused({"message": message, "param": param})
    assert found == ({} if param is None else {"param": param}) | {"error": shown}


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_lines(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format)
    fields = {"path": "/a", "prompt": 'line\nlevel=error "quoted"', "status": 200}
    logging.getLogger("coppice.x").info("request", extra={"fields": fields})
    logging.getLogger("other").info("not wanted")
    (line,) = capsys.readouterr().err.splitlines()
    if log_format == "json":
        parsed = json.loads(line)
        assert {name: parsed[name] for name in fields} == fields
        assert (parsed["event"], parsed["level"], parsed["logger"]) == (
            "request",
            "info",
            "coppice.x",
        )
    else:
        assert line.endswith(
            r' info request path=/a prompt="line\nlevel=error \"quoted\"" status=200'
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_key": ("",)}, "api_key must be KEY or NAME=KEY, got an empty one at place 1"),
        ({"api_key": ("a=x", "a=y")}, "two keys are named 'a'"),
        ({"api_key_file": "nowhere"}, "api_key_file cannot be read"),
        ({"isolate_keys": True}, "isolate_keys needs keys"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests must be an integer of at least"),
        ({"requests_per_minute": True}, "requests_per_minute must be an integer of at least 1"),
        ({"request_timeout": 0}, "request_timeout must be above 0, got 0"),
        ({"max_stream_delay": -0.1}, "max_stream_delay must be at least 0 and finite, got -0.1"),
        ({"max_stream_delay": float("inf")}, "max_stream_delay must be at least 0 and finite"),
        ({"drain_timeout": -1}, "drain_timeout must be at least 0, got -1"),
        ({"log_format": "xml"}, "log_format must be one of text, json, got 'xml'"),
        ({"cors_origin": ("page.example",)}, "cors_origin must be * or begin with http"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        ServerOptions(**options).keys()


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nAnn=one\n\ntwo\n")
    keys = ServerOptions(api_key=("zero",), api_key_file=str(path)).keys()
    assert [key.name for key in keys] == ["key-1", "Ann", "key-3"]
    access = Access(keys)
    assert access.guest("/v1/models", "Bearer two").name == "key-3"
    path.write_text("\n")
    with pytest.raises(ValueError, match="must have a key in it"):
        ServerOptions(api_key_file=str(path)).keys()
