"""Tools over HTTP. The model's text is dictated, or must fit the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coppice.frontend.api.openai.requests import parse_chat
from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.tools.choice import Tools
from coppice.frontend.chat.tools.registry import FORMATS, format_of
from coppice.frontend.http.options import TOOL_CALL_PARSERS
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["東京", "Paris", "the old town"]},
                "days": {"$ref": "#/$defs/days"},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
ASK = [{"role": "user", "content": "How is it there?"}]
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "東京", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def http(tool_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tool_server.url, timeout=60) as client:
        yield client


def chat(http: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 300} | more
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def stream(http: httpx.Client, **more: Any) -> dict[int, dict[str, Any]]:
    """Each choice of a stream as a whole: content, tool_calls and finish_reason."""
    body = {"model": "tiny", "messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 300} | more
    response = http.post("/v1/chat/completions", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *events, end, empty = response.text.split("\n\n")
    assert (end, empty) == ("data: [DONE]", "")
    made: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            so_far = made.setdefault(
                choice["index"], {"content": "", "tool_calls": [], "finish_reason": None}
            )
            assert so_far["finish_reason"] is None
            so_far["finish_reason"] = choice["finish_reason"]
            delta = choice["delta"]
            so_far["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(so_far["tool_calls"]):
                    assert call["id"].startswith("call_")
                    assert call["type"] == "function"
                    so_far["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                so_far["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return made


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls)
    assert {call["type"] for call in calls} == {"function"}
    functions = [call["function"] for call in calls]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


BOTH = [("weather", {"place": "東京", "days": 3}), ("clock", {})]


def test_calls_that_the_model_makes(http: httpx.Client) -> None:
    (choice,) = chat(http, guided_choice=[CALLS])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert called(choice) == BOTH
    (choice,) = chat(http, guided_choice=[CALLS], parallel_tool_calls=False)["choices"]
    assert called(choice) == BOTH[:1]


def test_a_stream_of_calls(http: httpx.Client) -> None:
    found = stream(http, guided_choice=[CALLS], n=2)
    assert sorted(found) == [0, 1]
    for choice in found.values():
        assert choice["finish_reason"] == "tool_calls"
        assert choice["content"] == "I look."
        calls = [(call["name"], json.loads(call["arguments"])) for call in choice["tool_calls"]]
        assert calls == BOTH


def test_text_without_calls(http: httpx.Client) -> None:
    for text in ("No <tool is needed.", CALLS[:-20] + "x"):
        for tools in ({}, {"tool_choice": "none"}, {"tools": None}):
            if "arguments" in text and not tools:
                continue
            (choice,) = chat(http, guided_choice=[text], **tools)["choices"]
            assert choice["message"]["content"] == text
            assert choice["finish_reason"] == "stop"
            assert "tool_calls" not in choice["message"]
            assert stream(http, guided_choice=[text], **tools)[0] == {
                "content": text,
                "tool_calls": [],
                "finish_reason": "stop",
            }


@pytest.mark.parametrize("streamed", [False, True])
def test_forced_calls_of_a_beam_search_fit_the_schema(http: httpx.Client, streamed: bool) -> None:
    more: dict[str, Any] = {"tool_choice": "required", "tools": [WEATHER], "max_tokens": 100}
    more |= {"use_beam_search": True, "beam_width": 3, "n": 2, "parallel_tool_calls": False}
    if streamed:
        made = stream(http, **more).values()
        calls = [(call["name"], call["arguments"]) for each in made for call in each["tool_calls"]]
    else:
        made = chat(http, **more)["choices"]
        functions = [call["function"] for each in made for call in each["message"]["tool_calls"]]
        calls = [(function["name"], function["arguments"]) for function in functions]
    assert [each["finish_reason"] for each in made] == ["tool_calls"] * 2
    assert len(set(calls)) == len(calls) == 2
    for name, text in calls:
        arguments = json.loads(text)
        assert (name, sorted(arguments)) == ("weather", ["days", "place"])
        assert 1 <= arguments["days"] <= 14
        assert arguments["place"] in ("東京", "Paris", "the old town")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
)
def test_forced_calls_fit_the_schema(
    http: httpx.Client, choice: Any, names: set[str], streamed: bool
) -> None:
    """The random model could write anything; with the grammar it writes valid calls."""
    tools = [WEATHER]
    for seed in range(3):
        more = {"tool_choice": choice, "tools": tools, "seed": seed, "parallel_tool_calls": False}
        if streamed:
            found = stream(http, **more)[0]
            calls = [(call["name"], json.loads(call["arguments"])) for call in found["tool_calls"]]
            assert (found["content"], found["finish_reason"]) == ("", "tool_calls")
        else:
            (made,) = chat(http, **more)["choices"]
            calls = called(made)
            assert (made["message"]["content"], made["finish_reason"]) == (None, "tool_calls")
        ((name, arguments),) = calls
        assert name in names
        assert sorted(arguments) == ["days", "place"]
        assert 1 <= arguments["days"] <= 14
        assert arguments["place"] in ("東京", "Paris", "the old town")


def test_the_prompt_has_tools_and_results(http: httpx.Client) -> None:
    """Tools add prompt tokens, and the template takes a whole exchange."""
    first = chat(http, max_tokens=1)["usage"]["prompt_tokens"]
    assert first > chat(http, max_tokens=1, tool_choice="none")["usage"]["prompt_tokens"] + 100
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    talk = [
        {"role": "developer", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
    ]
    text = (
        "<|system|>Be brief.<|end|><|user|>How is it there?<|end|><|assistant|><tool_call>\n"
        '{"name": "clock", "arguments": {}}\n</tool_call><|end|><|tool|>noon<|end|><|assistant|>Oh'
    )
    kwargs = {"greeting": "Oh"}
    answer = chat(http, messages=talk, tools=None, max_tokens=1, chat_template_kwargs=kwargs)
    counted = http.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == counted.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
             "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "a", "function": {"name": "f", "arguments": "[]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    http: httpx.Client, more: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "max_tokens": 20} | more
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_every_format_can_be_chosen() -> None:
    assert ("auto", *FORMATS) == TOOL_CALL_PARSERS


def asked_tools(choice: Any, strict: bool, parallel: bool = True) -> Tools:
    weather = WEATHER | {"function": WEATHER["function"] | {"strict": strict}}
    body = {"model": "m", "messages": ASK, "tools": [weather, CLOCK], "tool_choice": choice}
    tools = parse_chat(body | {"parallel_tool_calls": parallel}).tools
    assert tools is not None
    return tools


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called(mode: str) -> None:
    """The prompt has all tools, so that it stays the same; the grammar has those allowed."""
    only_clock = {"type": "function", "function": {"name": CLOCK["function"]["name"]}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [only_clock]}}
    tools = asked_tools(choice, strict=False)
    assert len(tools.for_template) == 2
    assert [tool.function.name for tool in tools.allowed] == ["clock"]
    assert [tool.function.name for tool in tools.forced] == ["clock"] * (mode == "required")
    assert tools.held
    for format in FORMATS.values():
        form = format.constraint(tools, Marks())
        assert form is not None
        assert "weather" not in str(form)
        assert "clock" in str(form)


def test_the_format_follows_from_the_template(tool_server: LiveServer, tokenizer: Any) -> None:
    assert format_of(tool_server.text_engine.tokenizer) is FORMATS["hermes"]
    assert format_of(tokenizer) is FORMATS["hermes"], "the tools are described in a message"
    assert format_of(tokenizer, "llama") is FORMATS["llama"]


# -- the format of Llama -----------------------------------------------------------------------

LLAMA_CALLS = (
    '{"name": "weather", "parameters": {"place": "東京", "days": 3}}; '
    '{"name": "clock", "parameters": {}}'
)


@pytest.fixture(scope="module")
def llama(
    llama_tool_checkpoint: Path, live_server: type[LiveServer]
) -> Iterator[tuple[httpx.Client, LiveServer]]:
    """A server that knows from the template how the model writes calls."""
    from coppice.frontend.text.engine import TextEngine

    config = EngineConfig(
        model=str(llama_tool_checkpoint), kv_cache_tokens=16384, max_num_seqs=8, speculation="off"
    )
    server = live_server(TextEngine.load(config))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client, server
    server.until_idle()
    server.close()


def test_calls_in_the_format_of_llama(llama: tuple[httpx.Client, LiveServer]) -> None:
    http, server = llama
    assert format_of(server.text_engine.tokenizer) is FORMATS["llama"]
    (choice,) = chat(http, guided_choice=[LLAMA_CALLS])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert called(choice) == BOTH
    (choice,) = chat(http, guided_choice=[LLAMA_CALLS], parallel_tool_calls=False)["choices"]
    assert called(choice) == BOTH[:1]
    for found in stream(http, guided_choice=[LLAMA_CALLS], n=2).values():
        assert (found["content"], found["finish_reason"]) == ("", "tool_calls")
        calls = [(call["name"], json.loads(call["arguments"])) for call in found["tool_calls"]]
        assert calls == BOTH


@pytest.mark.parametrize("text", ["It is noon.", '{"place": "Paris"}', "See {x}; {y}."])
def test_text_in_the_format_of_llama(llama: tuple[httpx.Client, LiveServer], text: str) -> None:
    http, _ = llama
    (choice,) = chat(http, guided_choice=[text])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    found = stream(http, guided_choice=[text])[0]
    assert found == {"content": text, "tool_calls": [], "finish_reason": "stop"}


def test_forced_calls_in_the_format_of_llama(llama: tuple[httpx.Client, LiveServer]) -> None:
    """They fit the schema, and the template takes the exchange."""
    http, _ = llama
    more = {"tool_choice": "required", "tools": [WEATHER], "parallel_tool_calls": False}
    for seed in range(2):
        (choice,) = chat(http, seed=seed, **more)["choices"]
        found = stream(http, seed=seed, **more)[0]
        calls = [(call["name"], json.loads(call["arguments"])) for call in found["tool_calls"]]
        assert calls == called(choice), "of one seed"
        ((name, arguments),) = calls
        assert name == "weather"
        assert arguments["place"] in ("東京", "Paris", "the old town")
        assert 1 <= arguments["days"] <= 14
    call = choice["message"]["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
    talk = [*ASK, choice["message"], result]
    answer = chat(http, messages=talk, tools=None, max_tokens=1)
    text = (
        '<|user|>How is it there?<|end|><|assistant|>{"name": "weather", "parameters": '
        f"{json.dumps(arguments, ensure_ascii=False)}}}<|end|><|tool|>sun<|end|><|assistant|>"
    )
    counted = http.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == counted.json()["usage"]["prompt_tokens"]
