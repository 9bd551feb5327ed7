"""The server's routes below /cache: the report, the pins, and emptying the cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from aiohttp import web

from coppice.frontend.chat.template import encode_chat
from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.routes import Route, json_answer
from coppice.frontend.report.encode import encode_pin, report_schema
from coppice.frontend.report.pins import DeletedPin, NewPin, Pin, PinList, parse_pin
from coppice.frontend.report.reporter import Asks, Reporter
from coppice.frontend.text.threads import TokenizerThreads
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.report.snapshot import PinRefused
from coppice.runtime.requests.request import Unfinished

_COMPRESSED = 1 << 12  # bytes from which a report is worth compressing


class CacheRoutes:
    """Routes below /cache that answer with JSON."""

    def __init__(
        self,
        engine: Asks,
        tokenizer: Tokenizer,
        reporter: Reporter,
        bodies: JsonBodies,
        threads: TokenizerThreads,
        *,
        tenant: Callable[[web.Request], str | None],
        tenants: Collection[str],
    ) -> None:
        """`threads` run the tokenizer outside the event loop.

        `tenant` returns the tenant of a request, or None if all requests share the namespaces;
        `tenants` are all of them, none if all requests share the namespaces.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._reporter = reporter
        self._bodies = bodies
        self._threads = threads
        self._tenant = tenant
        self._tenants = tenants
        self._schema = report_schema()

    def routes(self) -> list[Route]:
        done = {"type": "object", "required": ["reset"]}
        pins, pin = PinList.model_json_schema(), Pin.model_json_schema()
        deleted = DeletedPin.model_json_schema()
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
                json_answer(pin),
                body=NewPin.model_json_schema(),
            ),
            Route(
                "DELETE",
                "/cache/pins/{name:(?s:.+)}",
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
        data = [encode_pin(pin, self._reporter.names) for pin in pins]
        return web.json_response({"object": "list", "data": data})

    async def _put_pin(self, request: web.Request) -> web.Response:
        body, asked = await self._bodies.read(request, parse_pin)
        tenant = self._tenant(request) if asked.tenant is None else asked.tenant
        if asked.tenant is not None and tenant not in self._tenants:
            known = ", ".join(sorted(self._tenants)) or "none, without --isolate-keys"
            raise BadRequest(
                f"tenant must be the name of a key ({known}), got {shown(tenant)}", param="tenant"
            )
        size = len(await request.read())
        tokens = await self._threads.run(self._tokens, asked, body, size=size)
        try:
            pin = await self._engine.ask(
                "put_pin",
                asked.name,
                tokens,
                cache_salt=asked.cache_salt,
                tenant=tenant,
                ttl=asked.ttl,
            )
        except PinRefused as error:
            raise BadRequest(str(error), status=409) from error
        except ValueError as error:
            raise bad_value(error, body) from error
        self._reporter.forget()
        return web.json_response(encode_pin(pin, self._reporter.names))

    async def _delete_pin(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not await self._engine.ask("unpin", name):
            raise BadRequest(f"there is no pin named {name!r}", param="name", status=404)
        self._reporter.forget()
        return web.json_response({"name": name, "deleted": True})

    def _tokens(self, asked: NewPin, body: Mapping[str, Any]) -> Sequence[int]:
        try:
            if asked.messages is not None:
                return encode_chat(self._tokenizer, body["messages"], add_generation_prompt=False)
            if asked.prompt is not None:
                return self._tokenizer.encode(asked.prompt)
        except ValueError as error:
            raise bad_value(error, body) from error
        return asked.prompt_token_ids or ()
