"""The parameters by which a request asks for structured output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from coppice.frontend.api.form import Form, named
from coppice.frontend.errors import BadRequest
from coppice.frontend.strict import Body, Name, must_be
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

Schema: TypeAlias = Annotated[
    str | dict[str, Any], must_be("a JSON Schema, as an object or as its text")
]


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A named schema, which is followed in any case.

    With `strict` its objects are closed, and keywords that can't be followed are refused; else
    those are left out, and named in the header X-Coppice-Relaxed.
    """

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """vLLM's extension of that name: exactly one of the first five must be set."""

    # `json` is a method of every pydantic model.
    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    strict: bool = False


class Formed(Body):
    """The fields of a request that define the form of its text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    # Which library of vLLM follows the form: here it is always the same one.
    guided_decoding_backend: str | None = None

    # SGLang's names.
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None


def form_of(body: Formed) -> Form | None:
    """What the request asks for. Raises BadRequest for two forms, or one that is not valid."""
    found = [form for form in (_response_format(body), _structured(body), *_guided(body)) if form]
    for other in found[1:]:
        # Clients that know several versions of vLLM write the same form under two names.
        if other.params != found[0].params:
            raise BadRequest(
                f"{other.field} can't be combined with {found[0].field}", param=other.field
            )
    if body.guided_whitespace_pattern is not None and body.guided_json is None:
        name = "guided_whitespace_pattern"
        raise BadRequest(f"{name} needs guided_json", param=name)
    return found[0] if found else None


def _response_format(body: Formed) -> Form | None:
    wanted, field = body.response_format, "response_format"
    if isinstance(wanted, JsonObjectFormat):
        return _form(field, json_object=True)
    if isinstance(wanted, JsonSchemaFormat):
        field = "response_format.json_schema.schema"
        if wanted.json_schema.schema_ is None:
            raise BadRequest(f"{field} is required", param=field)
        strict = bool(wanted.json_schema.strict)
        return _form(field, json=wanted.json_schema.schema_, strict=strict)
    return None


def _structured(body: Formed) -> Form | None:
    given = body.structured_outputs
    if given is None:
        return None
    return _form("structured_outputs", **given.model_dump(by_alias=True))


def _guided(body: Formed) -> list[Form]:
    pattern = body.guided_whitespace_pattern
    return [
        _form(field, **{kind: value}, **more)
        for field, kind, value, more in (
            ("guided_json", "json", body.guided_json, {"whitespace_pattern": pattern}),
            ("guided_regex", "regex", body.guided_regex, {}),
            ("guided_choice", "choice", body.guided_choice, {}),
            ("guided_grammar", "grammar", body.guided_grammar, {}),
            ("guided_json_object", "json_object", body.guided_json_object or None, {}),
            ("json_schema", "json", body.json_schema, {}),
            ("regex", "regex", body.regex, {}),
            ("ebnf", "grammar", body.ebnf, {}),
        )
        if value is not None
    ]


def _form(field: str, **values: Any) -> Form:
    schema = values.get("json")
    if isinstance(schema, Mapping):
        values["json"] = json.dumps(schema)
    try:
        return Form(StructuredOutputsParams(**values), field)
    except ValueError as error:
        raise named(error, field) from error
