"""/v1/messages over plain HTTP: shapes, events, errors, and what is kept in the cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coppice.frontend.api.anthropic.schemas import MessageAnswer
from coppice.frontend.text.engine import TextEngine
from coppice.runtime.config import EngineConfig
from tests.frontend.pieces import in_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.conftest import LiveServer

USER: Any = [{"role": "user", "content": "Where is the key?"}]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["東京", "Paris"]}, "days": {"type": "integer"}},
    "required": ["place", "days"],
}
TOOLS: Any = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Paris", "days": 3}}\n</tool_call>'
MARK = {"type": "ephemeral"}
LONG = " ".join(f"The key is under the mat of house {7 * number}." for number in range(14))


class Messages:
    """Requests to one server."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=60)

    def post(self, path: str = "", headers: Any = None, **body: Any) -> httpx.Response:
        whole = {"model": "tiny", "max_tokens": 8, "messages": USER} | body
        given = {name: value for name, value in whole.items() if value is not None}
        return self.http.post(f"/v1/messages{path}", json=given, headers=headers)

    def ok(self, **body: Any) -> Any:
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        MessageAnswer.model_validate(answer.json(), strict=True)
        return answer.json()

    def events(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.post(stream=True, **body)
        assert answer.status_code == 200, answer.text
        events = []
        for block in answer.text.strip().split("\n\n"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    def count(self, **body: Any) -> int:
        answer = self.post("/count_tokens", max_tokens=None, **body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["input_tokens"])

    def pins(self) -> list[Any]:
        return list(self.server.run(self.server.engine.ask("list_pins")))


@pytest.fixture(scope="module")
def messages(tool_server: LiveServer) -> Messages:
    return Messages(tool_server)


@pytest.fixture
def small(live_server: type[LiveServer], tool_checkpoint: Path) -> Iterator[Messages]:
    """A server with a cache of 2,048 tokens, half of which pins may keep."""
    config = EngineConfig(
        model=str(tool_checkpoint), kv_cache_tokens=2048, page_size=16, max_num_seqs=8,
        pin_budget=0.5,
    )  # fmt: skip
    server = live_server(TextEngine.load(config), api_key=("ann=a", "bob=b"))
    messages = Messages(server)
    messages.http.headers["X-Api-Key"] = "a"
    yield messages
    server.until_idle()
    server.close()


def dictated(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 400}


def parts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt that were read from the cache, created in it, and neither."""
    names = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
    read, created, rest = (usage[name] for name in names)
    return read, created, rest


def test_a_message(messages: Messages) -> None:
    made = messages.ok(temperature=0, system="Be brief.")
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "tiny")
    assert (made["stop_reason"], made["stop_sequence"]) == ("max_tokens", None)
    (block,) = made["content"]
    assert block["type"] == "text"
    assert made["usage"]["output_tokens"] == 8
    again = messages.ok(temperature=0, system=[{"type": "text", "text": "Be brief."}])
    assert again["content"] == made["content"]
    read, created, rest = parts(again["usage"])
    assert (created, rest) == (0, 1)
    assert read + 1 == sum(parts(made["usage"])) == messages.count(system="Be brief.")


def test_how_it_stops(messages: Messages) -> None:
    said = messages.ok(stop_sequences=["mat"], **dictated("Under the mat."))
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "mat")
    assert said["content"][0]["text"] == "Under the "
    assert messages.ok(**dictated("Under it."))["stop_reason"] == "end_turn"
    longest = messages.server.engine.max_model_len
    full = messages.ok(max_tokens=10**6, ignore_eos=True, messages=[
        {"role": "user", "content": "brown fox " * (longest // 4)}])  # fmt: skip
    assert full["stop_reason"] == "model_context_window_exceeded"


def test_an_answer_is_continued(messages: Messages) -> None:
    begun = [*USER, {"role": "assistant", "content": "Under the"}]
    asked = messages.ok(messages=begun, temperature=0, max_tokens=4)
    whole = messages.server.engine.tokenizer
    assert sum(parts(asked["usage"])) == messages.count(messages=begun)
    assert messages.count(messages=begun) > messages.count() + len(whole.encode("Under"))


def deltas_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == "content_block_delta"]


def test_the_events_of_a_text(messages: Messages) -> None:
    text = " ".join(["Under the mat, by the door."] * 10)
    events = in_pieces(lambda: messages.events(**dictated(text)), deltas_of, 3)
    kinds = [event["type"] for event in events]
    deltas = deltas_of(events)
    assert kinds == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * len(deltas),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(each["delta"]["text"] for each in deltas) == text
    begun, end = events[0]["message"], events[-2]
    assert begun["content"] == []
    assert begun["stop_reason"] is None
    assert parts(begun["usage"]) == parts(end["usage"])
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] > 2


def test_calls(messages: Messages) -> None:
    place = " ".join(["Paris, by the river"] * 6)
    said = dictated(f"I look.\n{CALL.replace('Paris', place)}\n{CALL}")
    made = messages.ok(tools=TOOLS, **said)
    assert made["stop_reason"] == "tool_use"
    text, call, other = made["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (call["name"], call["input"]) == ("weather", {"place": place, "days": 3})
    assert call["id"] != other["id"]

    def inputs_of(events: list[dict[str, Any]]) -> list[str]:
        """The pieces of the first call's arguments."""
        deltas = [each["delta"] for each in deltas_of(events) if each["index"] == 1]
        return [delta["partial_json"] for delta in deltas]

    events = in_pieces(lambda: messages.events(tools=TOOLS, **said), inputs_of, 3)
    starts = [each for each in events if each["type"] == "content_block_start"]
    assert [each["content_block"]["type"] for each in starts] == ["text", "tool_use", "tool_use"]
    assert [each["index"] for each in starts] == [0, 1, 2]
    assert starts[1]["content_block"]["input"] == {}
    assert json.loads("".join(inputs_of(events))) == call["input"]
    results = [
        {"type": "tool_result", "tool_use_id": each["id"], "content": "sun"}
        for each in (call, other)
    ]
    talk = [*USER, {"role": "assistant", "content": made["content"]}]
    talk.append({"role": "user", "content": results})
    after = messages.ok(tools=TOOLS, messages=talk)
    assert sum(parts(after["usage"])) > sum(parts(made["usage"]))


def test_a_call_that_is_cut_can_be_sent_back(messages: Messages) -> None:
    made = messages.ok(tools=TOOLS, **(dictated(CALL) | {"max_tokens": 60}))
    assert made["stop_reason"] == "max_tokens"
    (call,) = made["content"]
    assert call["type"] == "tool_use"
    assert call["input"].keys() <= {"place", "days"}
    result = [{"type": "tool_result", "tool_use_id": call["id"], "content": "?"}]
    talk = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": result}]
    messages.ok(tools=TOOLS, messages=talk)


def test_a_call_that_must_be_made(messages: Messages) -> None:
    choice = {"type": "tool", "name": "weather"}
    made = messages.ok(tools=TOOLS, tool_choice=choice, max_tokens=300)
    (call,) = made["content"]
    assert call["input"]["place"] in ("東京", "Paris")
    schema = {"type": "json_schema", "schema": SCHEMA}
    made = messages.ok(output_config={"format": schema}, max_tokens=300)
    # The schema allows others, too, and the model draws.
    assert json.loads(made["content"][0]["text"]).keys() >= {"place", "days"}


def test_errors_are_of_anthropics_shape(messages: Messages, small: Messages) -> None:
    answer = messages.post(temperature=-1)
    error = answer.json()
    assert (answer.status_code, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert "temperature" in error["error"]["message"]
    assert error["request_id"] == answer.headers["X-Request-Id"]
    assert messages.post(model="other").json()["error"]["type"] == "not_found_error"
    for version, status in (("2023-01-01", 400), ("x", 400), ("2023-06-01", 200)):
        answer = messages.post(headers={"anthropic-version": version})
        assert answer.status_code == status
        assert status == 200 or "anthropic-version" in answer.json()["error"]["message"]
    answer = small.post(headers={"X-Api-Key": "c"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert messages.http.post("/v1/messages", content=b"{").json()["type"] == "error"


def test_a_prompt_that_is_too_long(messages: Messages) -> None:
    longest = messages.server.engine.max_model_len
    for body in ({}, {"stream": True}):
        long = [{"role": "user", "content": "brown fox " * longest}]
        answer = messages.post(messages=long, **body)
        assert answer.status_code == 400
        expected = rf"prompt is too long: (more than )?\d+ tokens > {longest} maximum"
        assert re.fullmatch(expected, answer.json()["error"]["message"])


def test_marked_prefixes_are_kept(small: Messages) -> None:
    system = [{"type": "text", "text": LONG, "cache_control": MARK}]
    first = small.ok(system=system)
    read, created, rest = parts(first["usage"])
    assert read == 0
    whole = sum(parts(first["usage"]))
    assert whole == small.count(system=LONG)
    (pin,) = small.pins()
    assert pin.cached_tokens == pin.num_tokens == created
    assert pin.ttl == 300
    assert created > 100
    assert 1 < rest < 40
    assert first["usage"]["cache_creation"] == {
        "ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0,
    }  # fmt: skip
    other = [{"role": "user", "content": "And what about the other one?"}]
    second = small.ok(system=system, messages=other)
    assert parts(second["usage"])[:2] == (created, 0) or parts(second["usage"])[0] > created
    assert sum(parts(second["usage"])) == small.count(system=LONG, messages=other)
    # Other prompts fill the cache many times; the prefix is still there.
    for number in range(12):
        noise = [{"role": "user", "content": f"{number} " + "brown fox jumps over " * 40}]
        small.ok(messages=noise)
    last = small.events(system=system, messages=[{"role": "user", "content": "Well?"}])
    assert parts(last[0]["message"]["usage"])[0] >= created
    assert parts(last[-2]["usage"])[1] == 0


def test_times_and_conversations(small: Messages) -> None:
    """A longer prefix takes the place of those in it, but not of one with a longer time."""
    hour = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": LONG[:200], "cache_control": hour}]
    talk: list[Any] = []
    for turn in ("Where?", "Why?", "Who?"):
        talk.append({"role": "user", "content": turn})
        made = small.ok(system=system, messages=talk, cache_control=MARK)
        talk.append({"role": "assistant", "content": made["content"]})
        usage = made["usage"]
        details = usage["cache_creation"]
        assert sum(details.values()) == usage["cache_creation_input_tokens"]
        assert (details["ephemeral_1h_input_tokens"] > 0) == (turn == "Where?")
        assert details["ephemeral_5m_input_tokens"] > 0
        assert usage["input_tokens"] < 20
    pins = sorted(small.pins(), key=lambda pin: pin.num_tokens)
    assert [pin.ttl for pin in pins] == [3600, 300]
    assert pins[1].num_tokens > pins[0].num_tokens
    assert [pin.cached_tokens for pin in pins] == [pin.num_tokens for pin in pins]


def test_what_finds_no_room_is_not_kept(small: Messages) -> None:
    long = [{"type": "text", "text": LONG * 8, "cache_control": MARK}]  # more than the budget
    made = small.ok(system=long)
    assert parts(made["usage"])[:2] == (0, 0)
    assert small.pins() == []
    short = [{"type": "text", "text": LONG, "cache_control": MARK}, *long]
    made = small.ok(system=short)
    (pin,) = small.pins()
    assert pin.num_tokens < 600
    read, created, _ = parts(made["usage"])
    assert created == max(0, pin.num_tokens - read)


def test_a_key_gives_up_its_own_older_prefixes(small: Messages) -> None:
    def keep(words: str, key: str) -> int:
        system = [{"type": "text", "text": f"{words} {LONG} {LONG}", "cache_control": MARK}]
        answer = small.post(system=system, headers={"X-Api-Key": key})
        return parts(answer.json()["usage"])[1]

    assert keep("bob", "b") > 0
    assert keep("first", "a") > 0
    assert keep("second", "a") > 0
    assert keep("third", "a") > 0
    names = [pin.name for pin in small.pins()]
    assert sum(" bob " in name for name in names) == 1
    assert sum(" ann " in name for name in names) == 1


def test_kept_prefixes_make_room_for_a_request(small: Messages) -> None:
    system = [{"type": "text", "text": LONG, "cache_control": MARK}]
    small.ok(system=system)
    assert len(small.pins()) == 1
    long = [{"role": "user", "content": "brown fox jumps over the lazy dog " * 196}]
    tokens = small.count(messages=long)
    pool = 2048
    (pin,) = small.pins()
    assert pool - pin.num_tokens < tokens < pool, "it fits only without the pin"
    assert small.post(messages=long, headers={"X-Api-Key": "b"}).status_code == 200
    assert small.pins() == []


def test_only_the_cache_is_filled(small: Messages) -> None:
    system = [{"type": "text", "text": LONG, "cache_control": MARK}]
    made = small.ok(system=system, max_tokens=0)
    assert made["content"] == []
    assert made["stop_reason"] == "max_tokens"
    assert made["usage"]["output_tokens"] == 0
    assert parts(made["usage"])[1] > 100
    again = small.ok(system=system)
    assert parts(again["usage"])[0] >= parts(made["usage"])[1]
