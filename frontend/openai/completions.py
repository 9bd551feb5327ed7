"""Completions and chat completions: the way of a request to the engine, and of its answer back.

down   read and check the body     http/json_bodies, openai/requests
       make tokens of its prompts  openai/prepare, in a thread
       submit them                 client/engine
up     one JSON object             openai/answers
       or a stream of events       openai/event_stream
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from aiohttp import web

from coppice.frontend.client.deltas import Deltas
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.errors import BadRequest, bad_value
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.middleware import NOTE
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.http.routes import Route
from coppice.frontend.openai.answers import ChatCompletion, Completion, usage, without_text
from coppice.frontend.openai.event_stream import EventStream, counts
from coppice.frontend.openai.models import ServedModel
from coppice.frontend.openai.prepare import Prepared, prepare
from coppice.frontend.openai.requests import (
    ChatBody,
    CompletionBody,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from coppice.frontend.openai.schemas import ChatAnswer, CompletionAnswer, either
from coppice.frontend.openai.tools.registry import format_of
from coppice.frontend.text.threads import TokenizerThreads
from coppice.runtime.requests.request import QueueFull

LONG_BYTES = 256 * 2**10  # the size of a body from which its text is long work for the tokenizer


class _Submitted(NamedTuple):
    """A request that is in the engine's queue."""

    asked: CompletionRequest
    prepared: Prepared
    deltas: Deltas
    deadline: float | None  # of the event loop's clock


class CompletionRoutes:
    """The routes, over one engine.

    Args:
        engine: a started engine.
        model: whose name requests must ask for.
        bodies: reads the requests.
        threads: run the tokenizer.
        options: of the server.
        check_open: raises EngineStopped once the server takes no more requests.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        bodies: JsonBodies,
        threads: TokenizerThreads,
        options: ServerOptions,
        check_open: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._model = model
        self._bodies = bodies
        self._threads = threads
        self._options = options
        self._check_open = check_open
        self._tool_format = format_of(engine.tokenizer, options.tool_call_parser)

    def routes(self) -> list[Route]:
        """For `add_routes`."""
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
        ]

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
        asked, prepared, deltas, deadline = await self._submit(request, parse)
        texts = self._engine.texts.token_texts
        shape = answers(self._model.name, asked, prepared, texts, self._tool_format)
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
        request[NOTE].fields |= counts(usage(outputs))
        return web.json_response(shape.whole(outputs))

    async def _submit(
        self, request: web.Request, parse: Callable[[Any], CompletionRequest]
    ) -> _Submitted:
        """Brings a request from the client's bytes to the engine's queue.

        Raises BadRequest, EngineStopped, or TimeoutError if that takes longer than is allowed.
        """
        self._check_open()
        body, asked = await self._bodies.read(request, parse)
        self._model.check(asked.model)
        note = request[NOTE]
        note.fields["stream"] = asked.stream
        if self._options.log_prompts:
            note.fields["prompt"] = body.get("messages") or asked.prompts
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
                    tenant=note.tenant,
                    priority=asked.priority,
                    in_pieces=asked.stream,
                )
        except TimeoutError:
            raise self._too_late() from None
        except ValueError as error:
            raise bad_value(error, body) from error
        except QueueFull as error:
            raise BadRequest(str(error), status=429, kind="rate_limit_error") from error
        return _Submitted(asked, prepared, deltas, deadline)

    async def _prepare(self, asked: CompletionRequest, size: int | None) -> Prepared:
        """What the engine is given; `size` is that of the body in bytes, if it is known."""
        engine = self._engine
        given = (asked, engine.tokenizer, engine.texts.token_texts, self._tool_format)
        longest = engine.max_model_len
        if not asked.needs_tokenizer:
            return prepare(*given, longest)  # so little work that another thread would cost more
        long = size is None or size > LONG_BYTES or asked.has_grammar
        return await self._threads.run(prepare, *given, longest, long=long)

    def _too_late(self) -> TimeoutError:
        limit = self._options.request_timeout
        return TimeoutError(f"the request took longer than request_timeout, {limit:g} s")
