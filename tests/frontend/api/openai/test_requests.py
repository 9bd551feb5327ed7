"""The API's parameters: followed, accepted where they ask for nothing, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.frontend.api.openai.requests import (
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
)
from coppice.frontend.errors import BadRequest

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def refused(parse: Any, body: Any) -> dict[str, Any]:
    with pytest.raises(BadRequest) as caught:
        parse(body)
    assert caught.value.status == 400
    error: dict[str, Any] = caught.value.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_one_form_under_two_names_is_one_form() -> None:
    """guidance writes a grammar under vLLM's old name and its new one."""
    lark = 'start: "yes" | "no"'
    body = CHAT | {"guided_grammar": lark, "structured_outputs": {"grammar": lark}}
    form = parse_chat(body).form
    assert form is not None
    assert form.params.grammar == lark
    other = body | {"guided_grammar": 'start: "yes"'}
    assert refused(parse_chat, other)["param"] == "guided_grammar"


def test_what_is_asked_for_arrives() -> None:
    asked = parse_completion(
        COMPLETION
        | {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "seed": 11,
            "max_tokens": 9,
            "min_tokens": 2,
            "stop": ["a", "b"],
            "stop_token_ids": [3],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "cache_salt": "mine",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.max_tokens, params.min_tokens) == (11, 9, 2)
    assert (params.stop_strings, params.stop_ids) == (("a", "b"), (3,))
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens
    assert asked.cache_salt == "mine"
    assert asked.stream
    assert asked.include_usage


def test_lengths_when_none_is_asked_for() -> None:
    assert parse_completion(COMPLETION).params.max_tokens == 16
    assert parse_chat(CHAT).params.max_tokens is None
    assert parse_chat(CHAT | {"max_completion_tokens": 5}).params.max_tokens == 5
    assert parse_chat(CHAT | {"max_tokens": 6}).params.max_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ("hello",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["a", [3]], ("a", [3])),
    ],
)
def test_kinds_of_prompts(prompt: Any, prompts: Any) -> None:
    assert parse_completion({"model": "m", "prompt": prompt}).prompts == prompts


@pytest.mark.parametrize("prompt", [[], None, 5, {"a": 1}, ["a", 5], [[1], ["b"]], [True], [1.0]])
def test_no_prompt(prompt: Any) -> None:
    assert refused(parse_completion, {"model": "m", "prompt": prompt})["param"] == "prompt"


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "suffix": None,
    "user": "me",
    "not_a_parameter": None,
}
NEUTRAL_COMPLETION = NEUTRAL | {"best_of": 1, "echo": False}
NEUTRAL_CHAT = NEUTRAL | {
    "top_logprobs": None,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "service_tier": "auto",
    "store": False,
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "verbosity": "medium",
    "function_call": "none",
    "functions": [],
}


@pytest.mark.parametrize("name", sorted(NEUTRAL_COMPLETION))
def test_what_asks_for_nothing_is_accepted(name: str) -> None:
    plain = parse_completion(COMPLETION)
    assert parse_completion(COMPLETION | {name: NEUTRAL_COMPLETION[name]}) == plain


@pytest.mark.parametrize("name", sorted(NEUTRAL_CHAT))
def test_what_asks_for_nothing_is_accepted_in_chats(name: str) -> None:
    plain = parse_chat(CHAT)
    assert parse_chat(CHAT | {name: NEUTRAL_CHAT[name]}) == plain


UNSUPPORTED: list[tuple[str, Any]] = [
    ("store", True),
    ("verbosity", "high"),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("web_search_options", {}),
    ("service_tier", "flex"),
    ("prompt_cache_retention", "24h"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(parse_chat, CHAT | {name: value})
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported yet")


@pytest.mark.parametrize(
    "content", ["a file", [{"type": "text", "text": "a "}, {"type": "text", "text": "file"}]]
)
def test_a_prediction_is_a_text_or_parts_of_one(content: Any) -> None:
    asked = parse_chat(CHAT | {"prediction": {"type": "content", "content": content}})
    assert asked.params.prediction == "a file"
    assert asked.needs_tokenizer


def test_a_suffix_is_refused_by_name() -> None:
    assert refused(parse_completion, COMPLETION | {"suffix": ""})["param"] == "suffix"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [TOOL | {"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": "f"}, "tools"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "g"}}],
                    },
                },
            },
            "tool_choice.allowed_tools.tools",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice.function.name",
        ),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"user": 5}, "user"),
        ({"prediction": "a text"}, "prediction"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content"),
        ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"wish": "x"}}, "structured_outputs.wish"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
    ],
)
def test_wrong_parts_of_a_chat_are_refused_by_name(more: dict[str, Any], param: str) -> None:
    assert refused(parse_chat, CHAT | more)["param"] == param


@pytest.mark.parametrize(
    ("more", "kind", "value", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {}},
                }
            },
            "json",
            "{}",
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"a": 1}}, "json", '{"a": 1}', "guided_json"),
        ({"guided_json": '{"a":1}'}, "json", '{"a":1}', "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b"), "guided_choice"),
        ({"guided_grammar": "start: x"}, "grammar", "start: x", "guided_grammar"),
        ({"guided_json_object": True}, "json_object", True, "guided_json_object"),
        (
            {"guided_regex": "a+", "guided_decoding_backend": "outlines"},
            "regex",
            "a+",
            "guided_regex",
        ),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"ebnf": 'root ::= "x"'}, "grammar", 'root ::= "x"', "ebnf"),
        ({"json_schema": '{"a":1}'}, "json", '{"a":1}', "json_schema"),
        ({"structured_outputs": {"json_object": True}}, "json_object", True, "structured_outputs"),
        ({"structured_outputs": {"json": {"a": 1}}}, "json", '{"a": 1}', "structured_outputs"),
    ],
)
def test_forms_arrive(more: dict[str, Any], kind: str, value: Any, field: str) -> None:
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        asked = parse(body | more)
        assert asked.form is not None
        assert asked.form.field == field
        assert asked.params.structured_outputs == asked.form.params
        assert asked.form.params.kind == kind
        assert getattr(asked.form.params, kind) == value


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"regex": "a{400000}"}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "objct"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_form_that_cannot_be_followed_is_named(more: dict[str, Any], param: str) -> None:
    form = parse_chat(CHAT | more).form
    assert form is not None
    with pytest.raises(BadRequest) as caught:
        form.check()
    assert caught.value.body["error"]["param"] == param


def test_tools_arrive() -> None:
    other = TOOL | {"function": {"name": "g", "strict": True}}
    asked = parse_chat(CHAT | {"tools": [TOOL, other]}).tools
    assert asked is not None
    assert [tool.function.name for tool in asked.offered] == ["f", "g"]
    assert (asked.forced, asked.parallel, asked.strict) == ((), True, True)
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    asked = parse_chat(CHAT | {"tools": [TOOL]} | required).tools
    assert asked is not None
    assert [tool.function.name for tool in asked.forced] == ["f"]
    assert not asked.parallel
    named = {"tool_choice": {"type": "function", "function": {"name": "g"}}}
    asked = parse_chat(CHAT | {"tools": [TOOL, other]} | named).tools
    assert asked is not None
    assert [tool.function.name for tool in asked.forced] == ["g"]
    assert parse_chat(CHAT | {"tools": [TOOL], "tool_choice": "none"}).tools is None


def test_best_of_is_for_completions_that_are_not_streamed() -> None:
    assert parse_completion(COMPLETION | {"best_of": 3, "n": 2}).params.best_of == 3
    assert parse_completion(COMPLETION | {"best_of": 2, "n": 2, "stream": True}).params.n == 2
    for more in ({"best_of": 1, "n": 2}, {"best_of": "3"}, {"best_of": 3, "stream": True}):
        assert refused(parse_completion, COMPLETION | more)["param"] == "best_of"
    assert refused(parse_chat, CHAT | {"best_of": 3})["param"] == "best_of"
    beams = {"use_beam_search": True, "beam_width": 4, "best_of": 3}
    assert refused(parse_completion, COMPLETION | beams)["param"] == "best_of"


def test_echo() -> None:
    asked = parse_completion(COMPLETION | {"echo": True, "logprobs": 2})
    assert (asked.echo, asked.params.prompt_logprobs, asked.prompt_logprobs) == (True, 2, False)
    assert parse_completion(COMPLETION | {"echo": True}).params.prompt_logprobs is None
    more = {"echo": True, "use_beam_search": True, "beam_width": 2}
    assert refused(parse_completion, COMPLETION | more)["param"] == "echo"


def test_the_sampling_features_arrive() -> None:
    features = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -100, "0": 1.5},
        "allowed_token_ids": [7, 8],
        "bad_words": ["no", "way"],
        "prompt_logprobs": 3,
    }
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        params = parse(body | features).params
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1)
        assert params.repetition_penalty == 1.2
        assert params.logit_bias == {7: -100, 0: 1.5}
        assert params.allowed_token_ids == (7, 8)
        assert params.bad_words == ("no", "way")
        assert params.prompt_logprobs == 3


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        (COMPLETION, None),
        (COMPLETION | {"logprobs": False}, None),
        (COMPLETION | {"logprobs": 0}, 0),
        (COMPLETION | {"logprobs": 20}, 20),
        (CHAT, None),
        (CHAT | {"logprobs": False, "top_logprobs": 0}, None),
        (CHAT | {"logprobs": True}, 0),
        (CHAT | {"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_each_endpoint_asks_for_logprobs_in_its_own_way(body: Any, logprobs: int | None) -> None:
    parse = parse_chat if "messages" in body else parse_completion
    assert parse(body).params.logprobs == logprobs


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_completion, COMPLETION | {"logprobs": True}, "logprobs"),
        (parse_completion, COMPLETION | {"logprobs": 21}, "logprobs"),
        (parse_completion, COMPLETION | {"logprobs": -1}, "logprobs"),
        (parse_completion, COMPLETION | {"top_logprobs": 2}, "top_logprobs"),
        (parse_chat, CHAT | {"logprobs": 3}, "logprobs"),
        (parse_chat, CHAT | {"top_logprobs": 3}, "top_logprobs"),
        (parse_chat, CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (parse_chat, CHAT | {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        (parse_chat, CHAT | {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (parse_completion, COMPLETION | {"logits_processors": ["x"]}, "logits_processors"),
        (parse_completion, COMPLETION | {"bad_words_token_ids": [[1]]}, "bad_words_token_ids"),
    ],
)
def test_wrong_ways_to_ask_are_refused_by_name(parse: Any, body: Any, param: str) -> None:
    assert refused(parse, body)["param"] == param


@pytest.mark.parametrize(("parse", "body"), [(parse_completion, COMPLETION), (parse_chat, CHAT)])
def test_unknown_parameters_are_refused_by_name(parse: Any, body: Any) -> None:
    error = refused(parse, body | {"temprature": 0.5})
    assert error["param"] == "temprature"


def test_each_endpoint_has_its_own_parameters() -> None:
    assert refused(parse_chat, CHAT | {"prompt": "x"})["param"] == "prompt"
    assert refused(parse_completion, COMPLETION | {"messages": []})["param"] == "messages"
    both = {"max_tokens": 1, "max_completion_tokens": 1}
    assert refused(parse_chat, CHAT | both)["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 3),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("min_p", 2),
        ("seed", "lucky"),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("min_tokens", 20),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("presence_penalty", 3),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("bad_words", "word"),
        ("bad_words", [" "]),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", True),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
        ("stream", "yes"),
        ("cache_salt", 5),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_wrong_types_and_values_name_the_parameter(name: str, value: Any) -> None:
    assert refused(parse_completion, COMPLETION | {name: value})["param"] == name


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (5, "stream_options"),
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        ({"include_all": True}, "stream_options.include_all"),
    ],
)
def test_stream_options(options: Any, param: str) -> None:
    body = COMPLETION | {"stream": True, "stream_options": options}
    assert refused(parse_completion, body)["param"] == param


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_the_body_must_be_an_object(body: Any) -> None:
    assert "JSON object" in refused(parse_completion, body)["message"]


def test_the_model_need_not_be_named() -> None:
    assert parse_completion({"prompt": "x"}).model is None
    assert refused(parse_completion, {"prompt": "x", "model": 5})["param"] == "model"


def test_a_long_value_is_not_repeated_whole() -> None:
    assert len(refused(parse_completion, COMPLETION | {"n": "x" * 100_000})["message"]) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab\ud800", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)
OTHER_NAMES = ("model", "prompt", "messages", "stream", "stream_options", "cache_salt")
NAMES = st.sampled_from([*OTHER_NAMES, *CompletionBody.model_fields, *ChatBody.model_fields])


@given(changes=st.dictionaries(NAMES, JSON, max_size=3))
def test_garbage_is_refused_and_nothing_worse(changes: dict[str, Any]) -> None:
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        try:
            parse(body | changes)
        except BadRequest as error:
            message = error.body["error"]["message"]
            assert message == str(error)  # noqa: PT017 - that it is refused is no must
            assert len(message) < 500


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_results_of_one_request_are_bounded(name: str) -> None:
    body = {"model": "tiny", "prompt": [[5]] * 128, name: 1024}
    assert len(parse_completion(body).prompts) == 128
    error = refused(parse_completion, body | {"prompt": [[5]] * 129})
    assert "at most 131,072 results, got 132,096" in error["message"]
    assert len(parse_completion(body | {"prompt": [[5]] * 100_000, name: 1}).prompts) == 100_000
