"""Dry runs: a request's prompt as the model gets it, and what of it the cache would give now."""

from __future__ import annotations

import time
from typing import Any, Literal

from aiohttp import web
from pydantic import Field

from coppice.frontend.api.handler import Parse, Rendered, TextHandler
from coppice.frontend.api.openai.requests import (
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
)
from coppice.frontend.api.openai.schemas import Usage
from coppice.frontend.http.ids import fresh_id
from coppice.frontend.http.json_answers import CHARACTERS
from coppice.frontend.http.middleware import NOTE
from coppice.frontend.http.routes import Route, json_answer
from coppice.frontend.strict import Body
from coppice.runtime.report.snapshot import Peek

_VALUES_OF_PROMPT = 32  # beside its text and tokens


class RenderedPages(Body):
    """The pages of the KV cache that a prompt would use."""

    page_size: int  # tokens of a page
    shared: int  # whole pages of the hit
    copied: int  # 1 if the hit ends inside a page: it is copied if others use it, too
    new: int  # taken from the pool, the copy included


class RenderedNamespace(Body):
    """What must be equal, beside the tokens, for a hit."""

    cache_salt: str | None
    tenant: str | None  # the key's name, on a server that isolates keys


class RenderedPrompt(Body):
    """One prompt of the request, and what it would hit if it began now."""

    index: int
    prompt: str
    prompt_token_ids: list[int]
    cached_tokens: int = Field(ge=0)
    pinned_tokens: int = Field(ge=0)  # of the cached ones, those that a pin keeps
    misses: dict[str, int]  # the other tokens by cause, as in /cache/report
    evicted_idle_seconds: float | None  # since the evicted ones of them were used last
    pages: RenderedPages
    namespace: RenderedNamespace


class RenderAnswer(Body):
    """The answer of a dry run."""

    id: str
    object: Literal["render"]
    created: int
    model: str
    prompts: list[RenderedPrompt]
    usage: Usage


class RenderRoutes:
    """The routes; `handler` reads requests as it does for text, and runs none of these."""

    def __init__(self, handler: TextHandler) -> None:
        self._handler = handler

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        answer = json_answer(RenderAnswer.model_json_schema())
        return [
            Route(
                "POST",
                "/v1/completions/render",
                self._completion,
                "What prompts would hit, without running them",
                answer,
                body=CompletionBody.model_json_schema(),
            ),
            Route(
                "POST",
                "/v1/chat/completions/render",
                self._chat,
                "What a conversation would hit, without running it",
                answer,
                body=ChatBody.model_json_schema(),
            ),
        ]

    async def _completion(self, request: web.Request) -> web.Response:
        return await self._answer(request, parse_completion)

    async def _chat(self, request: web.Request) -> web.Response:
        return await self._answer(request, parse_chat)

    async def _answer(self, request: web.Request, parse: Parse) -> web.Response:
        handler = self._handler
        rendered = await handler.render(request, parse)
        texts = await handler.texts_of(rendered.prepared)
        guest = request[NOTE].guest
        all_causes = guest is not None and guest.admin
        total = sum(peek.prompt_tokens for peek in rendered.peeks)
        cached = sum(peek.cached_tokens for peek in rendered.peeks)

        def answer() -> dict[str, Any]:
            return {
                "id": f"render-{fresh_id()}",
                "object": "render",
                "created": int(time.time()),
                "model": handler.model.as_asked(rendered.asked.model),
                "prompts": [
                    _prompt(index, rendered, text, peek, all_causes)
                    for index, (text, peek) in enumerate(zip(texts, rendered.peeks, strict=True))
                ],
                "usage": {
                    "prompt_tokens": total,
                    "completion_tokens": 0,
                    "total_tokens": total,
                    "prompt_tokens_details": {"cached_tokens": cached},
                },
            }

        values = total + sum(_VALUES_OF_PROMPT + len(text) // CHARACTERS for text in texts)
        return await handler.writer.write(answer, values)


def _prompt(
    index: int, rendered: Rendered, text: str, peek: Peek, all_causes: bool
) -> dict[str, Any]:
    misses = dict(peek.causes)
    if not all_causes and "namespace" in misses:
        # That other users have sent this prompt is nothing that this one may learn.
        misses["cold"] = misses.get("cold", 0) + misses.pop("namespace")
    return {
        "index": index,
        "prompt": text,
        "prompt_token_ids": list(rendered.prepared.prompts[index][1]),
        "cached_tokens": peek.cached_tokens,
        "pinned_tokens": peek.pinned_tokens,
        "misses": misses,
        "evicted_idle_seconds": peek.evicted_idle_seconds,
        "pages": {
            "page_size": peek.page_size,
            "shared": peek.shared_pages,
            "copied": peek.copied_pages,
            "new": peek.new_pages,
        },
        "namespace": {"cache_salt": rendered.asked.cache_salt, "tenant": rendered.tenant},
    }
