"""Reasoning in chats: apart from the answer, whole and streamed, before calls and schemas."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coppice.frontend.api.openai.answers import ChatCompletion
from coppice.frontend.api.openai.requests import parse_chat
from coppice.frontend.api.prepare import Prepared, prepare
from coppice.frontend.chat.dialect import Dialect
from coppice.frontend.errors import BadRequest
from coppice.frontend.text.outputs import CompletionOutput, RequestOutput, TextDelta
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.frontend.text.tokens import TokenTexts
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

# As Qwen 3's: it reasons unless that is switched off.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif inside %}<think>\n{% endif %}{% endif %}"
)
ASK = [{"role": "user", "content": "Where is the key?"}]
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def reasoning_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, with the marks of reasoning as special tokens."""
    path = tmp_path_factory.mktemp("reasoning") / "model"
    shutil.copytree(checkpoint, path)
    for file in path.glob("*token*.json"):
        text = file.read_text(encoding="utf-8")
        for old, new in (("<|pad|>", "</think>"), ("<|system|>", "<think>")):
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def dialect(reasoning_checkpoint: Path) -> Dialect:
    return Dialect.of(Tokenizer(reasoning_checkpoint))


def prepared(dialect: Dialect, **more: Any) -> tuple[Any, Prepared]:
    asked = parse_chat({"model": "m", "messages": ASK} | more)
    return asked, prepare(asked, dialect, TokenTexts(dialect.tokenizer), 512)


def made(dialect: Dialect, text: str, **more: Any) -> tuple[ChatCompletion, RequestOutput]:
    asked, given = prepared(dialect, **more)
    answers = ChatCompletion("m", asked, given, TokenTexts(dialect.tokenizer))
    ids = tuple(dialect.tokenizer.encode_more(text))
    completion = CompletionOutput(0, text, ids, "stop", "end")
    prompt = tuple(given.prompts[0][1])
    return answers, RequestOutput("r", None, prompt, [completion], True, 0)


def whole(dialect: Dialect, text: str, **more: Any) -> dict[str, Any]:
    answers, output = made(dialect, text, **more)
    return answers.whole([output])


def streamed(dialect: Dialect, text: str, **more: Any) -> tuple[list[dict[str, Any]], str]:
    """The deltas of a stream, character by character, and its finish reason."""
    answers, output = made(dialect, text, stream=True, **more)
    events = [
        event for char in text for event in answers.delta(0, TextDelta("r", char, (1,), None))
    ]
    end = TextDelta("r", "", (), output, completion=output.outputs[0])
    choices = [event["choices"][0] for event in [*events, *answers.delta(0, end)]]
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]


def joined(deltas: Sequence[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas)


THOUGHT = "<think>\nUnder the mat, I think.\n</think>\n\n"


def test_reasoning_apart_from_the_answer(dialect: Dialect) -> None:
    answer = whole(dialect, THOUGHT + "Under the mat.")
    message = answer["choices"][0]["message"]
    assert message["content"] == "Under the mat."
    assert message["reasoning_content"] == message["reasoning"] == "Under the mat, I think."
    inside = dialect.tokenizer.encode_more("\nUnder the mat, I think.\n")
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(inside)}
    deltas, reason = streamed(dialect, THOUGHT + "Under the mat.")
    assert joined(deltas, "reasoning_content") == "Under the mat, I think."
    assert joined(deltas, "reasoning") == "Under the mat, I think."
    assert joined(deltas, "content") == "Under the mat."
    assert reason == "stop"
    assert len(deltas) > 30, "pieces are not held back"


def test_reasoning_that_is_not_wanted(dialect: Dialect) -> None:
    message = whole(dialect, THOUGHT + "Yes.", include_reasoning=False)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    deltas, _ = streamed(dialect, THOUGHT + "Yes.", include_reasoning=False)
    assert joined(deltas, "content") == "Yes."
    assert "reasoning" not in str(deltas)


def test_an_answer_that_ends_inside_the_reasoning_comes_back(dialect: Dialect) -> None:
    for include in (True, False):
        answer = whole(dialect, "<think>\nUnder", include_reasoning=include)
        message = answer["choices"][0]["message"]
        assert message["content"] == (None if include else "")
        _, given = prepared(dialect, messages=[*ASK, message, *ASK])
        text = dialect.tokenizer.decode(given.prompts[0][1], skip_special_tokens=False)
        assert ("<think>\nUnder\n</think>" in text) == include


def test_calls_after_reasoning(dialect: Dialect) -> None:
    (choice,) = whole(dialect, THOUGHT + "I look.\n" + CALL, tools=[CLOCK])["choices"]
    assert choice["message"]["reasoning_content"] == "Under the mat, I think."
    assert choice["message"]["content"] == "I look."
    assert [each["function"]["name"] for each in choice["message"]["tool_calls"]] == ["clock"]
    assert choice["finish_reason"] == "tool_calls"
    deltas, _ = streamed(dialect, THOUGHT + CALL, tools=[CLOCK])
    assert joined(deltas, "reasoning_content") == "Under the mat, I think."
    assert joined(deltas, "content") == ""
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"


@pytest.mark.parametrize(
    ("more", "begins"),
    [
        ({}, "prefix: (<[2]> thought"),
        ({"chat_template_kwargs": {"inside": True}}, "prefix: thought"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "high"}, "prefix: (<[2]> thought"),
        ({"messages": [*ASK, {"role": "assistant", "content": "<think>Well"}],
          "continue_final_message": True}, "prefix: thought"),
        ({"messages": [*ASK, {"role": "assistant", "content": "Well"}],
          "continue_final_message": True}, None),
    ],
)  # fmt: skip
def test_a_form_begins_after_the_reasoning_if_there_is_any(
    dialect: Dialect, more: dict[str, Any], begins: str | None
) -> None:
    for asked in (
        {"response_format": {"type": "json_object"}},
        {"tools": [CLOCK], "tool_choice": "required"},
    ):
        _, given = prepared(dialect, **asked, **more)
        form = given.params.structured_outputs
        assert form is not None
        assert (form.prefix or "").startswith(begins or ""), form.prefix
        assert (form.prefix is None) == (begins is None)
        assert given.params.skip_special_tokens is False, "marks are special tokens here"


def test_efforts_that_a_model_does_not_know(
    tokenizer: Tokenizer, reasoning_checkpoint: Path
) -> None:
    plain = Dialect.of(tokenizer)
    assert prepared(plain, reasoning_effort="none")[1].reading is None
    with pytest.raises(ValueError, match="reasoning_effort: this model does not reason"):
        prepared(plain, reasoning_effort="low")
    always = Tokenizer(reasoning_checkpoint)
    always.chat_template = "{{ messages[0].content }}</think>"
    with pytest.raises(ValueError, match="reasoning_effort: this model always reasons"):
        prepared(Dialect.of(always), reasoning_effort="none")
    harmony = Tokenizer(reasoning_checkpoint)
    harmony.chat_template = "{{ reasoning_effort }}<|channel|>analysis"
    with pytest.raises(ValueError, match="reasoning_effort must be one of low, medium, high"):
        prepared(Dialect.of(harmony), reasoning_effort="xhigh")
    _, given = prepared(Dialect.of(harmony), reasoning_effort="low")
    assert harmony.decode(given.prompts[0][1]).startswith("low")


def test_formats_that_are_not_of_one_model(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="tool_call_parser must be auto or gpt_oss"):
        Dialect.of(tokenizer, "hermes", "gpt_oss")
    assert Dialect.of(tokenizer, "gpt_oss", "gpt_oss").reasoning is not None


def test_templates_of_requests(dialect: Dialect, reasoning_checkpoint: Path) -> None:
    own = {"chat_template": "{{ messages[0].content }}!"}
    with pytest.raises(ValueError, match="chat_template is taken from requests only with"):
        prepared(dialect, **own)
    trusting = Dialect.of(Tokenizer(reasoning_checkpoint), trust_templates=True)
    _, given = prepared(trusting, **own)
    assert trusting.tokenizer.decode(given.prompts[0][1]) == "Where is the key?!"
    with pytest.raises(BadRequest, match="chat_template"):
        prepared(trusting, chat_template="")


# -- over HTTP ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http(
    reasoning_checkpoint: Path, live_server: type[LiveServer]
) -> Iterator[tuple[httpx.Client, Dialect]]:
    from coppice.frontend.text.engine import TextEngine

    config = EngineConfig(
        model=str(reasoning_checkpoint), kv_cache_tokens=8192, max_num_seqs=8, speculation="off"
    )
    server = live_server(TextEngine.load(config))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client, Dialect.of(server.text_engine.tokenizer)
    server.until_idle()
    server.close()


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip


def test_a_schema_holds_after_the_reasoning(http: tuple[httpx.Client, Dialect]) -> None:
    """The random model thinks what it likes, and then writes what the schema allows."""
    client, dialect = http
    end = dialect.tokenizer.added_tokens["</think>"]
    body = {
        "model": "tiny",
        "messages": ASK,
        "max_tokens": 200,
        "temperature": 1,
        "logit_bias": {str(end): 6},
        "chat_template_kwargs": {"inside": True},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": SCHEMA},
        },
    }
    thoughts = 0
    for seed in range(4):
        response = client.post("/v1/chat/completions", json=body | {"seed": seed})
        assert response.status_code == 200, response.text
        answer = response.json()
        message = answer["choices"][0]["message"]
        assert json.loads(message["content"])["n"] in (1, 2, 3)
        thought = message.get("reasoning_content") or ""
        thoughts += bool(thought)
        counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert bool(thought.strip()) <= bool(counted)
        lines = client.post(
            "/v1/chat/completions", json=body | {"seed": seed, "stream": True}
        ).text.split("\n\n")[:-2]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        deltas = [choice["delta"] for choice in choices]
        assert joined(deltas, "content") == message["content"]
        assert joined(deltas, "reasoning_content") == thought
    assert thoughts


def test_a_budget_ends_the_reasoning(http: tuple[httpx.Client, Dialect]) -> None:
    """The random model would think to the end of its tokens."""
    client, dialect = http
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": ASK,
        "max_tokens": 90,
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": {str(dialect.tokenizer.added_tokens["</think>"]): -100},
        "chat_template_kwargs": {"inside": True},
    }
    inside = {key: value for key, value in body.items() if key != "ignore_eos"} | {
        "guided_json": SCHEMA
    }
    for asked in (body, inside):
        for name, budget in (("thinking_token_budget", 7), ("thinking_budget", 3)):
            answer = client.post("/v1/chat/completions", json=asked | {name: budget}).json()
            message = answer["choices"][0]["message"]
            details = answer["usage"]["completion_tokens_details"]
            assert details == {"reasoning_tokens": budget}
            assert message["content"]
            if asked is inside:
                assert json.loads(message["content"])["n"] in (1, 2, 3)
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 90}
    answer = client.post(
        "/v1/messages",
        json={
            "model": "tiny",
            "messages": ASK,
            "max_tokens": 30,
            "ignore_eos": True,
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "chat_template_kwargs": {"inside": True},
        },
    ).json()
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] <= 5
    assert answer["content"][-1]["type"] == "text"


def test_budgets_that_cannot_be_held(dialect: Dialect, tokenizer: Tokenizer) -> None:
    budget = {"thinking_token_budget": 3}
    _, given = prepared(dialect, **budget)
    assert given.params.thinking_marks is not None
    assert given.params.thinking_marks.inside is False
    _, given = prepared(dialect, **budget, chat_template_kwargs={"enable_thinking": False})
    assert given.params.thinking_token_budget is None, "there is no reasoning"
    for other, why in (
        (Dialect.of(tokenizer), "how this model marks its reasoning is not known"),
        (Dialect.of(tokenizer, "auto", "qwen3"), "is not a single token"),
        (Dialect.of(tokenizer, "auto", "gpt_oss"), "is not a single token"),
    ):
        with pytest.raises(ValueError, match=f"thinking_token_budget: it can't be held, .*{why}"):
            prepared(other, **budget)
    with pytest.raises(BadRequest, match="mean the same"):
        prepared(dialect, **budget, thinking_budget=3)
    with pytest.raises(BadRequest, match="not supported with use_beam_search"):
        prepared(dialect, **budget, use_beam_search=True, beam_width=2, max_tokens=4)


def test_without_reasoning_the_schema_holds_at_once(http: tuple[httpx.Client, Dialect]) -> None:
    client, _ = http
    body = {
        "model": "tiny",
        "messages": ASK,
        "max_tokens": 200,
        "chat_template_kwargs": {"enable_thinking": False},
        "guided_json": SCHEMA,
    }
    answer = client.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert json.loads(message["content"])["n"] in (1, 2, 3)
    assert "reasoning_content" not in message
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_templates_and_efforts_are_refused_by_name(http: tuple[httpx.Client, Dialect]) -> None:
    client, _ = http
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"model": "tiny", "messages": ASK, "chat_template": "{{ messages }}"}
        response = client.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template"
