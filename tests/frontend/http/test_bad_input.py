"""Bytes that no client should send: each is refused with a reason, never with 500."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest

from coppice.frontend.text.engine import TextEngine
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

HUGE = 10**400
BODY = {"model": "tiny", "prompt": "The key", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> TextEngine:
    return TextEngine.load(
        EngineConfig(model=str(checkpoint), kv_cache_tokens=4096, max_num_seqs=8)
    )


@pytest.fixture(scope="module")
def server(engine: TextEngine, live_server: type[LiveServer]) -> Iterator[LiveServer]:
    server = live_server(engine, cors_origin=("*",))
    yield server
    server.until_idle()
    server.close()


@pytest.fixture(scope="module")
def keyed(checkpoint: Path, live_server: type[LiveServer]) -> Iterator[LiveServer]:
    """A server with a key."""
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=1024, max_num_seqs=2)
    server = live_server(TextEngine.load(config), api_key=("secret",))
    yield server
    server.close()


def sent(
    url: str, method: str, path: str, *headers: bytes, body: bytes = b""
) -> tuple[int, dict[str, Any] | None]:
    """The status and the JSON answer of a request whose bytes are sent as they are."""
    host, _, port = url.removeprefix("http://").partition(":")
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", b"Connection: close", *headers]
    if body:
        lines.append(b"Content-Length: %d" % len(body))
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, content = answer.partition(b"\r\n\r\n")
    parsed = json.loads(content) if b"application/json" in head and content else None
    return int(head.split()[1]), parsed


def refused(answer: tuple[int, dict[str, Any] | None], status: int = 400) -> str:
    assert answer[0] == status, answer
    assert answer[1] is not None
    return str(answer[1]["error"]["message"])


@pytest.mark.parametrize("name", [b"Authorization: Bearer \xff", b"X-Api-Key: \xff\xfe"])
def test_a_key_that_is_no_text(server: LiveServer, keyed: LiveServer, name: bytes) -> None:
    assert sent(server.url, "GET", "/v1/models", name)[0] == 200  # it has no keys
    assert "is not known" in refused(sent(keyed.url, "GET", "/v1/models", name), 401)


def test_content_types_that_are_none(server: LiveServer) -> None:
    accept = b"Accept: application/openmetrics-text;version=\xff"
    assert "Accept must name types" in refused(sent(server.url, "GET", "/metrics", accept))
    for accept in (b"Accept: \xff", b"Accept: ;;;,,", b"Accept: application/openmetrics-text"):
        assert sent(server.url, "GET", "/metrics", accept)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        (b"Origin: http://\xff",),
        (b"Origin: http://a.b", b"Access-Control-Request-Headers: \xff"),
        (b"X-Request-Id: \xff",),
        (b"Cookie: a=\xff; \xff",),
        (b"User-Agent: \xff",),
        (b"If-None-Match: \xff",),
        (b"Range: bytes=\xff-",),
        (b"Content-Type: text/\xff; charset=\xff",),
        (b"Accept-Encoding: \xff",),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/cache", "/cache/report", "/nowhere"])
def test_other_headers(server: LiveServer, headers: tuple[bytes, ...], path: str) -> None:
    status, _ = sent(server.url, "GET", path, *headers)
    assert status in (200, 404)
    status, _ = sent(
        server.url, "POST", "/v1/completions", *headers, body=json.dumps(BODY).encode()
    )
    assert status in (200, 403)  # 403: a page of another server


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/cache/pins"])
@pytest.mark.parametrize("encoding", [b"deflate", b"gzip", b"br", b"zstd", b"x-none"])
def test_a_body_that_is_not_encoded_as_it_says(
    server: LiveServer, path: str, encoding: bytes
) -> None:
    method = "PUT" if path.endswith("pins") else "POST"
    broken = b"\xff" + json.dumps(BODY).encode()
    for body in (broken, zlib.compress(broken)[:-9]):
        answer = sent(server.url, method, path, b"Content-Encoding: " + encoding, body=body)
        assert answer[0] == 400


def test_a_body_that_is_encoded_is_read(server: LiveServer) -> None:
    body = zlib.compress(json.dumps(BODY).encode())
    headers = (b"Content-Encoding: deflate",)
    assert sent(server.url, "POST", "/v1/completions", *headers, body=body)[0] == 200


def test_chunks_that_are_none(server: LiveServer) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"zz\r\n{}\r\n0\r\n\r\n")
        assert connection.recv(65536).split()[1] == b"400"


NUMBERS = (HUGE, -HUGE, 1e308, -1, 2**31, 2**63, 2**64, True, "1", [1], {}, "\ud800")


@pytest.mark.parametrize(
    "name",
    [
        "n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "logprobs",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs",
        "prompt_logprobs_start", "min_tokens", "priority", "beam_width", "length_penalty",
        "stop_token_ids", "allowed_token_ids", "logit_bias", "stop", "bad_words", "prompt", "user",
        "cache_salt", "model", "stream", "echo", "ignore_eos", "guided_choice", "guided_regex",
    ],
)  # fmt: skip
def test_values_of_every_parameter(server: LiveServer, name: str) -> None:
    """Numbers without end, half a character, a truth where a number belongs."""
    inside = {
        "logit_bias": [{"5": value} for value in (HUGE, True, "1")] + [{str(HUGE): 1}, {"-1": 1}],
        "prompt": [[-1], [HUGE], [2**31 - 1], [383, 384], [True], [1.0], "\ud800", ["\udfff"]],
        "stop_token_ids": [[-1], [HUGE], [True], [2**31 - 1]],
        "allowed_token_ids": [[-1], [HUGE], [True], [2**31 - 1], []],
        "stop": [["\ud800"], [""], "a" * 100_000],
        "bad_words": [["\ud800"], [""], [" "]],
        "guided_choice": [["\ud800"], [""]],
    }
    values = [*NUMBERS, *inside.get(name, [])]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for value in values:
            written = json.dumps(BODY | {"max_tokens": 1} | {name: value})
            answer = client.post("/v1/completions", content=written)
            assert answer.status_code < 500, (value, answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]


# Bodies that are taken, of routes that need more than a model.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT["messages"]},
    "/tokenize": {"prompt": "The key"},
    "/detokenize": {"tokens": [7]},
    "/cache/pins": {"name": "a", "prompt": "The key"},
}


def test_odd_values_of_every_field_of_every_route(server: LiveServer) -> None:
    """Whatever routes there are: they and their fields are read from /openapi.json."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        document = client.get("/openapi.json").json()
        tried = 0
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if "requestBody" not in operation:
                    continue
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                while "$ref" in schema:
                    schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
                for name in schema.get("properties", {}):
                    for value in (HUGE, -1, True, "\ud800", [HUGE], [{}], {"\ud800": -HUGE}):
                        body = GOOD.get(path, {"model": "tiny"}) | {name: value}
                        answer = client.request(method, path, content=json.dumps(body))
                        assert answer.status_code < 500, (path, name, value, answer.text)
                        tried += 1
        assert tried > 500
        for pin in client.get("/cache/pins").json()["data"]:
            client.delete(f"/cache/pins/{quote(pin['name'], safe='')}")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000])
@pytest.mark.parametrize("name", ["temperature", "seed", "top_p", "max_tokens", "n"])
def test_numbers_that_are_none(server: LiveServer, name: str, value: str) -> None:
    body = json.dumps(BODY)[:-1] + f', "{name}": {value}}}'
    refused(sent(server.url, "POST", "/v1/completions", body=body.encode()))


def test_texts_that_are_none(server: LiveServer) -> None:
    """Half a surrogate pair, wherever a text may stand."""
    bad = "a\ud800"
    message = {"role": "user", "content": "Hi"}
    call = {"id": "1", "type": "function", "function": {"name": bad, "arguments": "{}"}}
    function = {"name": "f", "description": bad, "parameters": {"title": bad}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", CHAT | {"messages": [message | {"content": bad}]}),
        ("/v1/chat/completions", CHAT | {"messages": [message | {"role": bad}]}),
        ("/v1/chat/completions", CHAT | {"messages": [message | {"name": bad}]}),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "tool", "content": "x", "tool_call_id": bad}]},
        ),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [message, {"role": "assistant", "tool_calls": [call]}]},
        ),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": function}]}),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {bad: bad}}),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"x": bad}}),
        ("/v1/chat/completions", CHAT | {"user": bad, "metadata": {bad: bad}}),
        ("/v1/chat/completions", CHAT | {"model": bad}),
        ("/v1/chat/completions", CHAT | {bad: bad}),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"type": "string", "const": bad}}}},
        ),
        ("/tokenize", {"prompt": bad}),
        ("/tokenize", {"messages": [message | {"content": bad}]}),
        ("/detokenize", {"tokens": [HUGE]}),
        ("/v1/completions", BODY | {"cache_salt": bad}),
    ]  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, body in bodies:
            answer = client.post(path, content=json.dumps(body))
            assert answer.status_code < 500, (body, answer.text)


def test_a_salt_that_is_too_long(server: LiveServer) -> None:
    paths = {"/v1/completions": BODY, "/v1/chat/completions": CHAT, "/v1/messages": CHAT}
    for path, body in paths.items():
        answer = httpx.post(server.url + path, json=body | {"cache_salt": "x" * 2**20})
        message = refused((answer.status_code, answer.json()))
        assert message == "cache_salt must have at most 1024 characters, got 1048576"


@pytest.mark.parametrize(
    "name", ["a\nb", "\n", "a\r\n\tb", "a/b", "/", "a b?c#d", "%0A", "é🙂", "a\x00b", "a//b", "..."]
)
def test_a_pin_of_any_name_can_be_deleted(server: LiveServer, name: str) -> None:
    with httpx.Client(base_url=server.url) as client:
        answer = client.put("/cache/pins", json={"name": name, "prompt": "The key"})
        assert answer.status_code == 200, answer.text
        assert [pin["name"] for pin in client.get("/cache/pins").json()["data"]] == [name]
        answer = client.delete(f"/cache/pins/{quote(name, safe='')}")
        assert answer.json() == {"name": name, "deleted": True}
        assert client.get("/cache/pins").json()["data"] == []


@pytest.mark.parametrize("name", [".", ".."])
def test_a_pin_whose_name_no_url_can_have(server: LiveServer, name: str) -> None:
    answer = httpx.put(server.url + "/cache/pins", json={"name": name, "prompt": "The key"})
    assert "name must be" in refused((answer.status_code, answer.json()))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ttl", HUGE, "ttl must be a number of seconds above 0 and at most 1,000,000,000"),
        ("ttl", -1, "ttl must be a number of seconds above 0"),
        ("ttl", True, "ttl must be a number of seconds"),
        ("prompt_token_ids", [-1], "must be integers from 0 to 383"),
        ("prompt_token_ids", [HUGE], "must be integers from 0 to 383"),
        ("prompt_token_ids", [True], "must be a list of integers"),
        ("cache_salt", "\ud800", "valid Unicode"),
        ("cache_salt", "x" * 1025, "cache_salt must have at most 1024 characters, got 1025"),
        ("name", "\ud800", "valid Unicode"),
        ("tenant", "\ud800", "tenant"),
    ],
)
def test_pins(server: LiveServer, field: str, value: Any, words: str) -> None:
    body = {"name": "a", "prompt": "The key"} | {field: value}
    if field == "prompt_token_ids":
        del body["prompt"]
    answer = httpx.put(server.url + "/cache/pins", content=json.dumps(body))
    assert words in refused((answer.status_code, answer.json()))


@pytest.mark.parametrize(
    "path", ["/v1/models/%FF", "/cache/pins/%FF", "/cache/page/%FF", "/%FF", "/v1/models/a%0Ab",
             "/cache?x=%FF", "/metrics?name=%FF", "/v1/responses/%FF"]
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD", "OPTIONS", "BREW"])
def test_paths(server: LiveServer, method: str, path: str) -> None:
    assert sent(server.url, method, path)[0] < 500
