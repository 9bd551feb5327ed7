"""JSON is completed before its room ends; texts that end by themselves stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.endings import Ending, shortest
from coppice.runtime.sampling.forms.trial_worker import Bytes
from coppice.runtime.sampling.grammar_source import source
from tests.runtime.sampling.test_grammars import EOS, checkpoint, decode, engine, run

__all__ = ["checkpoint", "decode"]

TEXT = {"type": "string"}
TREE = {
    "type": "object",
    "properties": {"name": TEXT, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"enum": ["alpha", "beta", "be"]},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "when": {"type": "string", "format": "date-time"},
        "count": {"type": "integer", "minimum": 50, "maximum": 59},
        "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "any": {},
    },
    "required": ["name", "code", "when", "count", "kids", "next", "any"],
}
OPEN: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": ["object", "array"]},
    {"type": "array", "items": TEXT},
    {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}},
    TREE,
    {"type": "object", "properties": {"a": {"type": "object", "required": ["b", "c"]}}},
]


def after(schema: dict[str, Any], text: str) -> LLMatcher:
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])
    grammar = source(StructuredOutputsParams(json=json.dumps(schema))).text
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert matcher.consume_tokens(list(text.encode())), matcher.get_error()
    return matcher


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({}, '{"a": [{"b": "hello', '"}]}'),
        ({}, '{"a": [{"b": "\\', '""}]}'),
        ({}, '{"a": [{"b": "\\\\', '"}]}'),
        ({}, '{"a": "\\u00', '00"}'),
        ({}, '{"a": tr', "ue}"),
        ({}, '{"a": -', "0}"),
        ({}, '["[{", 1, ', "0]"),
        ({}, "", "0"),
        (TREE, '{"name": "x", "children": [', "]}"),
        (TREE, '{"name": "x", "children": [{', '"name":"","children":[]}]}'),
        ({"type": "array", "items": TEXT, "minItems": 3}, '["a"', ',"",""]'),
        ({"enum": ["longest", "last", "l"]}, '"la', 'st"'),
    ],
)
def test_the_shortest_completion(schema: dict[str, Any], text: str, expected: str) -> None:
    matcher = after(schema | {"title": "any"}, text)
    before = matcher.compute_bitmask()
    found = shortest(matcher, text.encode())
    assert found is not None
    assert found.decode() == expected
    assert matcher.compute_bitmask() == before


SELF: dict[str, Any] = {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "level", "expected"),
    [
        # What is required takes more to write than another property's beginning.
        (
            {"properties": {"note": SELF, "next": SELF, "items": {"type": "object"}, "parts": {}},
             "required": ["items", "parts"]},
            '{"note":',
            '"items":{},"parts":0}',
        ),
        # Names that have a letter in common at the same place.
        (
            {"properties": {"data": SELF, "tags": SELF, "value": {"type": "array"}},
             "required": ["value"]},
            '{"data":',
            '"value":[]}',
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("depth", [1, 5, 60])
def test_a_deep_text_is_completed_with_what_is_required(
    schema: dict[str, Any], level: str, expected: str, depth: int
) -> None:
    schema = {"type": "object", **schema}
    text = level * depth + "{"
    found = shortest(after(schema, text), text.encode())
    assert found is not None
    assert found.decode() == expected + ("," + expected) * depth


def test_what_never_ends_has_no_completion() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    assert shortest(LLMatcher(tokenizer, grammar, log_level=0), b"") is None


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))]
)
def test_every_beginning_of_a_record_is_completed(first: int) -> None:
    """Every third of them, from the first on."""
    record = {"name": "beta", "code": "ABC-0123", "when": "2024-02-29T12:00:00Z", "count": 55}
    record |= {"kids": [record | {"kids": [], "next": None, "any": ["x", 1.5e3, True]}]}
    whole = json.dumps(record | {"next": None, "any": {"a\\": '"'}})
    validator = jsonschema.Draft202012Validator(RECORD)
    assert validator.is_valid(json.loads(whole))
    for end in range(first, len(whole) + 1, 3):
        found = shortest(after(RECORD, whole[:end]), whole[:end].encode())
        assert found is not None, whole[:end]
        assert validator.is_valid(json.loads(whole[:end] + found.decode())), whole[:end]


def params(schema: dict[str, Any], **more: Any) -> SamplingParams:
    form = StructuredOutputsParams(json=json.dumps(schema))
    return SamplingParams(structured_outputs=form, **more)


@pytest.mark.parametrize("room", [40, 60, 90])
def test_a_text_without_end_is_cut_so_that_it_is_valid(
    checkpoint: Path, decode: Callable[[list[int]], str], room: int
) -> None:
    """A random model rarely ends; siblings have their own places."""
    made = engine(checkpoint)
    for number, schema in enumerate(OPEN):
        for seed in range(3):
            more: dict[str, Any] = {"temperature": 1.0, "seed": seed, "n": 2}
            asked = params(schema, max_tokens=room, **(more if seed else {"temperature": 0}))
            made.add_request(f"{number} {seed}", [5, 7, seed], asked)
    cut = 0
    for (name, _), (tokens, output) in run(made).items():
        schema = OPEN[int(name.split()[0])]
        text = decode([token for token in tokens if token != EOS])
        # Bytes that are no UTF-8 can stand in a string until its end; the decoder replaces them.
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text
        assert len(tokens) <= room
        cut += output.finish_reason == "length"
    assert cut >= 10


def test_texts_that_end_by_themselves_stay_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they just fit, their end included."""
    schemas = [
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"enum": ["a", "bc", True, None]}, "maxItems": 12},
        {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}},
        {"type": "object", "additionalProperties": {"type": "boolean"}},
    ]
    asked = {
        f"{number} {seed}": (schema, {"temperature": 1.2, "seed": seed})
        for number, schema in enumerate(schemas)
        for seed in range(8)
    }

    def texts(rooms: dict[str, int]) -> dict[str, tuple[list[int], str | None]]:
        made = engine(checkpoint)
        for name, room in rooms.items():
            schema, more = asked[name]
            made.add_request(name, [5, 7], params(schema, max_tokens=room, **more))
        found = run(made)
        return {name: (tokens, one.finish_reason) for (name, _), (tokens, one) in found.items()}

    with monkeypatch.context() as patch:
        patch.setattr(Ending, "due", lambda self, room, whole: False)
        free = texts(dict.fromkeys(asked, 150))
    ended = {name: one for name, one in free.items() if one[1] == "stop"}
    assert len(ended) >= 12
    for more in (0, 1, 2, 30):
        rooms = {name: len(tokens) + more for name, (tokens, _) in ended.items()}
        assert texts(rooms) == ended


def test_too_little_room_for_any_text_ends_as_ever(checkpoint: Path) -> None:
    made = engine(checkpoint)
    made.add_request("a", [5], params(RECORD, max_tokens=6, temperature=0))
    tokens, output = run(made)["a", 0]
    assert (len(tokens), output.finish_reason) == (6, "length")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_no_room_could_hold_keeps_its_form_as_far_as_it_goes(
    checkpoint: Path, decode: Callable[[list[int]], str], temperature: float
) -> None:
    """At most places such a form allows very few tokens, of which none may be left."""
    made = engine(checkpoint)
    whole = '{"name":{"aged":[12,true]}}'
    for room in range(1, 16):
        form = StructuredOutputsParams(
            json={"const": json.loads(whole)}, disable_any_whitespace=True
        )
        asked = SamplingParams(
            structured_outputs=form, temperature=temperature, seed=room, max_tokens=room
        )
        made.add_request(str(room), [5, 7], asked)
    for (room, _), (tokens, output) in run(made).items():
        text = decode([token for token in tokens if token != EOS])
        assert output.error is None, f"{room} tokens: {output.error}"
        assert whole.startswith(text), f"{room} tokens: {text!r}"
        assert text == whole or (output.finish_reason, len(tokens)) == ("length", int(room))


@pytest.mark.parametrize("mark", ["!", "<[1]>"])
def test_json_after_reasoning_is_completed_too(
    checkpoint: Path, decode: Callable[[list[int]], str], mark: str
) -> None:
    """Whatever the reasoning says, and whether a text or a special token ends it."""
    end = (
        'thought: THOUGHT? <[1]>\nTHOUGHT: /[{"\\[x]+/'
        if mark == "<[1]>"
        else 'thought: /[{"\\[x]{0,9}!/'
    )
    made = engine(checkpoint)
    for seed in range(12):
        form = StructuredOutputsParams(json=json.dumps(TREE), prefix=f"prefix: thought\n{end}\n")
        asked = SamplingParams(
            structured_outputs=form, temperature=1.0, seed=seed, max_tokens=90, logit_bias={1: 3.0}
        )
        made.add_request(str(seed), [5, 7], asked)
    cut = 0
    for (seed, _), (tokens, output) in run(made).items():
        tokens = [token for token in tokens if token != EOS]
        if mark == "<[1]>":
            text = decode(tokens[tokens.index(1) + 1 :]) if 1 in tokens else ""
        else:
            text = decode(tokens).partition(mark)[2]
        assert jsonschema.Draft202012Validator(TREE).is_valid(json.loads(text)), (seed, text)
        cut += output.finish_reason == "length"
    assert cut
