"""The routes below /v1/messages."""

from __future__ import annotations

import re

from aiohttp import web

from coppice.frontend.api.anthropic.answer import MessageAnswers
from coppice.frontend.api.anthropic.body import MessagesBody, PromptBody
from coppice.frontend.api.anthropic.errors import ERRORS
from coppice.frontend.api.anthropic.request import parse_count, parse_messages
from coppice.frontend.api.anthropic.schemas import MessageAnswer, MessageTokens
from coppice.frontend.api.context import ContextExceeded
from coppice.frontend.api.handler import TextHandler
from coppice.frontend.api.kept_prefixes import Prefix
from coppice.frontend.errors import BadRequest
from coppice.frontend.http.middleware import NOTE
from coppice.frontend.http.routes import Route, json_answer

_FIRST_VERSION = "2023-06-01"  # of the events; what later ones took away is an extension here


class MessageRoutes:
    """The routes; `handler` brings requests to the engine."""

    def __init__(self, handler: TextHandler) -> None:
        self._handler = handler

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        message, tokens = MessageAnswer.model_json_schema(), MessageTokens.model_json_schema()
        events = {"type": "string", "description": "Events named as their type is."}
        return [
            Route(
                "POST",
                "/v1/messages",
                self._messages,
                "Answer a conversation, over Anthropic's API",
                {200: {"application/json": message, "text/event-stream": events}},
                body=MessagesBody.model_json_schema(),
                error=ERRORS,
            ),
            Route(
                "POST",
                "/v1/messages/count_tokens",
                self._count,
                "Count the tokens of a conversation",
                json_answer(tokens),
                body=PromptBody.model_json_schema(),
                error=ERRORS,
            ),
        ]

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        _check_version(request)
        handler, note = self._handler, request[NOTE]
        try:
            submitted = await handler.submit(request, parse_messages)
        except ContextExceeded as error:
            raise _too_long(error) from error
        asked, prepared = submitted.asked, submitted.prepared
        ((_, ids),) = prepared.prompts
        owner = "" if note.guest is None else note.guest.name
        adapter = submitted.adapter

        async def keep() -> list[Prefix]:
            if adapter is not None and not handler.model.has(adapter):
                return []  # the engine would load it again
            return await handler.kept.keep(
                owner, note.tenant, asked.cache_salt, ids, prepared.prefixes, adapter
            )

        answers = MessageAnswers(
            handler.model.as_asked(asked.model),
            len(ids),
            0 if asked.nothing_new else asked.params.max_tokens or 0,
            prepared.reading,
            prepared.prefixes,
            keep,
        )
        return await handler.answer(request, submitted, answers)

    async def _count(self, request: web.Request) -> web.Response:
        _check_version(request)
        try:
            count = await self._handler.count(request, parse_count)
        except ContextExceeded as error:
            raise _too_long(error) from error
        return web.json_response({"input_tokens": count})


def _check_version(request: web.Request) -> None:
    version = request.headers.get("anthropic-version", _FIRST_VERSION)
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", version) or version < _FIRST_VERSION:
        raise BadRequest(
            f"anthropic-version must be a date from {_FIRST_VERSION} on, got {version!r:.40}",
            param="anthropic-version",
        )


def _too_long(error: ContextExceeded) -> BadRequest:
    """The refusal in the words that this API's clients look for."""
    return BadRequest(
        f"prompt is too long: {error.number} tokens > {error.longest} maximum",
        code="context_length_exceeded",
    )
