"""Forms of a text as grammars in llguidance's own format, and whether they can be followed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.forms.patterns import any_of, with_ascii_classes
from coppice.runtime.sampling.forms.schemas import Schema
from coppice.runtime.sampling.forms.trial import TRIALS
from coppice.runtime.sampling.grammar_library import LLMatcher, grammar_from

# Without a bound, a model that prefers white space would never reach the end.
_WHITESPACE = r"[ \t\n\r]{0,64}"
_MOST_CHECKED = 256  # forms of a tenant whose result is kept
# Signs of Lark's rules, which shape its trees and not the text: `?start: value`.
_SIGN = re.compile(r"^[?!]{1,2}(?=[a-z_]\w*\s*:)", re.MULTILINE | re.ASCII)


if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar in llguidance's own format.

    Attributes:
        text: the grammar.
        relaxed: keywords of the schema that it does not hold the text to.
    """

    text: str
    relaxed: tuple[str, ...] = ()


def check(params: StructuredOutputsParams, tenant: str | None = None) -> tuple[str, ...]:
    """The keywords of the form's schema that the text need not follow.

    Results are kept apart for each tenant: the time that one takes tells nobody what others asked.

    Raises ValueError, naming the field, if there is no such schema, expression or grammar, if no
    text can have the form, or if it takes too long to compile. Needs no tokenizer. Takes
    milliseconds, at most the seconds that a trial may take.
    """
    return _checks(tenant)(params)


@cache
def _checks(tenant: str | None) -> Callable[[StructuredOutputsParams], tuple[str, ...]]:
    """`_check` with the last results of one tenant."""
    return lru_cache(_MOST_CHECKED)(_check)


def _check(params: StructuredOutputsParams) -> tuple[str, ...]:
    try:
        found = source(params)
        warnings = TRIALS.run(found.text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{params.kind} must be a form that can be followed: {error!s:.400}"
        ) from None
    relaxed = tuple(dict.fromkeys([*found.relaxed, *_keywords(warnings)]))
    if relaxed and params.strict:
        raise ValueError(
            f"{params.kind} must be a form that can be followed exactly, since strict is true; its "
            f"{', '.join(relaxed)} can't be"
        )
    return relaxed


def source(params: StructuredOutputsParams) -> Source:
    """The grammar of a form. Raises ValueError for what is none at first sight."""
    form = _form(params)
    if params.prefix is None:
        return form
    text = form.text
    parts = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    whole = {"name": "whole", "lark_grammar": f"start: prefix @form\n{params.prefix}"}
    grammars = [whole, parts[0] | {"name": "form"}, *parts[1:]]
    return Source(json.dumps({"grammars": grammars}), form.relaxed)


def _form(params: StructuredOutputsParams) -> Source:
    kind = params.kind
    if kind in ("json", "json_object"):
        schema = params.json if kind == "json" else '{"type": "object"}'
        assert isinstance(schema, str)
        read = Schema(schema, strict=params.strict)
        space: JsonCompileOptions = {"whitespace_flexible": False}
        if not params.disable_any_whitespace:
            space = {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}
        text = LLMatcher.grammar_from_json_schema(
            json.dumps(read.followed), overrides={"lenient": True, **space}
        )
        return Source(text, read.relaxed)
    if kind == "regex":
        assert params.regex is not None
        return Source(LLMatcher.grammar_from_regex(with_ascii_classes(params.regex)))
    if kind == "choice":
        assert params.choice is not None
        # One expression is one part of the grammar; as alternatives thousands would be too many.
        return Source(LLMatcher.grammar_from_regex(any_of(dict.fromkeys(params.choice))))
    assert params.grammar is not None
    text, signs = _SIGN.subn("", params.grammar)
    return Source(grammar_from("lark" if signs else "grammar", text))


def followed(schema: str, *, strict: bool) -> dict[str, Any]:
    """A JSON Schema, given as text, as a grammar's `%json` takes it. Raises ValueError."""
    return Schema(schema, strict=strict).followed | {"x-guidance": {"lenient": True}}


def _keywords(warnings: list[str]) -> list[str]:
    """The keywords that llguidance's warnings are about."""
    found = []
    for warning in warnings:
        for sign, names in _SIGNS.items():
            if sign in warning:
                found += names or warning.split('"')[1::2]
    return found


_SIGNS: dict[str, list[str]] = {
    "Unimplemented keys": [],  # it quotes them
    "oneOf": ["oneOf"],
    "min/maxProperties": ["minProperties", "maxProperties"],
}
