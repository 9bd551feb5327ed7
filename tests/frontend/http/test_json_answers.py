"""Large answers: the same JSON in parts, made outside the event loop; small ones as ever."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from coppice.frontend.http import json_answers
from coppice.frontend.http.json_answers import LARGE_VALUES, JsonAnswers, in_parts

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=60,
)  # fmt: skip


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_parts_are_the_whole(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_answers, "_PART", 3)
        patch.setattr(json_answers, "CHARACTERS", 2)
        assert json.loads(in_parts(value)) == value


def entry(tops: int) -> dict[str, Any]:
    made: dict[str, Any] = {"token": " the", "logprob": -1.25, "bytes": [32, 116, 104, 101]}
    return made | ({"top_logprobs": [entry(0) for _ in range(tops)]} if tops else {})


@pytest.mark.parametrize(
    "value",
    [
        {"choices": [{"logprobs": {"content": [entry(20)] * 2_000}, "index": 0}]},
        {"data": [{"embedding": [0.1] * 2_000, "index": at} for at in range(100)]},
        {"tokens": [*range(200_000)], "token_strs": ["a"] * 200_000},
        {"prompt_logprobs": [None, *[{str(at): {"rank": at} for at in range(21)}] * 3_000]},
        {"one": "text " * 10**6, "more": ["x" * 10**5] * 40},
        {str(at): [at] for at in range(50_000)},
    ],
)
def test_no_part_takes_long(value: Any) -> None:
    """Between two parts others may run: a part is as long as `_PART` values are."""
    parts = list(json_answers._parts(value))
    whole = b"".join(parts)
    assert from_json(whole) == value
    most = json_answers._PART
    assert all(part.count(b",") <= most for part in parts)
    assert max(map(len, parts)) <= most * json_answers.CHARACTERS + 1
    assert len(parts) < len(whole) / 1_000, "parts are so small that they cost more than the JSON"


@pytest.fixture
async def answers() -> AsyncIterator[JsonAnswers]:
    made = JsonAnswers()
    yield made
    made.close()


async def test_a_small_answer_stays_on_the_event_loop(answers: JsonAnswers) -> None:
    def make() -> Any:
        assert threading.current_thread() is threading.main_thread()
        return {"a": "é"}

    small = await answers.write(make, LARGE_VALUES - 1)
    assert small.body == json.dumps({"a": "é"}).encode()

    def make_large() -> Any:
        assert threading.current_thread() is not threading.main_thread()
        return {"a": "é"}

    large = await answers.write(make_large, LARGE_VALUES)
    assert isinstance(large.body, bytes)
    assert json.loads(large.body) == {"a": "é"}
    assert large.headers["Content-Type"] == small.headers["Content-Type"]


async def test_one_large_answer_delays_no_other(answers: JsonAnswers) -> None:
    others = threading.Event()

    def slow() -> Any:
        assert others.wait(20), "no other answer is written meanwhile"
        return [1]

    first = asyncio.create_task(answers.write(slow, LARGE_VALUES))
    await asyncio.sleep(0)
    for number in range(3):
        assert (await answers.write(lambda: [2], LARGE_VALUES)).body == b"[2]", number
    others.set()
    assert (await first).body == b"[1]"


async def test_what_is_cancelled_has_ended(answers: JsonAnswers) -> None:
    """What it changes may be used then; and what has not begun never does."""
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(20)
        ended.set()

    running = [asyncio.create_task(answers.run(work)) for _ in range(2)]
    await asyncio.to_thread(begun.wait, 20)
    waiting = asyncio.create_task(answers.run(pytest.fail))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for task in (*running, waiting):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not running[0].done()
    go.set()
    for task in running:
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended.is_set()


async def test_what_an_answer_raises(answers: JsonAnswers) -> None:
    def wrong() -> Any:
        raise ValueError("wrong")

    for values in (0, LARGE_VALUES):
        with pytest.raises(ValueError, match="wrong"):
            await answers.write(wrong, values)
