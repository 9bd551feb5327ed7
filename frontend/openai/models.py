"""The model that is served: its routes, and the refusal of requests for another one."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from coppice.frontend.errors import BadRequest
from coppice.frontend.http.routes import Route, json_answer
from coppice.frontend.openai.schemas import ModelCard, ModelList


class ServedModel:
    """The one model of a server.

    Attributes:
        name: the name under which requests ask for it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        models, card = ModelList.model_json_schema(), ModelCard.model_json_schema()
        return [
            Route("GET", "/v1/models", self._models, "The models", json_answer(models)),
            Route("GET", "/v1/models/{model:.+}", self._one, "The model", json_answer(card)),
        ]

    def check(self, name: str) -> None:
        """Raises BadRequest (404) for the name of another model."""
        if name != self.name:
            raise BadRequest(
                f"model {name!r} is not served here; {self.name!r} is",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _one(self, request: web.Request) -> web.Response:
        self.check(request.match_info["model"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "coppice",
        }
