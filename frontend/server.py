"""An HTTP server that speaks the OpenAI API's completions and chat completions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from coppice import __version__
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.errors import BadRequest, EngineStopped, bad_value
from coppice.frontend.http.access import Access
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.middleware import NOTE, Note, cors_headers, middlewares
from coppice.frontend.http.openapi import with_description
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.http.routes import Route, add_routes, json_answer
from coppice.frontend.openai.answers import ChatCompletion, Completion, usage, without_text
from coppice.frontend.openai.event_stream import EventStream, counts
from coppice.frontend.openai.prepare import Prepared, prepare
from coppice.frontend.openai.requests import (
    ChatBody,
    CompletionBody,
    CompletionRequest,
    PromptInput,
    parse_chat,
    parse_completion,
)
from coppice.frontend.openai.schemas import (
    ChatAnswer,
    CompletionAnswer,
    ModelCard,
    ModelList,
    Status,
    Version,
    either,
)
from coppice.frontend.openai.tokenize_routes import TokenizeRoutes
from coppice.frontend.openai.tools.formats import format_of
from coppice.frontend.report.dashboard_files import Dashboard
from coppice.frontend.report.metrics import Metrics
from coppice.frontend.report.reporter import Reporter
from coppice.frontend.report.routes import CacheRoutes
from coppice.runtime.requests.request import QueueFull

log = logging.getLogger(__name__)

MUCH_BYTES = 256 * 2**10  # from here on a body is much to tokenize


class Server:
    """The routes, over one engine that serves one model.

    Args:
        engine: a started engine.
        model: the name under which requests must ask for the model.
        options: of the server itself; the defaults if not given.
    """

    def __init__(
        self, engine: EngineClient, model: str, options: ServerOptions | None = None
    ) -> None:
        self._engine = engine
        self._model = model
        self._options = options or ServerOptions()
        keys = self._options.keys()
        self._access = Access(
            keys,
            only_admins=self._options.isolate_keys,
            max_concurrent=self._options.max_concurrent_requests,
            per_minute=self._options.requests_per_minute,
        )
        self._tool_format = format_of(engine.tokenizer, self._options.tool_call_parser)
        self._draining = False
        self._created = int(time.time())
        self._bodies = JsonBodies(self._longest)
        # Megabytes of text take seconds: nobody else waits for them.
        self._tokenizing = ThreadPoolExecutor(1, "coppice-tokenizer")
        self._tokenizing_much = ThreadPoolExecutor(1, "coppice-tokenizer-of-much")
        self._metrics = Metrics(engine, model, lambda: engine.restarts)
        tokenizer = engine.tokenizer
        reporter = Reporter(engine, tokenizer, model, show_text=self._options.report_text)
        self._cache = CacheRoutes(
            engine,
            tokenizer,
            reporter,
            self._bodies,
            self._tokenizing_much,
            tenant=lambda request: self._tenant(request[NOTE]),
            tenants=[key.name for key in keys] if self._options.isolate_keys else [],
        )

    def application(self) -> web.Application:
        """The application; run it with `handler_cancellation`, so that vanished clients count."""
        around = middlewares(self._access, self._options.cors_origin)
        app = web.Application(
            middlewares=[self._metrics.count, *around],
            client_max_size=self._options.max_body_bytes,
        )
        app.on_response_prepare.append(self._stream_headers)
        tokenize = TokenizeRoutes(
            self._engine, self._check_model, self._bodies, self._tokenizing_much
        )
        own = [*self._routes(), *tokenize.routes()]
        observed = [*self._metrics.routes(), *Dashboard().routes(), *self._cache.routes()]
        routes = with_description([*own, *observed])
        add_routes(app, routes)
        self._metrics.expect(routes)
        app.cleanup_ctx.append(self._cache.run)
        app.on_cleanup.append(self._close)
        return app

    def _routes(self) -> list[Route]:
        """All routes but the one that describes them."""
        state = {"application/json": Status.model_json_schema()}
        states = {200: state, 503: state}
        models, card = ModelList.model_json_schema(), ModelCard.model_json_schema()
        return [
            Route(
                "POST",
                "/v1/completions",
                self._completions,
                "Continue a prompt",
                either(CompletionAnswer),
                body=CompletionBody.model_json_schema(),
            ),
            Route(
                "POST",
                "/v1/chat/completions",
                self._chat_completions,
                "Answer a conversation",
                either(ChatAnswer),
                body=ChatBody.model_json_schema(),
            ),
            Route("GET", "/v1/models", self._models, "The models", json_answer(models)),
            Route("GET", "/v1/models/{model:.+}", self._one_model, "The model", json_answer(card)),
            Route("GET", "/health", self._health, "Whether requests are taken", states),
            Route("GET", "/health/ready", self._health, "Whether requests are taken", states),
            Route("GET", "/health/live", self._live, "Whether the server answers", {200: state}),
            Route(
                "GET",
                "/version",
                self._version,
                "The version of the software",
                json_answer(Version.model_json_schema()),
            ),
        ]

    def drain(self) -> None:
        """From now on new requests are refused; those that run may end."""
        self._draining = True

    async def _stream_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """An answer that is sent in pieces passes the middlewares after its headers are out."""
        response.headers["X-Request-Id"] = request[NOTE].request_id
        response.headers["Server"] = "coppice"
        response.headers.update(cors_headers(request, self._options.cors_origin))

    def _longest(self) -> int:
        """The most tokens that the model takes."""
        assert self._engine.ready is not None, "the server was started before the engine"
        return self._engine.ready.max_model_len

    async def _close(self, app: web.Application) -> None:
        self._bodies.close()
        for threads in (self._tokenizing, self._tokenizing_much):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: web.Request) -> web.Response:
        if self._draining:
            return web.json_response({"status": "the server is stopping"}, status=503)
        if self._engine.alive:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": self._engine.trouble}, status=503)

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "coppice",
        }

    def _check_model(self, model: str) -> None:
        if model != self._model:
            raise BadRequest(
                f"model {model!r} is not served here; {self._model!r} is",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion, Completion)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat, ChatCompletion)

    async def _answer(
        self,
        request: web.Request,
        parse: Callable[[Any], CompletionRequest],
        answers: type[Completion],
    ) -> web.StreamResponse:
        if self._draining:
            raise EngineStopped("the server is stopping")
        body, asked = await self._bodies.read(request, parse)
        self._check_model(asked.model)
        note = request[NOTE]
        note.fields["stream"] = asked.stream
        if self._options.log_prompts:
            note.fields["prompt"] = asked.messages or asked.prompts
        limit = self._options.request_timeout
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        try:
            async with asyncio.timeout_at(deadline):
                prepared = await self._prepare(asked, request.content_length)
                deltas = await self._engine.submit(
                    prepared.prompts,
                    prepared.params,
                    beam=prepared.beam,
                    cache_salt=asked.cache_salt,
                    tenant=self._tenant(note),
                    priority=asked.priority,
                    in_pieces=asked.stream,
                )
        except TimeoutError:
            raise self._too_late() from None
        except ValueError as error:
            raise bad_value(error, body) from error
        except QueueFull as error:
            raise BadRequest(str(error), status=429, kind="rate_limit_error") from error
        texts = self._engine.texts.token_texts
        shape = answers(self._model, asked, prepared, texts, self._tool_format)
        async with deltas:
            if asked.stream:
                stream = EventStream(request, shape, deltas, asked, prepared, self._too_late)
                return await stream.run(deadline)
            try:
                async with asyncio.timeout_at(deadline):
                    outputs = await deltas.outputs()
            except TimeoutError:
                raise self._too_late() from None
        if asked.nothing_new:
            outputs = [without_text(output) for output in outputs]
        note.fields |= counts(usage(outputs))
        return web.json_response(shape.whole(outputs))

    def _tenant(self, note: Note) -> str | None:
        """Whose cache a request may share; None: everybody's."""
        if not self._options.isolate_keys or note.guest is None:
            return None
        return note.guest.name

    def _too_late(self) -> TimeoutError:
        limit = self._options.request_timeout
        return TimeoutError(f"the request took longer than request_timeout, {limit:g} s")

    async def _prepare(self, asked: CompletionRequest, size: int | None) -> Prepared:
        """Prompts as tokens, forms checked; off the event loop. `size`: the body's bytes, if known.

        Large grammars take as long as large prompts.
        """
        much = size is None or size > MUCH_BYTES or asked.form is not None
        much = much or (asked.tools is not None and asked.tools.held)
        engine, texts = self._engine, self._engine.texts.token_texts
        given = (asked, engine.tokenizer, texts, self._tool_format, self._longest())
        if not (much or asked.messages or asked.echo or any(map(_is_text, asked.prompts))):
            return prepare(*given)  # token ids that need no work: another thread would cost more
        threads = self._tokenizing_much if much else self._tokenizing
        return await asyncio.get_running_loop().run_in_executor(threads, prepare, *given)


def _is_text(prompt: PromptInput) -> bool:
    return isinstance(prompt, str)
