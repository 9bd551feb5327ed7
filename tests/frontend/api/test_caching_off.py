"""Without prefix caching no answer and no report names a token that the cache took or gave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coppice.frontend.text.engine import TextEngine
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.conftest import LiveServer

TEXT = "Where is the key? The key is under the mat, at the door of the house."


@pytest.fixture(scope="module")
def server(tool_checkpoint: Path, live_server: type[LiveServer]) -> Iterator[LiveServer]:
    config = EngineConfig(
        model=str(tool_checkpoint), kv_cache_tokens=2048, enable_prefix_caching=False
    )
    server = live_server(TextEngine.load(config))
    yield server
    server.close()


def test_no_answer_names_cached_tokens_and_the_report_counts_all_prompts(
    server: LiveServer,
) -> None:
    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(server.url + path, json={"model": "tiny"} | body, timeout=60)
        return answer.raise_for_status().json()["usage"]

    prompts = 0
    for _ in range(2):
        usage = post("/v1/responses", input=TEXT, max_output_tokens=2)
        prompts += usage["input_tokens"]
        assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
        block = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}
        usage = post("/v1/messages", max_tokens=2, messages=[{"role": "user", "content": [block]}])
        prompts += usage["input_tokens"]
        assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0
    report = httpx.get(server.url + "/cache/report").json()
    for window in ("last_minute", "last_ten_minutes", "since_start"):
        counts = report["counts"][window]
        assert (counts["requests"], counts["prompt_tokens"]) == (4, prompts)
        assert counts["hit_tokens"] == counts["ideal_tokens"] == 0
        causes = {cause: tokens for cause, tokens in counts["causes"].items() if tokens}
        assert causes == {"no_cache": prompts}
    assert report["present"]["prompt_tokens"] == prompts
    (advice,) = report["present"]["advice"]
    assert advice["cause"] == "no_cache"
