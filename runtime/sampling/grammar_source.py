"""Forms of a text as grammars in llguidance's own format, and whether they are valid."""

from __future__ import annotations

import json

from llguidance import LLMatcher, grammar_from

from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

# Without a bound, a model that prefers white space would never reach the end.
_WHITESPACE = r"[ \t\n\r]{0,64}"


def check(params: StructuredOutputsParams) -> None:
    """Raises ValueError, naming the field, if there is no such schema, expression or grammar.

    Needs no tokenizer. Takes milliseconds, for large grammars up to a second, without holding the
    interpreter's lock meanwhile.
    """
    try:
        problem = LLMatcher.validate_grammar(source(params))
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise ValueError(f"{params.kind} must be a form that can be followed: {problem:.400}")


def source(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own format."""
    kind = params.kind
    if kind in ("json", "json_object"):
        schema = params.json if kind == "json" else '{"type": "object"}'
        assert isinstance(schema, str)
        if params.disable_any_whitespace:
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_flexible": False}
            )
        pattern = params.whitespace_pattern or _WHITESPACE
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": pattern})
    if kind == "regex":
        assert params.regex is not None
        return LLMatcher.grammar_from_regex(params.regex)
    if kind == "choice":
        return grammar_from("choice", json.dumps(params.choice))
    assert params.grammar is not None
    return grammar_from("grammar", params.grammar)
