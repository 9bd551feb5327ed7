"""The HTTP server: it puts the routes of all parts over one engine into one application."""

from __future__ import annotations

from aiohttp import web

from coppice.frontend.api.anthropic.routes import MessageRoutes
from coppice.frontend.api.handler import TextHandler
from coppice.frontend.api.openai.adapters import AdapterRoutes
from coppice.frontend.api.openai.completions import CompletionRoutes
from coppice.frontend.api.openai.models import ModelRoutes
from coppice.frontend.api.openai.pooling.routes import PoolingRoutes
from coppice.frontend.api.openai.render import RenderRoutes
from coppice.frontend.api.openai.responses.memory import ResponseMemory
from coppice.frontend.api.openai.responses.routes import ResponseRoutes
from coppice.frontend.api.openai.tokenize_routes import TokenizeRoutes
from coppice.frontend.api.served_model import ServedModel
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.http.access import Access
from coppice.frontend.http.connections import Connections
from coppice.frontend.http.health import Health
from coppice.frontend.http.json_answers import JsonAnswers
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.lora_modules import all_modules
from coppice.frontend.http.middleware import NOTE, cors_headers, middlewares
from coppice.frontend.http.openapi import with_description
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.http.routes import Route, add_routes
from coppice.frontend.report.dashboard_files import Dashboard
from coppice.frontend.report.metrics.scrape import Metrics
from coppice.frontend.report.reporter import Reporter
from coppice.frontend.report.routes import CacheRoutes
from coppice.frontend.server.front_page import FrontPage
from coppice.frontend.text.threads import TokenizerThreads


class Server:
    """An application over one engine that serves one model.

    Args:
        engine: a started engine.
        model: where the model was loaded from, and its name unless the options have others.
        options: of the server itself; the defaults if not given.

    Attributes:
        connections: of whoever runs the application, to be watched.
    """

    def __init__(
        self, engine: EngineClient, model: str, options: ServerOptions | None = None
    ) -> None:
        self._options = options or ServerOptions()
        keys = self._options.keys()
        isolated = self._options.isolate_keys
        self._access = Access(
            keys,
            isolated=isolated,
            max_concurrent=self._options.max_concurrent_requests,
            per_minute=self._options.requests_per_minute,
        )
        self._health = Health(engine)
        self.connections = Connections(self._options.header_timeout)
        self._bodies = JsonBodies(lambda: engine.max_model_len, self._options.body_timeout)
        self._writer = JsonAnswers()
        self._threads = TokenizerThreads()
        served = ServedModel(self._options.served_model_name or (model,), model)
        tokenizer = engine.tokenizer
        reporter = Reporter(engine, tokenizer, served.name, show_text=self._options.report_text)
        self._metrics = Metrics(engine, served.name, lambda: engine.restarts, lambda: engine.alive)
        self._cache = CacheRoutes(
            engine,
            tokenizer,
            reporter,
            self._bodies,
            self._threads,
            tenant=lambda request: request[NOTE].tenant,
            tenants=[key.name for key in keys] if isolated else [],
        )
        memory = ResponseMemory(self._options.response_memory, self._options.response_ttl)
        handler = TextHandler(
            engine,
            served,
            self._bodies,
            self._writer,
            self._threads,
            self._options,
            self._health.check,
        )
        self._adapters = AdapterRoutes(served, engine, self._bodies)
        tokenize = TokenizeRoutes(
            engine, served, self._bodies, self._writer, self._threads, handler.dialect
        )
        pooling = PoolingRoutes(
            engine,
            served,
            self._bodies,
            self._writer,
            self._threads,
            self._options.request_timeout,
            self._health.check,
        )
        self._routes: list[Route] = with_description(
            [
                *CompletionRoutes(handler).routes(),
                *MessageRoutes(handler).routes(),
                *ResponseRoutes(handler, memory).routes(),
                *pooling.routes(),
                *RenderRoutes(handler).routes(),
                *ModelRoutes(served, engine).routes(),
                *self._adapters.routes(),
                *self._health.routes(),
                *tokenize.routes(),
                *self._metrics.routes(),
                *Dashboard().routes(),
                *FrontPage(served, tokenizer, has_keys=bool(keys)).routes(),
                *self._cache.routes(),
            ],
            self._options.root_path,
        )

    async def load_adapters(self) -> None:
        """Loads the adapters of `lora_modules`. Raises ValueError if one can't be loaded."""
        await self._adapters.start(all_modules(self._options.lora_modules))

    def application(self) -> web.Application:
        """The application; run it with `handler_cancellation`, which aborts the requests of
        clients that disconnect."""
        around = middlewares(self._access, self._options.cors_origin)
        app = web.Application(
            middlewares=[self.connections.note, self._metrics.count, *around],
            client_max_size=self._options.max_body_bytes,
        )
        app.on_response_prepare.append(self._stream_headers)
        add_routes(app, self._routes, self._options.root_path)
        self._metrics.expect(self._routes)
        app.cleanup_ctx.append(self._cache.run)
        app.on_cleanup.append(self._close)
        return app

    def drain(self) -> None:
        """From now on new requests are refused; those that run may end."""
        self._health.drain()

    async def _stream_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds to a stream what middlewares add to other answers: its headers leave before them."""
        response.headers["X-Request-Id"] = request[NOTE].request_id
        response.headers["Server"] = "coppice"
        response.headers.update(request[NOTE].headers)
        response.headers.update(cors_headers(request, self._options.cors_origin))

    async def _close(self, app: web.Application) -> None:
        self._bodies.close()
        self._writer.close()
        self._threads.close()
