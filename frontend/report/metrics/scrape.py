"""The metrics at /metrics, for Prometheus: the engine's counters and the server's own.

Every name contains its unit, every label has few values, and every event is counted, so that a
scrape every 15 seconds misses nothing. The engine's counts (`EngineStats`) become families of
metrics when Prometheus asks. When the engine restarts, its counters restart at 0, which Prometheus
takes into account.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from coppice.frontend.errors import BadRequest, RequestFailed
from coppice.frontend.http.routes import ROOT_PATH, Handler, Route, Schema, without_root
from coppice.frontend.report.metrics.engine import engine_families
from coppice.frontend.report.reporter import Asks
from coppice.runtime.report.snapshot import EngineStats

ANSWER_SECONDS = 5.0
"""How long a scrape waits for the engine's counts, before it reports the last ones."""

# Statuses that are reported as 0 from the start, since rate() misses the first answer of a series
# that begins at 1: those of routes that generate, and those of the others.
_ANSWERS = ("200", "400", "401", "413", "429", "499", "500", "503", "504")
_ANSWERS_ELSEWHERE = ("200", "401", "500", "503")

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))


class Metrics:
    """The metrics of one server and its engine."""

    def __init__(
        self, engine: Asks, model: str, restarts: Callable[[], int], alive: Callable[[], bool]
    ) -> None:
        """`restarts` returns how often the engine was started again, `alive` whether it works."""
        self._engine = engine
        self._alive = alive
        self._restarts = restarts
        self._counted = -1  # restarts when the engine last gave its counts
        self._families = _Families(model, restarts)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._families)
        ProcessCollector(registry=self._registry)
        self._responses = self._families.responses

    def expect(self, routes: Iterable[Route]) -> None:
        """Reports 0 answers of these routes, and of paths without a route, from the start."""
        for route in routes:
            answers = (
                _ANSWERS if route.path.startswith("/v1/") and route.body else _ANSWERS_ELSEWHERE
            )
            for status in answers:
                self._responses[route.template, route.method, status] += 0
        self._responses["other", "GET", "404"] += 0
        self._responses["other", "POST", "404"] += 0

    def routes(self) -> list[Route]:
        """GET /metrics."""
        text: Schema = {"type": "string"}
        kinds = {"text/plain": text, "application/openmetrics-text": text}
        return [Route("GET", "/metrics", self._metrics, "Metrics for Prometheus", {200: kinds})]

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts answers; belongs outside the middleware that turns errors into answers."""
        status = "500"
        try:
            response = await handler(request)
            status = str(response.status)
        except web.HTTPException as answer:
            status = str(answer.status)
            raise
        except (ConnectionError, asyncio.CancelledError):
            status = "499"
            raise
        finally:
            resource = request.match_info.route.resource
            root = request.app.get(ROOT_PATH, "")
            route = "other" if resource is None else without_root(resource.canonical, root)
            method = request.method if request.method in _METHODS else "other"
            self._responses[route, method, status] += 1
        return response

    async def _metrics(self, request: web.Request) -> web.Response:
        """All metrics, in the text format or, if the client accepts it, in OpenMetrics."""
        accepted = request.headers.get("Accept", "")
        try:
            encode, content_type = choose_encoder(accepted)
        except (ValueError, TypeError) as error:  # a version that is none
            raise BadRequest(
                f"Accept must name types of content, got {accepted!a:.200}", param="Accept"
            ) from error
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self._families.stats = await self._engine.ask("stats")
                self._counted = self._restarts()
        except (TimeoutError, RequestFailed):
            # In a long step an engine works and can't answer: its last counts stay.
            if not self._alive() or self._counted != self._restarts():
                self._families.stats = None
        self._families.up = self._alive()
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


class _Families(Collector):
    """Families of metrics from the engine's last snapshot and the server's answers."""

    def __init__(self, model: str, restarts: Callable[[], int]) -> None:
        self._model = model
        self._restarts = restarts
        self.stats: EngineStats | None = None
        self.up = False
        self.responses: Counter[tuple[str, str, str]] = Counter()  # by route, method, status

    def collect(self) -> Iterator[Metric]:
        """All families; without a snapshot, those that need no engine."""
        stats = self.stats
        yield GaugeMetricFamily(
            "coppice_engine_up", "1 if the engine takes requests, else 0", float(self.up)
        )
        info = GaugeMetricFamily("coppice_engine_info", "Always 1", labels=["model"])
        info.add_metric([self._model], 1.0)
        yield info
        yield CounterMetricFamily(
            "coppice_engine_restarts", "Engines that were started after one died", self._restarts()
        )
        yield self._http()
        if stats is not None:
            yield from engine_families(stats)

    def _http(self) -> Metric:
        family = CounterMetricFamily(
            "coppice_http_responses",
            "Answers by route, method and status; status 499: the client left before the end",
            labels=["route", "method", "status"],
        )
        for labels, count in sorted(self.responses.items()):
            family.add_metric(list(labels), count)
        return family
