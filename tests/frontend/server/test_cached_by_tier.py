"""Usages say which tiers cached tokens came from, in every API, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coppice.frontend.api.anthropic.schemas import MessageAnswer
from coppice.frontend.api.cached import summed
from coppice.frontend.text.engine import TextEngine
from tests.frontend.conftest import serving

BY_TIER = {"pool": 0, "host": 0, "disk": 0}
GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
TEXT = "The quick brown fox jumps over the lazy dog"


@pytest.fixture
def tiered(text_engine: TextEngine) -> TextEngine:
    """An engine that says of each hit that all but three tokens of it came from a disk."""
    scheduler = text_engine.engine.scheduler
    enter = scheduler._enter

    def entered(sequence: Any) -> None:
        enter(sequence)
        hit = sequence.cached_tokens
        pool = min(3, hit)
        sequence.cached_by_tier = BY_TIER | {"pool": pool, "disk": hit - pool}

    scheduler._enter = entered  # type: ignore[method-assign]
    return text_engine


async def test_each_api_says_it(tiered: TextEngine, engine_client: Any) -> None:
    async with serving(engine_client(tiered)) as (session, port):
        url = f"http://127.0.0.1:{port}"

        async def post(path: str, body: Any) -> Any:
            async with session.post(url + path, json=body) as response:
                assert response.status == 200, await response.text()
                if body.get("stream"):
                    return (await response.read()).decode()
                return await response.json()

        def check(details: Any, cached: str = "cached_tokens") -> None:
            by_tier = details[f"{cached}_by_tier"]
            hit = sum(by_tier.values())
            assert by_tier == BY_TIER | {"pool": 3, "disk": hit - 3} and hit > 3
            assert details["cache_read_input_tokens" if "read" in cached else cached] == hit

        completion = GREEDY | {"prompt": [TEXT, TEXT + " again"], "max_tokens": 3}
        first = await post("/v1/completions", completion)
        details = first["usage"]["prompt_tokens_details"]
        assert summed([details["cached_tokens_by_tier"]]) is not None
        again = (await post("/v1/completions", completion))["usage"]["prompt_tokens_details"]
        assert again["cached_tokens_by_tier"]["pool"] == 6, "of both prompts"
        assert sum(again["cached_tokens_by_tier"].values()) == again["cached_tokens"]

        hello = {"messages": [{"role": "user", "content": TEXT}]}
        chat = GREEDY | hello | {"max_completion_tokens": 3}
        await post("/v1/chat/completions", chat)
        check((await post("/v1/chat/completions", chat))["usage"]["prompt_tokens_details"])
        usages = {"include_usage": True, "continuous_usage_stats": True}
        streamed = await post(
            "/v1/chat/completions", chat | {"stream": True, "stream_options": usages}
        )
        assert streamed.count('"cached_tokens_by_tier":{"pool":3,') >= 3, "with every chunk"

        asked = {"model": "tiny", "input": TEXT, "max_output_tokens": 16, "temperature": 0}
        await post("/v1/responses", asked)
        check((await post("/v1/responses", asked))["usage"]["input_tokens_details"])

        message = {"model": "tiny", "max_tokens": 3} | hello
        await post("/v1/messages", message)
        made = await post("/v1/messages", message)
        MessageAnswer.model_validate(made, strict=True)
        check(made["usage"], "cache_read_input_tokens")
        streamed = await post("/v1/messages", message | {"stream": True})
        assert streamed.count('"cache_read_input_tokens_by_tier":{"pool":3,') == 2, "start and end"

        async with session.get(url + "/openapi.json") as response:
            described = await response.text()
        for name in ("PromptTokensDetails", "InputTokensDetails"):
            fields = json.loads(described)["components"]["schemas"][name]["properties"]
            assert "cached_tokens_by_tier" in fields
        assert "cache_read_input_tokens_by_tier" in described


async def test_without_tiers_nothing_is_said(text_engine: TextEngine, engine_client: Any) -> None:
    async with serving(engine_client(text_engine)) as (session, port):
        body = GREEDY | {"prompt": TEXT, "max_tokens": 3}
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with session.post(url, json=body) as response:
            usage = (await response.json())["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_outputs_in_python_have_it(tiered: TextEngine) -> None:
    ids = tiered.tokenizer.encode(TEXT)
    for turn in range(2):
        params = tiered.defaults.params({"temperature": 0.0, "max_tokens": 4})
        tiered.add(f"r{turn}", None, ids, params)
        while tiered.has_unfinished():
            for delta in tiered.step():
                assert delta.cached_by_tier is not None
                assert sum(delta.cached_by_tier.values()) == delta.cached_tokens
                if (output := delta.output) is not None:
                    hit = len(ids) - 1 if turn else 0
                    disk = max(0, hit - 3)
                    assert output.cached_by_tier == BY_TIER | {"pool": hit - disk, "disk": disk}
