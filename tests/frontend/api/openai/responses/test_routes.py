"""/v1/responses with OpenAI's own client, whose models check every answer and event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from tests.frontend.pieces import in_pieces

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"place": "Paris", "days": 3}}\n</tool_call>'
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


class Weather(BaseModel):
    """The weather at a place."""

    place: Literal["東京", "Paris"]
    days: int = Field(ge=1, le=14)


TOOLS: Any = [
    {
        "type": "function",
        "name": "Weather",
        "description": "The weather at a place.",
        "parameters": Weather.model_json_schema(),
    }
]


@pytest.fixture(scope="module")
def client(tool_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tool_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def dictated(*texts: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": list(texts)}}


def checked(response: Response) -> Response:
    """The response, whose every field the client's strict model accepts."""
    return Response.model_validate(response.to_dict(), strict=True)


def test_a_text(client: openai.OpenAI) -> None:
    made = checked(
        client.responses.create(
            model="tiny", input="Where is the key?", instructions="Be brief.", temperature=0,
            max_output_tokens=9, metadata={"a": "b"}, top_logprobs=2, user="me",
        )
    )  # fmt: skip
    assert (made.status, made.object) == ("incomplete", "response")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output_text
    (item,) = made.output
    assert item.type == "message"
    assert item.status == "incomplete"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 9
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * 9
    assert made.usage is not None
    assert made.usage.output_tokens == 9
    assert made.usage.total_tokens == made.usage.input_tokens + 9
    assert (made.metadata, made.instructions, made.temperature) == ({"a": "b"}, "Be brief.", 0)
    again = client.responses.create(
        model="tiny", input=[{"role": "user", "content": "Where is the key?"}],
        instructions="Be brief.", temperature=0, max_output_tokens=9,
    )  # fmt: skip
    assert again.output_text == made.output_text
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == made.usage.input_tokens - 1


def test_the_events_of_a_text(client: openai.OpenAI, tool_server: LiveServer) -> None:
    text = " ".join(["Under the mat."] * 15)
    body = {
        "model": "tiny", "input": "Where?", "stream": True, "max_output_tokens": 300,
        "structured_outputs": {"choice": [text]}, "top_logprobs": 0,
    }  # fmt: skip

    def asked() -> list[dict[str, Any]]:
        events = []
        with httpx.stream("POST", tool_server.url + "/v1/responses", json=body) as answer:
            for block in answer.read().decode().strip().split("\n\n"):
                name, data = block.split("\n")
                event = json.loads(data.removeprefix("data: "))
                assert name == f"event: {event['type']}"
                EVENTS.validate_python(event, strict=True)
                events.append(event)
        return events

    def deltas_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in events if event["type"] == "response.output_text.delta"]

    events = in_pieces(asked, deltas_of)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = deltas_of(events)
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in deltas) == text
    assert all(event["logprobs"] for event in deltas)
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == text
    assert final["usage"]["output_tokens"] == sum(len(event["logprobs"]) for event in deltas)
    assert events[2]["item"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    assert client.responses.retrieve(final["id"]).to_dict() == final


def test_a_stream_through_the_client(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input="Where?", text_format=Weather, max_output_tokens=300
    ) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Weather)
    assert Weather.model_validate_json(text) == final.output_parsed


def test_a_stream_that_is_cut_ends_with_incomplete(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="tiny", input="Go", max_output_tokens=3, stream=True)
    last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    said = f"I look.\n{CALL}\n{CALL}"
    made = checked(
        client.responses.create(
            model="tiny", input="Weather?", tools=TOOLS, max_output_tokens=400,
            extra_body=dictated(said),
        )
    )  # fmt: skip
    assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
    assert made.status == "completed"
    call = made.output[1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"place": "Paris", "days": 3}
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
        for item in made.output
        if item.type == "function_call"
    ]
    common: Any = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_output_tokens": 5}
    # By what the client sends again, and by what the server remembers.
    talk: Any = [{"role": "user", "content": "Weather?"}, *made.output, *results]
    sent = client.responses.create(input=talk, **common)
    kept = client.responses.create(input=results, previous_response_id=made.id, **common)
    assert sent.output_text == kept.output_text
    assert sent.usage is not None
    assert kept.usage is not None
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert kept.previous_response_id == made.id


def test_the_events_of_calls(client: openai.OpenAI) -> None:
    def asked() -> tuple[list[Any], list[Any], Response]:
        with client.responses.stream(
            model="tiny", input="Weather?", tools=TOOLS, max_output_tokens=400,
            extra_body=dictated(f"I look.\n{CALL}"),
        ) as stream:  # fmt: skip
            events = list(stream)
            final = stream.get_final_response()
        kind = "response.function_call_arguments.delta"
        return [event for event in events if event.type == kind], events, final

    deltas, events, final = in_pieces(asked, itemgetter(0), 4)
    kinds = [event.type.removeprefix("response.") for event in events]
    first = kinds.index("output_item.done")
    call = [kind for kind in kinds[first + 1 :] if kind != "function_call_arguments.delta"]
    assert call == [
        "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert json.loads("".join(each.delta for each in deltas)) == {"place": "Paris", "days": 3}
    assert {each.output_index for each in deltas} == {1}
    assert final.output[1].id == deltas[0].item_id


def test_a_call_that_must_be_made(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="tiny", input="Weather?", tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=300,
    )  # fmt: skip
    (call,) = made.output
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)


def test_a_conversation_in_the_servers_memory(client: openai.OpenAI) -> None:
    common: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input="Where is the key?", **common)
    second = client.responses.create(input="And now?", previous_response_id=first.id, **common)
    third = client.responses.create(input="Why?", previous_response_id=second.id, **common)
    talk: Any = []
    for question, made in (("Where is the key?", first), ("And now?", second)):
        talk += [{"role": "user", "content": question}, *made.output]
    talk.append({"role": "user", "content": "Why?"})
    whole = client.responses.create(input=talk, store=False, **common)
    assert whole.output_text == third.output_text
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens
    newest = client.responses.input_items.list(third.id, limit=2)
    assert [item.type for item in newest.data] == ["message", "message"]
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == [
        "Where is the key?", first.output_text, "And now?", second.output_text, "Why?",
    ]  # fmt: skip
    reference: Any = [{"type": "item_reference", "id": items[0].id}]
    assert client.responses.create(input=reference, **common).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(input="x", previous_response_id=first.id, **common)
    assert gone.value.code == "previous_response_not_found"
    again = client.responses.create(input="Why?", previous_response_id=second.id, **common)
    assert again.output_text == third.output_text


def test_what_is_not_stored_cannot_be_found(client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input="x", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)


def test_cancel_and_streams_of_old_responses_are_refused(client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input="x", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")
    with pytest.raises(openai.BadRequestError, match="stream"):
        list(client.responses.retrieve(made.id, stream=True))


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Where is the key?", "tools": TOOLS}
    counted = client.responses.input_tokens.count(**asked)
    made = client.responses.create(max_output_tokens=1, **asked)
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens


def test_what_is_too_long(client: openai.OpenAI, tool_server: LiveServer) -> None:
    """It is refused, or shortened from its beginning if that is asked for."""
    longest = tool_server.engine.max_model_len
    old: Any = [
        {"role": role, "content": f"{number} " + "brown fox " * 60}
        for number in range(longest // 100)
        for role in ("user", "assistant")
    ]
    asked: Any = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 40}
    asked["input"] = [*old, {"role": "user", "content": "Where is the key?"}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    made = client.responses.create(truncation="auto", **asked)
    assert made.usage is not None
    assert longest // 2 < made.usage.input_tokens <= longest - 40
    asked["input"] = "brown fox " * longest
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(truncation="auto", **asked)


def test_every_parameter_of_the_client_is_known(client: openai.OpenAI) -> None:
    import inspect

    from coppice.frontend.api.openai.responses.body import ResponsesBody

    parameters = set(inspect.signature(client.responses.create).parameters)
    beside = {"extra_headers", "extra_query", "extra_body", "timeout"}
    assert parameters - beside <= set(ResponsesBody.model_fields)


def test_keys_have_memories_of_their_own(live_server: type[LiveServer], text_engine: Any) -> None:
    server = live_server(text_engine, api_key=("me=secret", "you=other"))
    mine = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
    yours = mine.with_options(api_key="other")
    made = mine.responses.create(model="tiny", input="Where?", max_output_tokens=2)
    assert mine.responses.retrieve(made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        yours.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError):
        yours.responses.create(model="tiny", input="And?", previous_response_id=made.id)
    server.close()


def test_a_server_without_memory(live_server: type[LiveServer], text_engine: Any) -> None:
    server = live_server(text_engine, response_memory=0)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    made = client.responses.create(model="tiny", input="Where?", max_output_tokens=2)
    with pytest.raises(openai.NotFoundError, match="--response-memory is 0"):
        client.responses.retrieve(made.id)
    server.close()
