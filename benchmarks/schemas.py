"""How many answers to open and recursive schemas are complete and valid within some tokens.

A hundred schemas: open objects and maps, trees, lists of anything, and what a fixed seed makes of
them. Each is asked of a small model, which by itself often never ends such JSON. An answer counts
if it is JSON that fits its schema, by jsonschema. Greedy, so that a run can be repeated.

    python -m benchmarks.schemas --model FOLDER [--json FILE] [--show]
    python -m benchmarks.schemas --url http://127.0.0.1:8000 --version NAME [--json FILE]

The second asks a server with the OpenAI API, of this engine or of another. It also runs on a
checkout of an earlier version, to compare.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jsonschema

from benchmarks.common.harness import Rows, parser

AT_ONCE = 32  # requests that run at a time

NAMES = [
    "name",
    "title",
    "note",
    "kind",
    "value",
    "items",
    "tags",
    "owner",
    "parts",
    "size",
    "next",
    "data",
    "info",
    "text",
]
SUBJECTS = (
    "a red bicycle", "the city of Rome", "a small library", "a recipe for bread", "a file system",
    "a family", "a football team", "a garden in spring", "a computer", "a thread of comments",
)  # fmt: skip


def classics() -> list[dict[str, Any]]:
    """Schemas as people write them."""
    ref: dict[str, Any] = {"$ref": "#"}
    text = {"type": "string"}
    node = {"type": "object", "required": ["name", "children"]}
    tree = node | {"properties": {"name": text, "children": {"type": "array", "items": ref}}}
    comment = {
        "type": "object",
        "properties": {"author": text, "text": text, "replies": {"type": "array", "items": ref}},
        "required": ["author", "text", "replies"],
        "additionalProperties": False,
    }
    entry = {
        "type": "object",
        "properties": {"name": text, "entries": {"type": "object", "additionalProperties": ref}},
        "required": ["name"],
    }
    meta = {
        "type": "object",
        "properties": {
            "type": {"enum": ["object", "array", "string", "number"]},
            "properties": {"type": "object", "additionalProperties": ref},
            "items": ref,
            "anyOf": {"type": "array", "items": ref},
        },
        "required": ["type"],
    }
    linked = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [ref, {"type": "null"}]}},
        "required": ["value", "next"],
    }
    expression = {
        "anyOf": [
            {"type": "number"},
            {
                "type": "object",
                "properties": {"op": {"enum": ["+", "*"]}, "args": {"type": "array", "items": ref}},
                "required": ["op", "args"],
                "additionalProperties": False,
            },
        ]
    }
    return [
        {"type": "object"},
        {"type": "array"},
        {"type": ["object", "array"]},
        {"type": "object", "additionalProperties": text},
        {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}},
        {"type": "object", "properties": {"name": text}, "required": ["name"]},
        {"type": "array", "items": {"type": "object"}, "minItems": 2},
        tree,
        comment,
        entry,
        meta,
        linked,
        expression,
    ]


def made(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema, more often open or recursive than not."""
    kind = rng.choice(["object", "object", "map", "array", "string", "number", "any", "self"])
    if depth == 0:
        kind = rng.choice(["object", "map", "array"])
    if depth > 3:
        kind = rng.choice(["string", "number"])
    if kind == "object":
        names = rng.sample(NAMES, rng.randint(1, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: made(rng, depth + 1) for name in names},
            # What names itself may be left out, so that a finite text exists.
            "required": [],
        }
        schema["required"] = [
            name
            for name, each in schema["properties"].items()
            if "$ref" not in each and rng.random() < 0.6
        ]
        if rng.random() < 0.3:
            schema["additionalProperties"] = False
        return schema
    if kind == "map":
        return {"type": "object", "additionalProperties": made(rng, depth + 1)}
    if kind == "array":
        return {"type": "array", "items": made(rng, depth + 1)}
    if kind == "self":
        return {"$ref": "#"}
    return {} if kind == "any" else {"type": kind}


def schemas(count: int) -> list[dict[str, Any]]:
    """The classics, then made ones."""
    rng = random.Random(22)
    known = classics()
    return (known + [made(rng) for _ in range(count)])[:count]


@dataclass(frozen=True)
class Answer:
    """What came for one schema; `refused` is the reason if there was no text at all."""

    text: str
    finish_reason: str | None
    tokens: int
    refused: str = ""


Asked = Sequence[tuple[list[dict[str, Any]], dict[str, Any]]]  # messages and schema


def in_process(llm: Any, asked: Asked, max_tokens: int, sampling: dict[str, Any]) -> list[Answer]:
    """The answers of an engine in this process."""
    from coppice import SamplingParams
    from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

    params = [
        SamplingParams(
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
            **sampling,
        )
        for _, schema in asked
    ]
    outputs = llm.chat([messages for messages, _ in asked], params)
    made = [output.outputs[0] for output in outputs]
    return [Answer(each.text, each.finish_reason, len(each.token_ids)) for each in made]


def from_server(url: str, asked: Asked, max_tokens: int, sampling: dict[str, Any]) -> list[Answer]:
    """The answers of a server, each asked for with `response_format`."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
    model = client.models.list().data[0].id

    def one(task: tuple[list[dict[str, Any]], dict[str, Any]]) -> Answer:
        messages, schema = task
        form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        try:
            made = client.chat.completions.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=max_tokens,
                response_format=form,
                **sampling,
            )
        except openai.APIStatusError as error:
            return Answer("", None, 0, f"{error.status_code}: {error.message}")
        choice, usage = made.choices[0], made.usage
        tokens = usage.completion_tokens if usage else 0
        return Answer(choice.message.content or "", choice.finish_reason, tokens)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(one, asked))


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    where = arguments.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", help="folder of a chat model")
    where.add_argument("--url", help="of a server with the OpenAI API")
    arguments.add_argument("--version", help="a name for what is measured, kept in the rows")
    arguments.add_argument("--max-tokens", type=int, default=512)
    arguments.add_argument("--seeds", type=int, nargs="*", default=[], help="also sampled, at 0.8")
    arguments.add_argument("--show", action="store_true", help="print what is not valid")
    options = arguments.parse_args()
    rows = Rows(options.json)
    llm = None
    if options.model:
        from coppice import LLM  # here, so that other engines' environments can ask a server

        llm = LLM(model=options.model, max_num_seqs=AT_ONCE)
    asked = [
        (
            [
                {
                    "role": "user",
                    "content": f"Describe {SUBJECTS[number % len(SUBJECTS)]} as JSON for this "
                    f"schema: {json.dumps(schema)}",
                }
            ],
            schema,
        )
        for number, schema in enumerate(schemas(4 if options.quick else 100))
    ]
    for seed in [None, *options.seeds]:
        sampling = {"temperature": 0.0} if seed is None else {"temperature": 0.8, "seed": seed}
        begun = time.perf_counter()
        if options.url:
            answers = from_server(options.url, asked, options.max_tokens, sampling)
        else:
            answers = in_process(llm, asked, options.max_tokens, sampling)
        seconds = time.perf_counter() - begun
        good = [valid(one.text, schema) for one, (_, schema) in zip(answers, asked, strict=True)]
        stopped = [one.finish_reason == "stop" for one in answers]
        pairs = list(zip(good, stopped, strict=True))
        rows.add(
            **({"version": options.version} if options.version else {}),
            sampling="greedy" if seed is None else f"0.8, seed {seed}",
            schemas=len(asked),
            max_tokens=options.max_tokens,
            complete_and_valid=sum(good) / len(good),
            ended_by_itself=sum(stopped) / len(good),
            cut_but_valid=sum(fits and not ended for fits, ended in pairs) / len(good),
            ended_but_invalid=sum(ended and not fits for fits, ended in pairs) / len(good),
            refused=sum(bool(one.refused) for one in answers) / len(good),
            tokens=sum(one.tokens for one in answers),
            times={"seconds": round(seconds, 1)},
        )
        if options.show:
            for number, (one, (_, schema)) in enumerate(zip(answers, asked, strict=True)):
                if not good[number]:
                    text = one.refused or f"{one.finish_reason}: {one.text}"
                    print(f"{number}: {json.dumps(schema)}\n    {text}", file=sys.stderr)


def valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether it is JSON that fits the schema."""
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except (ValueError, RecursionError):
        return False


if __name__ == "__main__":
    main()
