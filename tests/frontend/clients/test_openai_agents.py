"""OpenAI's library of agents, over chat completions and over responses."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import agents
import openai
import pytest
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel

from tests.frontend.clients.talk import Days, Place, Weather
from tests.frontend.pieces import in_pieces_async

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer


@pytest.fixture(autouse=True)
def without_traces() -> None:
    """It would send traces of each run to its maker."""
    agents.set_tracing_disabled(True)
    return


def chat_model(server: LiveServer) -> Any:
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    return OpenAIChatCompletionsModel("tiny", client)


def responses_model(server: LiveServer) -> Any:
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    return OpenAIResponsesModel("tiny", client)


def settings(**more: Any) -> agents.ModelSettings:
    return agents.ModelSettings(max_tokens=300, temperature=0.0, **more)


async def texts_of(streamed: Any) -> list[str]:
    return [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]


async def talk(model: Any) -> None:
    agent = agents.Agent("brief", "Be brief.", model=model, model_settings=settings())
    made = await agents.Runner.run(agent, "Where?")
    assert made.final_output
    assert made.context_wrapper.usage.output_tokens > 0
    streamed = agents.Runner.run_streamed(agent, "Where?")
    pieces = await texts_of(streamed)
    assert "".join(pieces) == made.final_output == streamed.final_output


async def stream_a_schema(model: Any) -> None:
    """Over responses the library takes an answer that reaches its limit for a failure."""
    agent = agents.Agent(
        "forecaster", "Answer.", model=model, output_type=Weather, model_settings=settings()
    )

    async def asked() -> tuple[list[str], Any]:
        streamed = agents.Runner.run_streamed(agent, "Where?")
        return await texts_of(streamed), streamed

    pieces, streamed = await in_pieces_async(asked, itemgetter(0))
    assert Weather.model_validate_json("".join(pieces)) == streamed.final_output


async def call_tools(model: Any) -> None:
    """The model must call a tool in its first turn; the result is sent back in its second."""
    asked: list[Weather] = []

    @agents.function_tool
    def weather(place: Place, days: Days) -> str:
        """The weather at a place.

        Args:
            place: where.
            days: how many days ahead.
        """
        asked.append(Weather.model_construct(place=place, days=days))
        return "sun"

    agent = agents.Agent(
        "forecaster",
        "Use the tool.",
        model=model,
        tools=[weather],
        model_settings=settings(tool_choice="required", parallel_tool_calls=False),
    )
    made = await agents.Runner.run(agent, "Where?", max_turns=3)
    assert len(asked) == 1
    assert asked[0].days in (1, 2, 3)
    kinds = [item.type for item in made.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert made.final_output is not None


async def fit_a_schema(model: Any) -> None:
    agent = agents.Agent(
        "forecaster", "Answer.", model=model, output_type=Weather, model_settings=settings()
    )
    made = await agents.Runner.run(agent, "Where?")
    assert isinstance(made.final_output, Weather)


@pytest.mark.client("openai-agents", "/v1/chat/completions", "text", "stream")
async def test_chat(tool_server: LiveServer) -> None:
    await talk(chat_model(tool_server))


@pytest.mark.client("openai-agents", "/v1/chat/completions", "tools")
async def test_tools_over_chat(tool_server: LiveServer) -> None:
    await call_tools(chat_model(tool_server))


@pytest.mark.client("openai-agents", "/v1/chat/completions", "schema")
async def test_a_schema_over_chat(tool_server: LiveServer) -> None:
    await fit_a_schema(chat_model(tool_server))


@pytest.mark.client("openai-agents", "/v1/responses", "text", "stream")
async def test_responses(tool_server: LiveServer) -> None:
    agent = agents.Agent(
        "brief", "Be brief.", model=responses_model(tool_server), model_settings=settings()
    )
    made = await agents.Runner.run(agent, "Where?")
    assert made.final_output
    assert made.context_wrapper.usage.output_tokens > 0
    await stream_a_schema(responses_model(tool_server))


@pytest.mark.client("openai-agents", "/v1/responses", "tools")
async def test_tools_over_responses(tool_server: LiveServer) -> None:
    await call_tools(responses_model(tool_server))


@pytest.mark.client("openai-agents", "/v1/responses", "schema")
async def test_a_schema_over_responses(tool_server: LiveServer) -> None:
    await fit_a_schema(responses_model(tool_server))
