"""What the server offers about its cache: the report, the pins, and emptying it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from importlib.resources import files
from reprlib import repr as shown
from typing import Any

from aiohttp import web

from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.routes import Route, json_answer
from coppice.frontend.report.json import pin_json
from coppice.frontend.report.reporter import Asks, Reporter
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.report.cache import PinRefused
from coppice.runtime.requests.request import Unfinished

_COMPRESSED = 1 << 12  # bytes from which a report is worth compressing
_PIN_FIELDS = ("name", "prompt", "prompt_token_ids", "messages", "ttl", "cache_salt", "tenant")
_LONGEST_NAME = 200
_PIN = {
    "type": "object",
    "title": "Pin",
    "required": ["name", "namespace", "tokens", "cached_tokens", "ttl_seconds", "seconds_left"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string", "description": "A name that hides the cache_salt."},
        "tokens": {"type": "integer", "minimum": 1},
        "cached_tokens": {
            "type": "integer",
            "minimum": 0,
            "description": "Tokens kept now; the rest are kept once a request has computed them.",
        },
        "ttl_seconds": {"type": ["number", "null"]},
        "seconds_left": {"type": ["number", "null"]},
    },
}
_NEW_PIN = {
    "type": "object",
    "title": "NewPin",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": _LONGEST_NAME},
        "prompt": {"type": ["string", "null"], "description": "The prefix as text."},
        "prompt_token_ids": {"type": ["array", "null"], "items": {"type": "integer"}},
        "messages": {
            "type": ["array", "null"],
            "description": "The beginning of a conversation, as the chat template writes it.",
        },
        "ttl": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "description": "Seconds without use after which the pin ends; null: never.",
        },
        "cache_salt": {"type": ["string", "null"]},
        "tenant": {
            "type": ["string", "null"],
            "description": "With --isolate-keys: the name of the key whose requests hit it; null: "
            "the one that is presented.",
        },
    },
    "additionalProperties": False,
}


def report_schema() -> dict[str, Any]:
    """The JSON Schema of the report."""
    source = files("coppice.frontend.report").joinpath("cache_report.schema.json")
    schema: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return schema


class CacheRoutes:
    """Routes below /cache that answer with JSON."""

    def __init__(
        self,
        engine: Asks,
        tokenizer: Tokenizer,
        reporter: Reporter,
        bodies: JsonBodies,
        tokenizing: Executor,
        *,
        tenant: Callable[[web.Request], str | None],
        tenants: Collection[str],
    ) -> None:
        """`tokenizing` runs the tokenizer off the event loop.

        `tenant` tells whose cache a request may share, None everybody's, and `tenants` whom there
        are, none where all share it.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._reporter = reporter
        self._bodies = bodies
        self._tokenizing = tokenizing
        self._tenant = tenant
        self._tenants = tenants
        self._schema = report_schema()

    def routes(self) -> list[Route]:
        pins = {
            "type": "object",
            "required": ["object", "data"],
            "properties": {"data": {"type": "array", "items": _PIN}},
        }
        done = {"type": "object", "required": ["reset"]}
        deleted = {"type": "object", "required": ["name", "deleted"]}
        return [
            Route(
                "GET",
                "/cache/report",
                self._report,
                "What the cache saved, and why tokens missed",
                json_answer(self._schema),
            ),
            Route(
                "GET",
                "/cache/report/schema",
                self._report_schema,
                "The JSON Schema of /cache/report",
                json_answer({"type": "object"}),
            ),
            Route("POST", "/cache/reset", self._reset, "Empty the cache", json_answer(done)),
            Route("GET", "/cache/pins", self._pins, "The pins", json_answer(pins)),
            Route(
                "PUT",
                "/cache/pins",
                self._put_pin,
                "Keep a prefix in the cache",
                json_answer(_PIN),
                body=_NEW_PIN,
            ),
            Route(
                "DELETE",
                "/cache/pins/{name:.+}",
                self._delete_pin,
                "End a pin",
                json_answer(deleted),
            ),
        ]

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Samples the engine while the application runs (an item of its `cleanup_ctx`)."""
        await self._reporter.start()
        yield
        await self._reporter.stop()

    async def _report(self, request: web.Request) -> web.Response:
        answer = web.Response(
            body=await self._reporter.report(),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )
        if answer.content_length is not None and answer.content_length > _COMPRESSED:
            answer.enable_compression()
        return answer

    async def _report_schema(self, request: web.Request) -> web.Response:
        return web.json_response(self._schema)

    async def _reset(self, request: web.Request) -> web.Response:
        try:
            await self._engine.ask("reset_cache")
        except Unfinished as error:
            raise BadRequest(f"{error}; try again when they have ended", status=409) from error
        self._reporter.forget()
        return web.json_response({"reset": True})

    async def _pins(self, request: web.Request) -> web.Response:
        pins = await self._engine.ask("list_pins")
        data = [pin_json(pin, self._reporter.names) for pin in pins]
        return web.json_response({"object": "list", "data": data})

    async def _put_pin(self, request: web.Request) -> web.Response:
        _, body = await self._bodies.read(request, _checked)
        tenant = body.get("tenant", self._tenant(request))
        if "tenant" in body and tenant not in self._tenants:
            known = ", ".join(sorted(self._tenants)) or "none, without --isolate-keys"
            raise BadRequest(
                f"tenant must be the name of a key ({known}), got {shown(tenant)}", param="tenant"
            )
        tokens = await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, self._tokens, body
        )
        try:
            pin = await self._engine.ask(
                "put_pin",
                body["name"],
                tokens,
                cache_salt=body.get("cache_salt"),
                tenant=tenant,
                ttl=body.get("ttl"),
            )
        except PinRefused as error:
            raise BadRequest(str(error), status=409) from error
        except ValueError as error:
            raise bad_value(error, body) from error
        self._reporter.forget()
        return web.json_response(pin_json(pin, self._reporter.names))

    async def _delete_pin(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not await self._engine.ask("unpin", name):
            raise BadRequest(f"there is no pin named {name!r}", param="name", status=404)
        self._reporter.forget()
        return web.json_response({"name": name, "deleted": True})

    def _tokens(self, body: Mapping[str, Any]) -> Sequence[int]:
        try:
            if "messages" in body:
                return self._tokenizer.encode_chat(body["messages"], add_generation_prompt=False)
            if "prompt" in body:
                return self._tokenizer.encode(body["prompt"])
        except ValueError as error:
            raise bad_value(error, body) from error
        ids: list[int] = body["prompt_token_ids"]
        return ids


def _checked(body: Any) -> dict[str, Any]:
    """The fields that are set. Raises BadRequest for whatever is wrong with them."""
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    for field in body:
        if field not in _PIN_FIELDS:
            raise BadRequest(
                f"{field} is not a field of a pin; those are {', '.join(_PIN_FIELDS)}", param=field
            )
    fields = {field: value for field, value in body.items() if value is not None}
    for field in ("name", "cache_salt"):
        text = fields.get(field)
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            raise BadRequest(f"{field} must be valid Unicode, got {shown(text)}", param=field)
    name, ttl, salt = fields.get("name"), fields.get("ttl"), fields.get("cache_salt")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise BadRequest(
            f"name must be a string of 1 to {_LONGEST_NAME} characters, got {shown(name)}",
            param="name",
        )
    given = [field for field in ("prompt", "prompt_token_ids", "messages") if field in fields]
    if len(given) != 1:
        raise BadRequest(
            f"a pin needs one of prompt, prompt_token_ids and messages, got "
            f"{' and '.join(given) or 'none of them'}",
            param=given[0] if given else "prompt",
        )
    if "prompt" in fields and not isinstance(fields["prompt"], str):
        raise BadRequest(f"prompt must be a string, got {shown(fields['prompt'])}", param="prompt")
    ids = fields.get("prompt_token_ids", [])
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise BadRequest(
            f"prompt_token_ids must be a list of integers, got {shown(ids)}",
            param="prompt_token_ids",
        )
    if ttl is not None and (
        isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl < math.inf
    ):
        raise BadRequest(f"ttl must be a number of seconds above 0, got {shown(ttl)}", param="ttl")
    if salt is not None and not isinstance(salt, str):
        raise BadRequest(f"cache_salt must be a string, got {shown(salt)}", param="cache_salt")
    return fields
