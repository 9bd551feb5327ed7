"""What a server with drafts answers: the same texts, and how many tokens were foretold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from free_costs import make_free

from coppice.frontend.text.engine import TextEngine
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

CHAT = "/v1/chat/completions"
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Where is the key?"}],
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}


def load(checkpoint: Path, speculation: str | None) -> TextEngine:
    made = TextEngine.load(
        EngineConfig(str(checkpoint), kv_cache_tokens=8192, speculation=speculation)
    )
    make_free(made.engine)
    return made


@pytest.fixture(scope="module")
def plain(tool_checkpoint: Path, live_server: type[LiveServer]) -> Iterator[httpx.Client]:
    server = live_server(load(tool_checkpoint, "off"))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.close()


@pytest.fixture(scope="module")
def drafting(tool_checkpoint: Path, live_server: type[LiveServer]) -> Iterator[httpx.Client]:
    """Drafts are the default on a CPU."""
    server = live_server(load(tool_checkpoint, None))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.close()


def ask(client: httpx.Client, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text of a chat, and the details of its output tokens."""
    answer = client.post(CHAT, json=BODY | more).raise_for_status().json()
    details = answer["usage"].get("completion_tokens_details", {})
    return answer["choices"][0]["message"]["content"], details


def test_a_prediction_that_holds_is_accepted(plain: httpx.Client, drafting: httpx.Client) -> None:
    text, details = ask(plain)
    assert "accepted_prediction_tokens" not in details
    expected = {"type": "content", "content": text}
    found, details = ask(drafting, prediction=expected)
    assert found == text
    assert details["accepted_prediction_tokens"] > 5
    assert details["rejected_prediction_tokens"] >= 0


def test_a_prediction_that_does_not_hold_changes_nothing(
    plain: httpx.Client, drafting: httpx.Client
) -> None:
    for content in ("The key is under the mat. " * 9, [{"type": "text", "text": "No key."}]):
        wrong = {"type": "content", "content": content}
        for more in ({}, {"temperature": 1.0, "seed": 4}):
            assert ask(drafting, prediction=wrong, **more)[0] == ask(plain, **more)[0]


def stream(client: httpx.Client, **more: Any) -> list[dict[str, Any]]:
    """The chunks of a chat; usage is asked for at the end at least."""
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}} | more
    lines = client.post(CHAT, json=body).raise_for_status().text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_stream_counts_at_its_end(plain: httpx.Client, drafting: httpx.Client) -> None:
    text, _ = ask(plain)
    *chunks, end = stream(drafting, prediction={"type": "content", "content": text})
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(pieces) == text
    details = end["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 5
    # Several tokens of a step come in one piece.
    assert len(pieces) < 60


def test_each_chunk_counts_if_asked(plain: httpx.Client, drafting: httpx.Client) -> None:
    text, _ = ask(plain, n=2)
    options = {"include_usage": True, "continuous_usage_stats": True}
    expected = {"type": "content", "content": text}
    *chunks, end = stream(drafting, prediction=expected, n=2, stream_options=options)
    counts = [chunk["usage"].get("completion_tokens_details", {}) for chunk in chunks]
    accepted = [each.get("accepted_prediction_tokens", 0) for each in counts]
    assert accepted[0] == 0
    assert accepted == sorted(accepted)
    assert len(set(accepted)) > 2
    assert counts[-1] == end["usage"]["completion_tokens_details"]


def test_a_text_that_a_stop_string_ends_counts(plain: httpx.Client, drafting: httpx.Client) -> None:
    text, _ = ask(plain)
    stop = text[len(text) // 2 :][:8]
    expected = {"type": "content", "content": text}
    found, details = ask(drafting, prediction=expected, stop=stop)
    assert found == text[: text.index(stop)]
    assert details["accepted_prediction_tokens"] > 5
