"""litellm, which turns the requests of many APIs into OpenAI's."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.clients.talk import CALL, HELLO, LOOSE, TOOLS, Weather

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network for prices otherwise

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer


@pytest.mark.client("litellm", "/v1/chat/completions", "text", "stream", "tools", "errors")
@pytest.mark.slow
async def test_litellm(tool_server: LiveServer) -> None:
    import litellm

    common: dict[str, Any] = {
        "model": "openai/tiny",
        "api_base": tool_server.url + "/v1",
        "api_key": "none",
        "num_retries": 0,
    }
    made = litellm.completion(messages=HELLO, max_tokens=7, temperature=0, **common)
    text = made.choices[0].message.content
    assert text
    assert made.usage.completion_tokens == 7
    chunks = litellm.completion(messages=HELLO, max_tokens=7, temperature=0, stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    stream = await litellm.acompletion(
        messages=HELLO, max_tokens=7, temperature=0, stream=True, **common
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text
    # In an answer, in a stream, and in the client's own message that goes back with a result.
    dictated: dict[str, Any] = {"tools": LOOSE, "extra_body": {"guided_choice": [CALL]}}
    wanted = {"place": "Paris", "days": 3}
    made = litellm.completion(messages=HELLO, max_tokens=300, **dictated, **common)
    (choice,) = made.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("Weather", wanted)
    stream = await litellm.acompletion(
        messages=HELLO, max_tokens=300, stream=True, **dictated, **common
    )
    chunks = [chunk async for chunk in stream]
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [json.loads(each.function.arguments) for each in built] == [wanted]
    talk = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    after = litellm.completion(messages=talk, tools=LOOSE, max_tokens=2, **common)
    assert after.usage.completion_tokens <= 2
    forced = litellm.completion(
        messages=HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=300, seed=2, **common,
    )  # fmt: skip
    arguments = forced.choices[0].message.tool_calls[0].function.arguments
    Weather.model_validate_json(arguments)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=HELLO, temperature=-1, **common)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=HELLO, **common | {"model": "openai/other"})


@pytest.mark.slow
@pytest.mark.client("litellm", "/v1/chat/completions", "errors")
def test_litellm_falls_back_when_a_prompt_is_too_long(tool_server: LiveServer) -> None:
    import litellm

    here = {"model": "openai/tiny", "api_base": tool_server.url + "/v1", "api_key": "none"}
    elsewhere = {"model": "openai/large", "api_key": "none", "mock_response": "from the large one"}
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": here},
            {"model_name": "large", "litellm_params": elsewhere},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    longest = tool_server.engine.max_model_len
    long: Any = [{"role": "user", "content": "key " * longest}]
    made = router.completion(model="small", messages=long, max_tokens=4)
    assert made.choices[0].message.content == "from the large one"
    assert router.completion(model="small", messages=HELLO, max_tokens=4).usage.completion_tokens
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, num_retries=0, **here)
