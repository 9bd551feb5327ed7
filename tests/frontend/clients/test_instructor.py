"""instructor, which asks for objects of pydantic models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import instructor
import openai
import pytest

from tests.frontend.clients.talk import HELLO, Weather
from tests.frontend.pieces import in_pieces

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer


def client(server: LiveServer, mode: Any) -> Any:
    plain = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=mode)


@pytest.mark.client("instructor", "/v1/chat/completions", "schema")
@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_an_object(tool_server: LiveServer, mode: Any) -> None:
    made = client(tool_server, mode).create(
        model="tiny", messages=HELLO, response_model=Weather, max_tokens=300, max_retries=0
    )
    assert isinstance(made, Weather)


@pytest.mark.client("instructor", "/v1/chat/completions", "stream")
def test_a_growing_object(tool_server: LiveServer) -> None:
    def asked() -> list[Any]:
        return list(
            client(tool_server, instructor.Mode.JSON_SCHEMA).create_partial(
                model="tiny", messages=HELLO, response_model=Weather, max_tokens=300
            )
        )

    parts = in_pieces(asked, list)
    Weather.model_validate(parts[-1].model_dump())
