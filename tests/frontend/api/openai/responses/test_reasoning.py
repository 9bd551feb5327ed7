"""What a model thinks is an item of its own, before the answer, and comes back as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from coppice.frontend.api.openai.responses.answer import ResponseAnswers
from coppice.frontend.api.openai.responses.items import messages_of
from coppice.frontend.api.openai.responses.memory import ResponseMemory
from coppice.frontend.api.openai.responses.request import Call
from coppice.frontend.api.prepare import prepare
from coppice.frontend.chat.dialect import Dialect
from coppice.frontend.text.model.generation_config import NO_DEFAULTS
from coppice.frontend.text.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.frontend.text.tokens import TokenTexts

if TYPE_CHECKING:
    from pathlib import Path

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
THOUGHT = "Under the mat, I think."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nI look.\n{CALL}"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def dialect(tool_checkpoint: Path) -> Dialect:
    return Dialect.of(Tokenizer(tool_checkpoint), reasoning_parser="qwen3")


def answered(dialect: Dialect, kept: list[Any]) -> tuple[ResponseAnswers, RequestOutput]:
    call = Call(ResponseMemory(2**20, 60), "me")
    asked = call.parse({"model": "m", "input": "Where?", "tools": [TOOL]}, NO_DEFAULTS)
    texts = TokenTexts(dialect.tokenizer)
    prepared = prepare(asked, dialect, texts, 4096)
    answers = ResponseAnswers("m", call.body, prepared, texts, kept.append)
    ids = tuple(dialect.tokenizer.encode_more(TEXT))
    output = CompletionOutput(0, TEXT, ids, "stop", "end")
    return answers, RequestOutput("r", None, tuple(prepared.prompts[0][1]), [output], True, 0)


def test_a_whole_response(dialect: Dialect) -> None:
    kept: list[Any] = []
    answers, output = answered(dialect, kept)
    made = answers.whole([output])
    Response.model_validate(made, strict=True)
    assert kept == [made]
    thought, said, called = made["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert said["content"][0]["text"] == "I look."
    assert called["name"] == "look"
    (message,) = messages_of(made["output"])
    assert message["reasoning_content"] == THOUGHT
    assert message["content"] == "I look."
    assert len(message["tool_calls"]) == 1


def test_the_events(dialect: Dialect) -> None:
    answers, output = answered(dialect, [])
    events = [*answers.opening()]
    for character in TEXT:
        events += answers.delta(0, TextDelta("r", character, (1,), None))
    end = TextDelta("r", "", (), output, completion=output.outputs[0])
    events += [*answers.delta(0, end), *answers.ending([output])]
    for event in events:
        EVENTS.validate_python(event, strict=True)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in kinds if not kind.endswith("delta")] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    deltas = [each["delta"] for each in events if each["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    assert len(deltas) > 5
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_efforts() -> None:
    call = Call(ResponseMemory(2**20, 60), "me")
    asked = call.parse({"model": "m", "input": "x", "reasoning": {"effort": "low"}}, NO_DEFAULTS)
    assert asked.template["reasoning_effort"] == "low"


SPLITS = (
    (*TEXT,),
    ("<think>\n", "Under the mat", ", I think.", "\n</think>", "\n\nI", " look", ".\n<tool",
     "_call>", '\n{"name": "lo', 'ok", "arguments', '": {', "}}\n</tool_call>", "<end>"),
    ("<think>Hm.</think>", "A < b: ", "I", " 東", "", "", "京", " look", " here", "!", ""),
    ("Hm", ".</think> I said Hm. ", "And <", "</", "think> is text"),
    (CALL, "\nI", " called", " it."),
)  # fmt: skip


@pytest.mark.parametrize("tokens", SPLITS)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_text_has_its_tokens_and_their_logprobs(
    dialect: Dialect, tokens: tuple[str, ...], streamed: bool
) -> None:
    """Those of reasoning, calls and marks are left out, however the tokens are cut."""
    call = Call(ResponseMemory(2**20, 60), "me")
    body = {"model": "m", "input": "x", "tools": [TOOL], "top_logprobs": 0}
    prepared = prepare(call.parse(body, NO_DEFAULTS), dialect, TokenTexts(dialect.tokenizer), 4096)
    texts = TokenTexts(dialect.tokenizer)
    answers = ResponseAnswers("m", call.body, prepared, texts, lambda response: None)
    whole, places, offsets = "".join(tokens), [], []
    for number, token in enumerate(tokens):
        places.append({5 + number: Logprob(-float(number), 1, token)})
        offsets.append(len("".join(tokens[:number])))
    made = CompletionOutput(
        0, whole, tuple(range(len(tokens))), "stop", "end",
        logprobs=places, text_offsets=tuple(offsets),
    )  # fmt: skip
    output = RequestOutput("r", None, tuple(prepared.prompts[0][1]), [made], True, 0)
    if streamed:
        events: list[Any] = [*answers.opening()]
        for token, place, offset in zip(tokens, places, offsets, strict=True):
            delta = TextDelta("r", token, (1,), None, (place,), (offset,))
            events += answers.delta(0, delta)
        events += answers.delta(0, TextDelta("r", "", (), output, completion=made))
        events += answers.ending([output])
        for event in events:
            EVENTS.validate_python(event, strict=True)
        response = events[-1]["response"]
        deltas = [each for each in events if each["type"] == "response.output_text.delta"]
        written = [entry for each in deltas for entry in each["logprobs"]]
    else:
        response = answers.whole([output])
        written = [
            entry
            for item in response["output"]
            if item["type"] == "message"
            for entry in item["content"][0]["logprobs"]
        ]
    items = [each for each in response["output"] if each["type"] == "message"]
    for item in items:
        (part,) = item["content"]
        joined = "".join(entry["token"] for entry in part["logprobs"])
        assert part["text"] in joined
        assert len(joined) - len(part["text"]) <= len("</think> ") + len("\n<tool"), (
            "no more tokens"
        )
        numbers = [-entry["logprob"] for entry in part["logprobs"]]
        assert numbers == [*range(int(numbers[0]), int(numbers[0]) + len(numbers))]
    assert items
    assert written == [entry for item in items for entry in item["content"][0]["logprobs"]]
