"""The routes below /v1/responses."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from coppice.frontend.api.handler import TextHandler
from coppice.frontend.api.openai.responses.answer import ResponseAnswers
from coppice.frontend.api.openai.responses.body import InputBody, ResponsesBody
from coppice.frontend.api.openai.responses.memory import Json, Remembered, ResponseMemory
from coppice.frontend.api.openai.responses.request import Call
from coppice.frontend.api.openai.responses.schemas import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseAnswer,
)
from coppice.frontend.errors import BadRequest
from coppice.frontend.http.json_answers import CHARACTERS
from coppice.frontend.http.middleware import NOTE
from coppice.frontend.http.routes import Route, Schema, json_answer

_MOST_ITEMS = 100


class ResponseRoutes:
    """The routes; `handler` brings requests to the engine, `memory` keeps the responses."""

    def __init__(self, handler: TextHandler, memory: ResponseMemory) -> None:
        self._handler = handler
        self._memory = memory

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        response = ResponseAnswer.model_json_schema()
        events = {"description": "Events named as their type is."}
        one = "/v1/responses/{id}"
        query: dict[str, Schema] = {
            "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_ITEMS, "default": 20},
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string", "description": "The id of the last item of a page."},
        }
        return [
            Route(
                "POST",
                "/v1/responses",
                self._create,
                "Answer items with items",
                {200: {"application/json": response, "text/event-stream": events}},
                body=ResponsesBody.model_json_schema(),
            ),
            Route(
                "POST",
                "/v1/responses/input_tokens",
                self._count,
                "Count the tokens of an input",
                json_answer(InputTokens.model_json_schema()),
                body=InputBody.model_json_schema(),
            ),
            Route("GET", one, self._get, "A response that is kept", json_answer(response)),
            Route(
                "DELETE",
                one,
                self._delete,
                "Forget a response",
                json_answer(DeletedResponse.model_json_schema()),
            ),
            Route(
                "GET",
                one + "/input_items",
                self._input_items,
                "What a response answers",
                json_answer(InputItems.model_json_schema()),
                query=query,
            ),
            Route(
                "POST",
                one + "/cancel",
                self._cancel,
                "Refused: no response is made in the background",
                {},
            ),
        ]

    async def _create(self, request: web.Request) -> web.StreamResponse:
        handler, owner = self._handler, _owner(request)
        call = Call(self._memory, owner)
        submitted = await handler.submit(request, call.parse, call.is_long)
        answers = ResponseAnswers(
            handler.model.as_asked(submitted.asked.model),
            call.body,
            submitted.prepared,
            handler.texts,
            partial(self._keep, owner, call),
            caching=handler.caching,
            body_bytes=len(await request.read()),
        )
        return await handler.answer(request, submitted, answers)

    async def _count(self, request: web.Request) -> web.Response:
        call = Call(self._memory, _owner(request))
        count = await self._handler.count(request, call.parse_count, call.is_long)
        return web.json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _get(self, request: web.Request) -> web.Response:
        for name, value in request.query.items():
            if name == "stream" and value.lower() in ("false", "0"):
                continue
            raise BadRequest(
                f"{name} is not supported here: a response is returned whole, with all it has",
                param=name,
            )
        return web.Response(body=self._found(request).body, content_type="application/json")

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if not self._memory.delete(_owner(request), name):
            raise self._missing(name)
        return web.json_response({"id": name, "object": "response", "deleted": True})

    async def _input_items(self, request: web.Request) -> web.Response:
        found = self._found(request)
        limit, newest_first, after = _page(request)

        def answer() -> Json:
            items = found.input_items()
            if newest_first:
                items.reverse()
            if after is not None:
                ids = [item["id"] for item in items]
                if after not in ids:
                    raise BadRequest(f"after: there is no item {after!r:.80}", param="after")
                items = items[ids.index(after) + 1 :]
            page = items[:limit]
            return {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }

        return await self._handler.writer.write(answer, found.whole // CHARACTERS)

    async def _cancel(self, request: web.Request) -> web.Response:
        found = self._found(request)
        raise BadRequest(
            "only a response that is made in the background can be cancelled, and none is: close "
            "the connection of a request to end it",
            param="id",
            code="not_cancellable" if found else None,
        )

    def _keep(self, owner: str, call: Call, response: Json) -> None:
        if call.body.store and self._memory.most_bytes:
            self._memory.put(owner, response, call.input, call.before)

    def _found(self, request: web.Request) -> Remembered:
        name = request.match_info["id"]
        found = self._memory.get(_owner(request), name)
        if found is None:
            raise self._missing(name)
        return found

    def _missing(self, name: str) -> BadRequest:
        why = "" if self._memory.most_bytes else ": --response-memory is 0"
        return BadRequest(
            f"no response {name!r:.80} is remembered{why}",
            param="id",
            code="response_not_found",
            status=404,
        )


def _owner(request: web.Request) -> str:
    """The name of the client's key."""
    guest = request[NOTE].guest
    return "" if guest is None else guest.name


def _page(request: web.Request) -> tuple[int, bool, str | None]:
    """What part of a list is asked for: how many, whether from the end, and after which item."""
    query: dict[str, Any] = dict(request.query)
    limit, order = query.pop("limit", "20"), query.pop("order", "desc")
    after = query.pop("after", None)
    for name in query:
        raise BadRequest(f"{name} is not a parameter of this endpoint", param=name)
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST_ITEMS):
        raise BadRequest(
            f"limit must be an integer from 1 to {_MOST_ITEMS}, got {limit!r:.40}", param="limit"
        )
    if order not in ("asc", "desc"):
        raise BadRequest(f"order must be asc or desc, got {order!r:.40}", param="order")
    return int(limit), order == "desc", after
