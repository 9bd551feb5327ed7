"""OpenAI's own client, over a real socket."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import openai
import pytest

from coppice.frontend.api.openai.requests import ChatBody, CompletionBody
from tests.frontend.clients.talk import CALL, HELLO, LOOSE, PROMPT, TOOLS, Weather
from tests.frontend.pieces import in_pieces

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer


@pytest.fixture(scope="module")
def client(tool_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tool_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def connect(server: LiveServer, **more: Any) -> openai.AsyncOpenAI:
    options = {"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0} | more
    return openai.AsyncOpenAI(**options)


def test_every_parameter_of_the_client_is_known(client: openai.OpenAI) -> None:
    """Each is followed or refused by name, so all must be known."""
    calls = ((client.completions, CompletionBody), (client.chat.completions, ChatBody))
    for endpoint, body in calls:
        parameters = set(inspect.signature(endpoint.create).parameters)
        assert {"stream", "seed"} < parameters
        asked = parameters - {"extra_headers", "extra_query", "extra_body", "timeout"}
        assert asked <= set(body.model_fields)


@pytest.mark.client("openai", "/v1/completions", "text", "stream")
def test_completions(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2, echo=True
    )
    (choice,) = made.choices
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert made.usage is not None
    assert len(choice.logprobs.tokens) == made.usage.total_tokens
    again = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(again)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert PROMPT + text == choice.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == made.usage.prompt_tokens - 1


@pytest.mark.client("openai", "/v1/chat/completions", "text", "stream")
def test_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=9, temperature=0, logprobs=True,
        top_logprobs=1, user="me", metadata={"a": "b"},
    )  # fmt: skip
    (choice,) = made.choices
    assert choice.message.content
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 9
    assert [model.id for model in client.models.list()] == ["tiny"]
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, max_completion_tokens=9, temperature=0
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        with pytest.raises(openai.LengthFinishReasonError):  # how the client reports it
            stream.get_final_completion()
    assert "".join(pieces) == choice.message.content


@pytest.mark.client("openai", "/v1/chat/completions", "schema")
def test_structured_answers(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Weather, max_tokens=300, seed=1
    )
    found = made.choices[0].message.parsed
    assert isinstance(found, Weather)
    text = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=300, extra_body={"guided_regex": "[ab]{3}"}
    )
    assert set(text.choices[0].message.content or "") <= {"a", "b"}


@pytest.mark.client("openai", "/v1/chat/completions", "tools")
def test_tools(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="tiny", messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=300, seed=2,
        parallel_tool_calls=False,
    )  # fmt: skip
    (choice,) = made.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    # The client's own message goes back, followed by the tool's result.
    talk = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    after = client.chat.completions.create(model="tiny", messages=talk, tools=TOOLS, max_tokens=2)
    assert after.usage is not None
    assert made.usage is not None
    assert after.usage.prompt_tokens > made.usage.prompt_tokens

    def asked() -> tuple[list[str], Any]:
        with client.chat.completions.stream(
            model="tiny", messages=HELLO, tools=LOOSE, max_tokens=300,
            extra_body={"guided_choice": [CALL]},
        ) as stream:  # fmt: skip
            kind = "tool_calls.function.arguments.delta"
            pieces = [event.arguments_delta for event in stream if event.type == kind]
            return pieces, stream.get_final_completion().choices[0]

    pieces, final = in_pieces(asked, itemgetter(0), 4)
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == "".join(pieces)
    assert Weather.model_validate_json("".join(pieces)) == Weather(place="Paris", days=3)


@pytest.mark.client("openai", "/v1/completions", "errors")
def test_errors_are_of_the_right_class(client: openai.OpenAI, tool_server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model="tiny", prompt=PROMPT, max_tokens=4000, extra_body={"ignore_eos": True}
        )
    tool_server.until_idle()


def test_keys(live_server: type[LiveServer], text_engine: Any) -> None:
    server = live_server(text_engine, api_key=("me=secret",))
    wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    right = wrong.with_options(api_key="secret")
    assert [model.id for model in right.models.list()] == ["tiny"]
    server.close()


async def test_async_streams_and_cancellation(tool_server: LiveServer) -> None:
    async with connect(tool_server) as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=6 + number, temperature=0, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        texts = await asyncio.gather(*(one(number) for number in range(6)))
        assert all(b.startswith(a.rstrip("\ufffd")) for a, b in pairwise(texts))
        endless: Any = {"max_tokens": 4000, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(model="tiny", prompt=PROMPT, **endless)
        async for _ in stream:
            break
        await stream.close()
        task = asyncio.create_task(
            client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=4000, extra_body={"ignore_eos": True}
            )
        )
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    start = time.monotonic()
    await asyncio.to_thread(tool_server.until_idle)
    assert time.monotonic() - start < 10
    report = tool_server.run(tool_server.engine.ask("cache_report"))
    assert report.pages_held == 0


@pytest.mark.client("openai", "/v1/chat/completions", "errors")
async def test_async_errors(tool_server: LiveServer) -> None:
    async with connect(tool_server) as client:
        with pytest.raises(openai.BadRequestError, match="tools"):
            await client.chat.completions.create(
                model="tiny", messages=HELLO, tool_choice="required"
            )
    async with connect(tool_server, base_url="http://127.0.0.1:9/v1") as client:
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()


@pytest.mark.client("openai", "/v1/completions", "errors")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [0, 1, 70_000])
def test_a_prompt_that_is_too_long(
    client: openai.OpenAI, tool_server: LiveServer, more: int, stream: bool
) -> None:
    longest = tool_server.engine.max_model_len
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=[5] * (longest + more), stream=stream)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    beginning = f"This model's maximum context length is {longest} tokens. However, your prompt "
    assert f"{beginning}resulted in {longest + more} tokens" in str(refused.value)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 20 * longest}], stream=stream
        )
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
