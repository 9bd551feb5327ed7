"""The routes that load and unload adapters while the server runs, and those that it starts with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Annotated, TypeAlias

from aiohttp import web
from pydantic import Field

from coppice.frontend.api.served_model import ServedModel
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.errors import BadRequest, EngineStopped, bad_value
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.lora_modules import Module, check_names
from coppice.frontend.http.routes import Route
from coppice.frontend.strict import Body, Unicode, must_be, read
from coppice.runtime.requests.lora_request import LoRARequest

log = logging.getLogger(__name__)

_Text: TypeAlias = Annotated[str, Field(min_length=1), must_be("a text that is not empty"), Unicode]
_Number: TypeAlias = Annotated[int, Field(ge=1), must_be("an integer of at least 1")]


class LoadBody(Body):
    """An adapter to load."""

    lora_name: _Text = Field(description="By which requests ask for it, as their model.")
    lora_path: _Text = Field(description="A folder on the server as PEFT saves it, or a hub id.")
    lora_int_id: _Number | None = Field(
        default=None, description="A number that no other adapter has; null: a free one."
    )
    load_inplace: bool = Field(
        default=False, description="Whether it takes the place of a loaded one of that name."
    )


class UnloadBody(Body):
    """An adapter to unload."""

    lora_name: _Text
    lora_int_id: _Number | None = Field(default=None, description="If given, its number.")


class AdapterRoutes:
    """The adapters of one server.

    Args:
        model: that they belong to, which gets their names.
        engine: a started engine.
        bodies: reads the requests.
    """

    def __init__(self, model: ServedModel, engine: EngineClient, bodies: JsonBodies) -> None:
        self._model, self._engine, self._bodies = model, engine, bodies
        self._changing = asyncio.Lock()
        self._loading = set[asyncio.Task[None]]()

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        done = {200: {"text/plain": {"type": "string"}}}
        return [
            Route(
                "POST",
                "/v1/load_lora_adapter",
                self._load,
                "Load an adapter",
                done,
                body=LoadBody.model_json_schema(),
            ),
            Route(
                "POST",
                "/v1/unload_lora_adapter",
                self._unload,
                "Unload an adapter, and free its part of the cache",
                done,
                body=UnloadBody.model_json_schema(),
            ),
        ]

    async def start(self, modules: Sequence[Module]) -> None:
        """Loads the adapters that the server starts with, and takes over those that are there.

        Replicas have some if there was another ingress before. Raises ValueError if one of
        `modules` can't be loaded.
        """
        found = list[LoRARequest]()
        with suppress(EngineStopped):  # those that are there all hang; others may come
            found = await self._engine.ask("list_loras")
        for asked in found:
            if asked.lora_name not in self._model.names:
                self._model.adapters[asked.lora_name] = asked, self._model.name
        for each in modules:
            try:
                await self.load(each.name, each.path, base=each.base_model_name, replace=True)
            except ValueError as error:
                raise ValueError(f"lora_modules: {each.name!r}: {error}") from error
        for asked in found:
            if asked.lora_name not in {each.name for each in modules}:
                await self._load_again(asked)

    async def _load_again(self, asked: LoRARequest) -> None:
        """Loads an adapter that is there, so that replicas that have come or will come get it."""
        try:
            await self._engine.ask("load_lora", asked, replace=True)
        except (EngineStopped, ValueError) as error:
            log.warning("adapter %r can't be loaded again: %s", asked.lora_name, error)

    async def load(
        self,
        name: str,
        path: str,
        *,
        number: int | None = None,
        base: str | None = None,
        replace: bool = False,
    ) -> None:
        """Loads an adapter of the model `base`. Raises ValueError as `Adapters.load` does.

        A call that is cancelled goes on: what the engine has begun it ends, and it must be known.
        """
        task = asyncio.ensure_future(self._to_load(name, path, number, base, replace))
        self._loading.add(task)
        task.add_done_callback(self._loaded)
        await asyncio.shield(task)

    def _loaded(self, task: asyncio.Task[None]) -> None:
        self._loading.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _to_load(
        self, name: str, path: str, number: int | None, base: str | None, replace: bool
    ) -> None:
        async with self._changing:
            known = self._model.adapters
            check_names(name, base, self._model.names)
            if number is None:
                taken = {asked.lora_int_id for asked, _ in known.values()}
                old = known.get(name)
                free = next(each for each in count(1) if each not in taken)
                number = free if old is None else old[0].lora_int_id
            asked = LoRARequest(name, number, path)
            await self._engine.ask("load_lora", asked, replace=replace)
            known[name] = asked, base or self._model.name

    async def _load(self, request: web.Request) -> web.Response:
        body, asked = await self._bodies.read(request, lambda given: read(LoadBody, given))
        try:
            await self.load(
                asked.lora_name,
                asked.lora_path,
                number=asked.lora_int_id,
                replace=asked.load_inplace,
            )
        except ValueError as error:
            raise bad_value(error, body) from error
        return _done(f"Success: LoRA adapter {asked.lora_name!r} added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        _, asked = await self._bodies.read(request, lambda given: read(UnloadBody, given))
        async with self._changing:
            found = self._model.adapters.get(asked.lora_name)
            if found is None:
                raise BadRequest(
                    f"lora_name: no adapter is named {asked.lora_name!r}",
                    param="lora_name",
                    status=404,
                )
            if asked.lora_int_id not in (None, found[0].lora_int_id):
                raise BadRequest(
                    f"lora_int_id must be {found[0].lora_int_id}, that of {asked.lora_name!r}, "
                    f"got {asked.lora_int_id}",
                    param="lora_int_id",
                )
            # First here: a request that comes now must not load it again.
            del self._model.adapters[asked.lora_name]
            with suppress(ValueError):  # another engine has taken the place of the one that had it
                await self._engine.ask("unload_lora", asked.lora_name)
        return _done(f"Success: LoRA adapter {asked.lora_name!r} removed successfully.")


def _done(text: str) -> web.Response:
    return web.Response(text=text)
