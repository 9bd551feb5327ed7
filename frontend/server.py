"""An HTTP server that speaks the OpenAI API's completions and chat completions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from coppice.frontend.answers import ChatCompletion, Completion
from coppice.frontend.deltas import Deltas, EngineStopped, RequestFailed
from coppice.frontend.engine_client import EngineClient
from coppice.frontend.openapi import with_description
from coppice.frontend.outputs import RequestOutput
from coppice.frontend.protocol import (
    BadRequest,
    CompletionRequest,
    bad_value,
    error_body,
    parse_chat,
    parse_completion,
)
from coppice.frontend.routes import Handler, Route, Schema, add_routes, json_answer
from coppice.runtime.request import QueueFull

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
RETRY_AFTER_SECONDS = 5


class Server:
    """The routes, over one engine that serves one model.

    Args:
        engine: a started engine.
        model: the name under which requests must ask for the model.
    """

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._engine = engine
        self._model = model
        self._created = int(time.time())
        # One thread, so that a tokenizer is never in two calls at once.
        self._tokenizing = ThreadPoolExecutor(1, "coppice-tokenizer")

    def application(self) -> web.Application:
        """The application; run it with `handler_cancellation`, so that vanished clients count."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY_BYTES)
        add_routes(app, with_description(self._routes()))
        app.on_cleanup.append(self._close)
        return app

    def _routes(self) -> list[Route]:
        """All routes but the one that describes them."""
        anything: Schema = {"type": "object"}
        made = {"application/json": anything, "text/event-stream": {"type": "string"}}
        state = {"application/json": {"type": "object", "required": ["status"]}}
        return [
            Route(
                "POST",
                "/v1/completions",
                self._completions,
                "Continue a prompt",
                {200: made},
                body=anything,
            ),
            Route(
                "POST",
                "/v1/chat/completions",
                self._chat_completions,
                "Answer a conversation",
                {200: made},
                body=anything,
            ),
            Route("GET", "/v1/models", self._models, "Models", json_answer(anything)),
            Route(
                "GET", "/v1/models/{model:.+}", self._one_model, "A model", json_answer(anything)
            ),
            Route("GET", "/health", self._health, "Health", {200: state, 503: state}),
        ]

    async def _close(self, app: web.Application) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: web.Request) -> web.Response:
        if self._engine.alive:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": self._engine.trouble}, status=503)

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
        body = await _json(request)
        asked = parse(body)
        self._check_model(asked.model)
        shape = answers(self._model, asked.params, self._engine.texts.token_texts)
        try:
            prompts = await self._tokenize(asked)
            deltas = await self._engine.submit(
                prompts,
                asked.params,
                beam=asked.beam,
                cache_salt=asked.cache_salt,
                priority=asked.priority,
            )
        except ValueError as error:
            raise bad_value(error, body) from error
        except QueueFull as error:
            raise BadRequest(str(error), status=429, kind="rate_limit_error") from error
        async with deltas:
            if asked.stream:
                return await self._stream(request, shape, deltas, len(prompts), asked)
            return web.json_response(shape.whole(await deltas.outputs()))

    async def _tokenize(self, asked: CompletionRequest) -> list[tuple[str | None, list[int]]]:
        """Text (if there was one) and token ids of each prompt, made off the event loop."""
        tokenizer = self._engine.tokenizer

        def tokenize() -> list[tuple[str | None, list[int]]]:
            if asked.messages:
                return [(None, tokenizer.encode_chat(asked.messages))]
            return [
                (prompt, tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
                for prompt in asked.prompts
            ]

        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, tokenize)

    async def _stream(
        self,
        request: web.Request,
        shape: Completion,
        deltas: Deltas,
        count: int,
        asked: CompletionRequest,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        outputs: list[RequestOutput] = []
        blank = {"usage": None} if asked.include_usage else {}
        try:
            for index in range(count * asked.params.n):
                for chunk in shape.opening(index):
                    await _send(response, chunk | blank)
            async for index, delta in deltas:
                for chunk in shape.chunks(index * asked.params.n + delta.index, delta):
                    await _send(response, chunk | blank)
                if delta.output is not None:
                    outputs.append(delta.output)
            if asked.include_usage:
                await _send(response, shape.usage_chunk(outputs))
        except ConnectionError:
            raise
        except Exception as error:  # the status line is out; the stream itself must tell
            if not isinstance(error, RequestFailed):
                log.exception("%s failed", request.path)
            await _send(response, error_body(str(error), kind="server_error"))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def _json(request: web.Request) -> Any:
    raw = await request.read()
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and huge integers included
        raise BadRequest(f"the body is not valid JSON: {error}") from error


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in the API's error shape."""
    try:
        return await handler(request)
    except BadRequest as error:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if error.status == 429 else {}
        return web.json_response(error.body, status=error.status, headers=headers)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        body = error_body(text, kind="invalid_request_error")
        return web.json_response(body, status=error.status, headers=headers)
    except EngineStopped as error:
        body = error_body(str(error), kind="server_error")
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return web.json_response(body, status=503, headers=headers)
    except RequestFailed as error:
        return web.json_response(error_body(str(error), kind="server_error"), status=500)
    except ConnectionError:  # the client is gone; there is nobody to tell
        raise
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        text = f"internal error: {type(error).__name__}: {error}"
        return web.json_response(error_body(text, kind="server_error"), status=500)
