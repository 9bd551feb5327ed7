"""/v1/messages with Anthropic's own client, whose models check answers and events."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pytest

from coppice.frontend.api.anthropic.body import MessagesBody, PromptBody
from tests.frontend.pieces import in_pieces

anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client")

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

USER: Any = [{"role": "user", "content": "Where is the key?"}]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["東京", "Paris"]}, "days": {"type": "integer"}},
    "required": ["place", "days"],
}
TOOLS: Any = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Paris", "days": 3}}\n</tool_call>'
BESIDE = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.fixture(scope="module")
def client(tool_server: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0) as client:
        yield client


def checked(message: Any) -> Any:
    """The message, whose every field the client's strict model accepts."""
    return type(message).model_validate(message.to_dict(), strict=True)


def dictated(text: str) -> Any:
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 400}


def test_every_parameter_of_the_client_is_known(client: Any) -> None:
    parameters = set(inspect.signature(client.messages.create).parameters) - BESIDE
    assert {"thinking", "tools"} < parameters
    assert parameters <= set(MessagesBody.model_fields)
    counted = set(inspect.signature(client.messages.count_tokens).parameters) - BESIDE
    assert counted - {"output_format"} <= set(PromptBody.model_fields)  # the client moves it


def test_a_message(client: Any) -> None:
    made = checked(
        client.messages.create(model="tiny", max_tokens=8, messages=USER, system="Be brief.")
    )
    assert made.stop_reason == "max_tokens"
    assert made.content[0].text
    counted = client.messages.count_tokens(model="tiny", messages=USER, system="Be brief.")
    usage = made.usage
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert sum(parts) == counted.input_tokens


def test_a_stream(client: Any) -> None:
    def asked() -> tuple[list[str], Any]:
        with client.messages.stream(
            model="tiny", messages=USER, **dictated("Under the mat, by the door.")
        ) as stream:
            return list(stream.text_stream), checked(stream.get_final_message())

    pieces, final = in_pieces(asked, itemgetter(0))
    assert "".join(pieces) == final.content[0].text == "Under the mat, by the door."
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 2


def test_tools(client: Any) -> None:
    common: Any = {"model": "tiny", "tools": TOOLS}
    with client.messages.stream(messages=USER, **common, **dictated(f"I look.\n{CALL}")) as stream:
        kinds = {event.type for event in stream}
        made = checked(stream.get_final_message())
    assert "input_json" in kinds
    assert made.stop_reason == "tool_use"
    call = made.content[1]
    assert call.input == {"place": "Paris", "days": 3}
    # The client's own blocks go back, followed by the tool's result.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    talk = [*USER, {"role": "assistant", "content": made.content}]
    talk.append({"role": "user", "content": [result]})
    after = client.messages.create(messages=talk, max_tokens=4, **common)
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > 0
    forced = client.messages.create(
        messages=USER, max_tokens=300, tool_choice={"type": "any"}, **common
    )
    assert forced.content[0].type == "tool_use"
    assert forced.content[0].input.keys() == {"place", "days"}


def test_marks_of_prefixes(client: Any) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": "Be brief and kind. " * 9, "cache_control": mark}]
    asked: Any = {"model": "tiny", "max_tokens": 2, "system": system}
    first = client.messages.create(messages=USER, **asked).usage
    other: Any = [{"role": "user", "content": "Which other?"}]
    second = client.messages.create(messages=other, **asked).usage
    assert first.cache_creation_input_tokens == first.cache_creation.ephemeral_1h_input_tokens > 50
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens


async def test_async_and_errors(tool_server: LiveServer) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=tool_server.url, api_key="none", max_retries=0
    ) as client:
        async with client.messages.stream(model="tiny", max_tokens=5, messages=USER) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert text
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=5, messages=USER)
        longest = tool_server.engine.max_model_len
        long: Any = [{"role": "user", "content": "brown fox " * longest}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as refused:
            await client.messages.create(model="tiny", max_tokens=5, messages=long)
        assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_keys(live_server: type[LiveServer], text_engine: Any) -> None:
    server = live_server(text_engine, api_key=("me=secret",))
    wrong = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model="tiny", max_tokens=2, messages=USER)
    right = wrong.with_options(api_key="secret")
    assert right.messages.create(model="tiny", max_tokens=2, messages=USER).content
    server.close()
