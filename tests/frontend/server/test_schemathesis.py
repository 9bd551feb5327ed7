"""Requests generated from /openapi.json: no answer is a failure, and each is as described."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tool_checkpoint: Path, live_server: type[LiveServer]) -> Iterator[LiveServer]:
    """A server of a short context, so that every answer is short."""
    from coppice.frontend.text.engine import TextEngine

    config = EngineConfig(
        model=str(tool_checkpoint), kv_cache_tokens=2048, max_num_seqs=8, max_model_len=160
    )
    server = live_server(TextEngine.load(config))
    yield server
    server.until_idle()
    server.close()


@pytest.fixture(scope="module")
def description(server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


def test_every_answer_is_as_described(description: Any) -> None:
    operations = [result.ok() for result in description.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        made_up(operation)


def made_up(operation: Any) -> None:
    """Tries one operation with a few requests."""

    @given(case=operation.as_strategy())
    @settings(
        max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    def check(case: Any) -> None:
        body = case.body
        if isinstance(body, dict):
            if isinstance(body.get("model"), str):
                body["model"] = "tiny"  # or else the name is the only thing that is ever wrong
            for name in ("n", "best_of", "beam_width"):  # much of them only takes time
                if isinstance(body.get(name), int) and body[name] > 3:
                    body[name] = 3
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


ASK = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"maxProperties": 0}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b"}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "stop": "e"}),
        ("/v1/completions", {"prompt": "a b", "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": "a b", "prompt_logprobs": 1, "best_of": 2}),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "beam_width": 2}),
        ("/v1/completions", {"prompt": "a", "guided_choice": ["yes", "no"]}),
        ("/v1/chat/completions", ASK),
        ("/v1/chat/completions", ASK | {"logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/chat/completions", ASK | {"prompt_logprobs": 1}),
        ("/v1/chat/completions", ASK | {"tools": [TOOL], "tool_choice": "required"}),
        ("/tokenize", ASK | {"return_token_strs": True}),
    ],
)
def test_good_requests_and_their_answers_fit_the_description(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    document = httpx.get(server.url + "/openapi.json").json()
    body = {"model": "tiny"} | body
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    operation = document["paths"][path]["post"]
    described = operation["requestBody"], operation["responses"]["200"]
    for found, place in zip((body, response.json()), described, strict=True):
        shape = place["content"]["application/json"]["schema"]
        Draft202012Validator(document | shape).validate(found)
