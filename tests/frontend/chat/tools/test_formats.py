"""Formats of tool calls: what their readers find in any pieces, and what their grammars accept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.pieces import CallArguments, CallBegins, Piece, Reader, TextPiece
from coppice.frontend.chat.tools.choice import AllowedToolsChoice, Tool, Tools, tools_of
from coppice.frontend.chat.tools.deepseek import ALL, ALL_END, ONE, ONE_END, SEPARATOR
from coppice.frontend.chat.tools.registry import FORMATS, format_of
from coppice.runtime.sampling.grammar_source import check, source
from tests.frontend.conftest import byte_level_tokenizer

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
CLOCK = {"type": "object", "properties": {"zone": {"type": "string"}, "h24": {"type": "boolean"}}}


def tools(choice: Any = None, *, parallel: bool = True, held: bool = False) -> Tools:
    """The tools "weather", "clock" and, which may not be called where calls are `held`, "extra"."""
    schemas = {"weather": WEATHER, "clock": CLOCK} | ({"extra": CLOCK} if held else {})
    offered = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
        for name, schema in schemas.items()
    ]
    if held:
        named = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")]
        allowed = {"mode": choice or "auto", "tools": named}
        choice = AllowedToolsChoice.model_validate(
            {"type": "allowed_tools", "allowed_tools": allowed}
        )
    found = tools_of(offered, choice, parallel)
    assert found is not None
    return found


SPECIAL_MARKS = sorted({mark for format in FORMATS.values() for mark in format.marks})


@cache
def tokenizer(*, whole: bool) -> PreTrainedTokenizerFast:
    """With all marks as tokens, or with none."""
    fast: FastTokenizer = byte_level_tokenizer()
    if whole:
        fast.add_tokens([AddedToken(mark, special="[" in mark) for mark in SPECIAL_MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>")


def marks(*, whole: bool) -> Marks:
    wrapped = tokenizer(whole=whole)
    added = {token.content: place for place, token in wrapped.added_tokens_decoder.items()}
    return Marks(added, [])


def cuts(text: str) -> Iterator[list[str]]:
    """The text whole, in characters, and in random pieces."""
    yield [text]
    yield list(text)
    generator = random.Random(7)
    for _ in range(20):
        places = sorted(generator.randrange(len(text) + 1) for _ in range(5))
        yield [text[a:b] for a, b in pairwise([0, *places, len(text)])]


def put_together(pieces: Sequence[Piece]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            assert piece.text
            text += piece.text
        elif isinstance(piece, CallBegins):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, CallArguments)
            assert piece.text
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return text, calls


def read(reader: Reader, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    found = [made for piece in pieces for made in reader.push(piece)]
    return put_together(found + reader.end())


VALUES = {"place": 'a "quoted" {brace}\n\\ 東京 🙂 </x>', "days": 3, "tags": ["a", "b)]"]}
BOTH = [("weather", VALUES), ("clock", {})]
WRITTEN = [(name, json.dumps(values, ensure_ascii=False)) for name, values in BOTH]


def found(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_reads_what_it_writes(name: str) -> None:
    format = FORMATS[name]
    text = format.write(WRITTEN)
    for pieces in cuts(text):
        assert read(format.reader(tools()), pieces) == ("", read(format.reader(tools()), [text])[1])
        beside, calls = read(format.reader(tools()), pieces)
        assert (beside, found(calls)) == ("", BOTH), pieces
        beside, calls = read(format.reader(tools(parallel=False)), pieces)
        assert (beside, found(calls)) == ("", BOTH[:1])


BEFORE = sorted(set(FORMATS) - {"llama", "pythonic", "gpt_oss"})


@pytest.mark.parametrize("name", BEFORE)
def test_text_before_calls(name: str) -> None:
    format = FORMATS[name]
    for pieces in cuts("I look.\n\n" + format.write(WRITTEN) + "\n"):
        beside, calls = read(format.reader(tools()), pieces)
        assert (beside, found(calls)) == ("I look.", BOTH), pieces


TEXTS = ["Hello, world.\n", "a < b [x] <tool", "[1, 2]", "[f(x)", "[a b", "[]", "<｜tool", "{}", ""]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("text", TEXTS)
def test_text_without_calls(name: str, text: str) -> None:
    for pieces in cuts(text):
        assert read(FORMATS[name].reader(tools()), pieces) == (text, []), pieces


CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # Mistral since version 11, with and without ids, and several calls.
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"place": "P", "days": 1}[TOOL_CALLS]clock[ARGS]{}', "",
     [("weather", {"place": "P", "days": 1}), ("clock", {})]),
    ("mistral", '[TOOL_CALLS]clock[CALL_ID]abc123456[ARGS]{"zone": "x"}', "",
     [("clock", {"zone": "x"})]),
    ("mistral", '[TOOL_CALLS] [{"name": "clock", "arguments": {}, "id": "123456789"}]', "",
     [("clock", {})]),
    ("mistral", "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
    ("mistral", "[TOOL_CALLS][{}] x", "[TOOL_CALLS]{}] x", []),
    # Calls without the outer tag, values without line breaks, and a value that is no JSON.
    ("qwen3_coder", "<function=weather>\n<parameter=place>P</parameter><parameter=days>2"
     "</parameter></function>", "", [("weather", {"place": "P", "days": 2})]),
    ("qwen3_coder", "<tool_call><function=clock><parameter=h24>True</parameter></function>"
     "</tool_call>", "", [("clock", {"h24": True})]),
    ("qwen3_coder", "<tool_call>\n<function=clock>\n<parameter=zone>\n\n two\nlines\n\n"
     "</parameter>\n</function>\n</tool_call>", "", [("clock", {"zone": "\n two\nlines\n"})]),
    ("qwen3_coder", "<tool_call>\n<function=other>\n<parameter=x>\n5\n</parameter>\n</function>\n"
     "</tool_call>", "", [("other", {"x": "5"})]),
    ("qwen3_coder", "<tool_call>\nnothing", "<tool_call>\nnothing", []),
    # GLM: each tag in a line of its own or not, a value that is no JSON, tags that are missing.
    ("glm45", "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>P</arg_value>\n"
     "<arg_key> days </arg_key><arg_value>2</arg_value></tool_call>\n<tool_call>clock\n"
     "</tool_call>done", "done", [("weather", {"place": "P", "days": 2}), ("clock", {})]),
    ("glm47", "<tool_call>clock<arg_key>h24</arg_key><arg_value>True</arg_value></tool_call>", "",
     [("clock", {"h24": True})]),
    ("glm45", "<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>\n two\n</arg_value>\n"
     "</tool_call>", "", [("clock", {"zone": "\n two\n"})]),
    ("glm45", "<tool_call>clock\n<arg_key>zone</arg_key>\n</tool_call>", "", [("clock", {})]),
    ("glm45", '<tool_call>{"name": "clock"}\n', '<tool_call>{"name": "clock"}\n', []),
    ("glm45", "<tool_call>\n", "<tool_call>\n", []),
    # Granite, with the tag of its later models.
    ("granite", '<tool_call>[{"name": "clock", "arguments": {}}]', "", [("clock", {})]),
    ("granite", '<|tool_call|> [{"arguments": {}, "name": "clock"}] x', "x", [("clock", {})]),
    # Python's literals and those of JSON.
    ("pythonic", "[clock(zone='it\\'s', h24=True), clock(h24=false, zone=\"\\ud83d\\ude42\")]", "",
     [("clock", {"zone": "it's", "h24": True}), ("clock", {"h24": False, "zone": "🙂"})]),
    ("pythonic", "<|python_start|>[clock(zone={'k': [1, -2.5, None]})]<|python_end|>", "",
     [("clock", {"zone": {"k": [1, -2.5, None]}})]),
    ("pythonic", "[f(open('x'))]", "[f(open('x'))]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", " [clock()]\n", "", [("clock", {})]),
    # No arguments at all, and text after the calls.
    ("deepseek_v31", f"{ALL}{ONE}clock{SEPARATOR}{ONE_END}{ALL_END}", "", [("clock", {})]),
    ("deepseek_v3", f"x{ALL}{ONE}function{SEPARATOR}clock\n```json\n"
     f'{{"zone": "```"}}\n```{ONE_END}{ALL_END}y', "xy", [("clock", {"zone": "```"})]),
    ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
     '<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.clock '
     '<|constrain|>json<|message|>{"zone": "<|"}<|call|>', "I look.", [("clock", {"zone": "<|"})]),
    ("gpt_oss", " to=functions.clock<|channel|>commentary json<|message|><|call|>", "",
     [("clock", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "beside", "calls"), CASES)
def test_other_ways_of_writing(
    name: str, text: str, beside: str, calls: list[tuple[str, Any]]
) -> None:
    for pieces in cuts(text):
        kind = FORMATS[name]
        made, called = read(_without_reasoning(kind.reader(tools())), pieces)
        assert (made, found(called)) == (beside, calls), pieces


def _without_reasoning(reader: Reader) -> Any:
    def texts(pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if type(piece).__name__ != "ReasoningPiece"]

    return SimpleNamespace(
        push=lambda text: texts(reader.push(text)), end=lambda: texts(reader.end())
    )


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_call_that_is_cut_keeps_what_there_is(name: str) -> None:
    """Wherever the text is cut, no text of a call is taken for text of the answer."""
    format = FORMATS[name]
    text = format.write([("weather", '{"place": "Paris", "days": 3}')])
    begun = 0
    for length in range(len(text)):
        beside, calls = read(format.reader(tools()), [text[:length]])
        begun += bool(calls)
        if calls:
            assert beside == ""
            assert calls[0][0] == "weather"
            made = calls[0][1].rstrip("<|cal>")  # a mark is one token, and is never cut
            assert '{"place": "Paris", "days": 3}'.startswith(made)
    assert begun


STREAMED = {"hermes": 20, "llama": 20, "mistral": 20, "deepseek_v3": 20, "deepseek_v31": 20,
            "gpt_oss": 20, "qwen3_coder": 5, "pythonic": 0,
            "glm45": 5, "glm47": 5, "granite": 20}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_arguments_come_while_they_are_written(name: str) -> None:
    format = FORMATS[name]
    reader = format.reader(tools())
    pieces = [made for char in format.write(WRITTEN[:1]) for made in reader.push(char)]
    assert sum(isinstance(piece, CallArguments) for piece in pieces) >= STREAMED[name]


@cache
def guidance(*, whole: bool) -> Any:
    wrapped = tokenizer(whole=whole)
    return from_tokenizer(wrapped, n_vocab=len(wrapped), eos_token=[wrapped.eos_token_id])


def accepts(grammar: str, text: str, *, whole: bool) -> bool:
    matcher = LLMatcher(guidance(whole=whole), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer(whole=whole).encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


GOOD = '{"place": "Paris", "days": 3}'
ONE_CALL = {"gpt_oss"}  # a call ends the answer


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_grammars(name: str, whole: bool) -> None:
    """They accept calls that fit the schemas, whether marks are tokens or text."""
    format = FORMATS[name]

    def written(*calls: tuple[str, str]) -> str:
        text = format.write(calls)
        if name == "mistral" and whole:
            text = "".join(f"[TOOL_CALLS]{called}[ARGS]{given}" for called, given in calls)
        return text.removesuffix("<|call|>")

    assert format.constraint(tools(), marks(whole=whole)) is None
    for forced in (True, False):
        for parallel in (True, False):
            asked = tools("required" if forced else None, parallel=parallel, held=True)
            form = format.constraint(asked, marks(whole=whole))
            assert form is not None
            plain = format.constraint(asked, Marks())
            assert plain is not None
            assert check(plain) == ()
            grammar = source(form).text

            def ok(text: str, grammar: str = grammar) -> bool:
                return accepts(grammar, text, whole=whole)

            assert ok(written(("weather", GOOD)))
            more = '{"place": "Paris", "days": 3, "unit": "C", "exact": true, "tags": ["a"]}'
            assert ok(written(("weather", more)).replace("'", '"'))
            assert ok(written(("clock", '{"h24": false}')))
            assert ok(written(("clock", "{}")))
            if name not in ONE_CALL:
                assert ok(written(("weather", GOOD), ("clock", "{}"))) == parallel
            assert not ok(written(("weather", '{"place": "Paris", "days": 33}')))
            assert not ok(written(("weather", '{"place": "Paris"}')))
            assert not ok(written(("whether", GOOD)))
            text = "No need to."
            if name == "gpt_oss":
                text = f"<|channel|>final<|message|>{text}"
            assert ok(text) != forced


OPTIONAL = ["hermes", "mistral", "deepseek_v31", "qwen3_coder", "glm45", "glm47", "granite"]


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("whole", [True, False])
def test_grammars_take_text_before_optional_calls(name: str, whole: bool) -> None:
    form = FORMATS[name].constraint(tools(held=True), marks(whole=whole))
    assert form is not None
    text = FORMATS[name].write([("clock", "{}")])
    if name == "mistral" and whole:
        text = "[TOOL_CALLS]clock[ARGS]{}"
    assert accepts(source(form).text, f"I look.\n{text}", whole=whole)
    assert not accepts(source(form).text, "I look.\n" + text.replace("clock", "cluck"), whole=whole)


def test_parameters_of_which_none_is_required_may_come_alone() -> None:
    form = FORMATS["pythonic"].constraint(tools("required"), marks(whole=False))
    assert form is not None
    for text in ("[clock()]", '[clock(zone="x")]', "[clock(h24=True)]",
                 '[clock(zone="x", h24=True)]'):  # fmt: skip
        assert accepts(source(form).text, text, whole=False), text
    assert not accepts(source(form).text, "[clock(, h24=True)]", whole=False)


BOUNDED = {
    "type": "object",
    "properties": {
        "digits": {"$ref": "#/$defs/digits"},
        "found": {"type": "string", "pattern": "b/\\d"},
        "either": {"type": "string", "pattern": "^(yes|no)$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 3},
        "fixed": {"const": "as is"},
        "middle": {"type": "string", "pattern": "a|^b"},
    },
    "$defs": {"digits": {"type": "string", "pattern": "^\\d{4}$", "maxLength": 9}},
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47"])
def test_texts_between_tags_are_held_to_their_schemas(name: str, whole: bool) -> None:
    offered = [
        Tool.model_validate({"type": "function", "function": {"name": each, "parameters": BOUNDED}})
        for each in ("one", "two")
    ]
    asked = tools_of(offered, "required", None)
    assert asked is not None
    form = FORMATS[name].constraint(asked, marks(whole=whole))
    assert form is not None
    plain = FORMATS[name].constraint(asked, Marks())
    assert plain is not None
    assert check(plain) == ()
    grammar = source(form).text
    for good, bad in (
        ({"digits": "1234"}, {"digits": "123"}),
        ({"digits": "0000"}, {"digits": "a0000"}),
        ({"found": "a b/7 c\nd"}, {"found": "b 7"}),
        ({"either": "no"}, {"either": "no more"}),
        ({"short": "東京"}, {"short": "abcd"}),
        ({"fixed": "as is"}, {"fixed": "as was"}),
        ({"digits": "1234", "short": "ab"}, {"digits": "1234", "short": "a"}),
        ({"middle": "c"}, {"other": "c"}),
    ):
        for values, fits in ((good, True), (bad, False)):
            text = FORMATS[name].write([("two", json.dumps(values))])
            assert accepts(grammar, text, whole=whole) == fits, values


TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>\n{}",
    "qwen3_coder": "{{ tools }}<tool_call>\n<function=example_function_name>",
    "mistral": "{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜>' + 'function' + '```json' }}",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜>' + tool['function']['name'] }}",
    "gpt_oss": "{{ tools }}<|channel|>commentary to=functions.x <|constrain|>json",
    "llama": '{{ tools }}{"name": function name, "parameters": dictionary}',
    "glm45": "{{ tools }}<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>",
    "glm47": "{{ tools }}<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>",
    "granite": "{{ tools }}respond with <|tool_call|> followed by a JSON list",
    "pythonic": "{{ tools }}[func_name1(params_name1=params_value1), func_name2(params)]",
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_is_known_by_its_marks_in_the_template(name: str) -> None:
    has: Any = SimpleNamespace(chat_template=TEMPLATES[name])
    assert format_of(has) is FORMATS[name]


def test_templates_without_calls() -> None:
    other: Any = SimpleNamespace(chat_template="{{ tools }}")
    assert format_of(other) is None
    plain: Any = SimpleNamespace(chat_template="{{ messages }}")
    assert format_of(plain) is FORMATS["hermes"], "the tools are described in a message"
