"""The routes of the model that is served, and of its adapters."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from coppice.frontend.api.openai.schemas import ModelCard, ModelList
from coppice.frontend.api.served_model import ServedModel
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.http.routes import Route, json_answer


class ModelRoutes:
    """The routes, over the one model of a server.

    Args:
        model: under which names it is served.
        engine: that runs it.
    """

    def __init__(self, model: ServedModel, engine: EngineClient) -> None:
        self._model = model
        self._engine = engine
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        models, card = ModelList.model_json_schema(), ModelCard.model_json_schema()
        return [
            Route("GET", "/v1/models", self._models, "The models", json_answer(models)),
            Route("GET", "/v1/models/{model:.+}", self._one, "The model", json_answer(card)),
        ]

    async def _models(self, request: web.Request) -> web.Response:
        cards = [self._card(name) for name in (*self._model.names, *self._model.adapters)]
        return web.json_response({"object": "list", "data": cards})

    async def _one(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._model.check(name)
        return web.json_response(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        root, parent = self._model.root, None
        if (adapter := self._model.adapters.get(name)) is not None:
            root, parent = adapter[0].lora_path, adapter[1]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "coppice",
            "root": root,
            "parent": parent,
            "max_model_len": self._engine.max_model_len,
            "model_impl": self._engine.model_impl,
            "default_sampling_params": self._engine.defaults.in_force,
        }
