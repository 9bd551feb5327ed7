"""Whether the server takes requests, and which version of the software it is."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web
from pydantic import Field

from coppice import __version__
from coppice.frontend.errors import EngineStopped
from coppice.frontend.http.routes import Route, json_answer
from coppice.frontend.strict import Body

STOPPING = "the server is stopping"


class Status(Body):
    """The state of the server: "ok", or what is wrong."""

    status: str


class Load(Body):
    """How much the server has to do, under vLLM's name."""

    server_load: int = Field(ge=0)  # prompts that wait or run


class Version(Body):
    """The version of the software."""

    version: str


class Watched(Protocol):
    """An engine that knows whether it takes requests, and why not."""

    @property
    def alive(self) -> bool: ...
    @property
    def trouble(self) -> str | None: ...
    @property
    def running(self) -> int: ...


class Health:
    """The routes that report the state of the server, and the switch that ends its service."""

    def __init__(self, engine: Watched) -> None:
        self._engine = engine
        self._draining = False

    def routes(self) -> list[Route]:
        """For `add_routes`."""
        state = {"application/json": Status.model_json_schema()}
        states = {200: state, 503: state}
        load = json_answer(Load.model_json_schema())
        kuberay = {200: {"text/plain": {"type": "string"}}, 503: state}
        version = json_answer(Version.model_json_schema())
        return [
            Route("GET", "/health", self._health, "Whether requests are taken", states),
            Route("GET", "/health/ready", self._health, "Whether requests are taken", states),
            Route("GET", "/ping", self._health, "The same, for SageMaker", states),
            Route("POST", "/ping", self._health, "The same, for SageMaker", states),
            Route("GET", "/-/healthz", self._kuberay, "The same, for KubeRay", kuberay),
            Route("GET", "/load", self._load, "How much there is to do", load),
            Route("GET", "/health/live", self._live, "Whether the server answers", {200: state}),
            Route("GET", "/version", self._version, "The version of the software", version),
        ]

    def drain(self) -> None:
        """From now on new requests are refused; those that run may end."""
        self._draining = True

    def check(self) -> None:
        """Raises EngineStopped once new requests are refused."""
        if self._draining:
            raise EngineStopped(STOPPING)

    async def _health(self, request: web.Request) -> web.Response:
        if self._draining:
            return web.json_response({"status": STOPPING}, status=503)
        if self._engine.alive:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": self._engine.trouble}, status=503)

    async def _kuberay(self, request: web.Request) -> web.Response:
        """As a proxy of Ray Serve answers, by which KubeRay knows the pod that takes requests."""
        state = await self._health(request)
        return state if state.status != 200 else web.Response(text="success")

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response({"server_load": self._engine.running})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})
