"""The metrics over a real socket, in both formats, and the dashboard that asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.samples import Sample

from coppice.frontend.metrics import Metrics
from coppice.runtime.report import CAUSES

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"
PROMPT = "The quick brown fox jumps over the lazy dog while the band plays on. "
# What PromQL has of its own; any other word of a query names a metric, a label or a variable.
PROMQL = {"sum", "rate", "by", "le", "histogram_quantile", "min", "label_values", "instance"}


def samples(url: str) -> list[Sample]:
    answer = httpx.get(url + "/metrics")
    assert answer.status_code == 200
    return [
        sample
        for family in parser.text_string_to_metric_families(answer.text)
        for sample in family.samples
    ]


def value(found: list[Sample], name: str, **labels: str) -> float:
    (one,) = (s.value for s in found if s.name == name and labels.items() <= s.labels.items())
    return one


@pytest.fixture(scope="module")
def url(served: Callable[..., str], checkpoint: Path) -> str:
    """A server that has answered two equal prompts, and has refused a request."""
    url = served()
    body = {"model": str(checkpoint), "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    for _ in range(2):
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200
    assert httpx.post(url + "/v1/completions", json=body | {"n": 0}).status_code == 400
    assert httpx.get(url + "/nowhere/at/all").status_code == 404
    return url


def test_tokens_add_up(url: str) -> None:
    found = samples(url)
    prompt = value(found, "coppice_prompt_tokens_total")
    hit = value(found, "coppice_hit_tokens_total", kind="cross")
    causes = {
        s.labels["cause"]: s.value for s in found if s.name == "coppice_computed_tokens_total"
    }
    assert set(causes) == set(CAUSES)
    assert prompt == hit + sum(causes.values()) > hit > 0
    assert value(found, "coppice_generated_tokens_total") >= 10
    assert value(found, "coppice_ideal_hit_tokens_total") >= hit
    assert value(found, "coppice_rounded_off_tokens_total") == 0
    assert value(found, "coppice_engine_up") == 1


def test_requests_and_their_times(url: str) -> None:
    found = samples(url)
    ended = value(found, "coppice_requests_finished_total", finish_reason="length")
    assert ended >= 2
    for name in ("request_queue_seconds", "time_to_first_token_seconds", "request_seconds"):
        assert value(found, f"coppice_{name}_count") >= ended, name
        assert value(found, f"coppice_{name}_sum") > 0, name
        buckets = [s for s in found if s.name == f"coppice_{name}_bucket"]
        counts = [s.value for s in buckets]
        assert len(buckets) > 20
        assert counts == sorted(counts), "cumulative"
        assert (buckets[-1].labels["le"], counts[-1]) == ("+Inf", counts[-1])
    tokens = value(found, "coppice_generated_tokens_total")
    assert value(found, "coppice_inter_token_seconds_count") <= tokens - ended
    assert value(found, "coppice_requests_running") == 0


def test_pages_add_up(url: str) -> None:
    found = samples(url)
    pages = {s.labels["state"]: s.value for s in found if s.name == "coppice_pool_pages"}
    assert set(pages) == {"free", "cached", "pinned", "held"}
    assert sum(pages.values()) * value(found, "coppice_page_size_tokens") == 4096
    assert pages["held"] == 0 < pages["cached"]


def test_answers_are_counted_by_route_and_status(url: str) -> None:
    found = samples(url)
    name = "coppice_http_responses_total"
    assert value(found, name, route="/v1/completions", status="200", method="POST") >= 2
    assert value(found, name, route="/v1/completions", status="400", method="POST") >= 1
    assert value(found, name, route="other", status="404", method="GET") >= 1
    routes = {s.labels["route"] for s in found if s.name == name}
    assert not any("nowhere" in route for route in routes), "what clients make up is no label"


def test_a_client_that_asks_for_openmetrics_gets_it(url: str) -> None:
    answer = httpx.get(url + "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(answer.text)}
    assert "coppice_hit_tokens" in names


def test_every_name_says_its_unit_and_has_a_description(url: str) -> None:
    families = list(parser.text_string_to_metric_families(httpx.get(url + "/metrics").text))
    ours = [family for family in families if family.name.startswith("coppice_")]
    assert len(ours) >= 25
    units = ("_seconds", "_tokens", "_pages", "_requests", "_sequences", "_responses", "_steps",
             "_pins", "_preemptions", "_running", "_waiting", "_finished", "_refused", "_up",
             "_info", "_restarts", "_bytes")  # fmt: skip
    for family in ours:
        assert family.documentation, family.name
        assert family.name.endswith(units), family.name


async def test_without_an_engine_the_rest_is_still_told() -> None:
    from coppice.frontend.deltas import EngineStopped

    class Dead:
        async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
            raise EngineStopped("it died")

    from aiohttp.test_utils import make_mocked_request

    (route,) = Metrics(Dead(), "tiny", lambda: 3).routes()
    answer: Any = await route.handler(make_mocked_request("GET", "/metrics"))
    text = answer.body.decode()
    assert 'coppice_engine_info{model="tiny"} 1.0' in text
    assert "coppice_engine_up 0.0" in text
    assert "coppice_engine_restarts_total 3.0" in text
    assert "coppice_prompt_tokens" not in text


def test_every_metric_is_in_the_documentation(url: str) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(coppice_\w+)", text))
    kinds = {"counter": "_total", "gauge": "", "histogram": ""}
    families = parser.text_string_to_metric_families(httpx.get(url + "/metrics").text)
    there = {f"{family.name}{kinds[family.type]}" for family in families
             if family.name.startswith("coppice_")}  # fmt: skip
    assert told == there


# -- the dashboard -----------------------------------------------------------------------------


def queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    found += [
        variable["definition"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    return found


def test_the_dashboard_asks_only_for_metrics_that_there_are(url: str) -> None:
    found = samples(url)
    names = {sample.name for sample in found}
    labels: dict[str, set[str]] = {}
    for sample in found:
        labels.setdefault(sample.name, set()).update(sample.labels)
    assert len(queries()) > 30
    used = set()
    for query in queries():
        plain = re.sub(r'"[^"]*"|\$\w+', "", query)
        metrics = {word for word in re.findall(r"[a-z_]{3,}", plain) if word in names}
        words = set(re.findall(r"[a-z_][a-z_0-9]*", plain)) - PROMQL - metrics
        assert metrics, query
        assert words <= set.union(*(labels[name] for name in metrics)), query
        used |= metrics
    told = {re.sub(r"_(bucket|sum|count|created)$", "", s.name) for s in found}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    missing = {name for name in told if name.startswith("coppice_")} - shown
    assert missing == {"coppice_engine_info", "coppice_page_size_tokens"}


def test_no_two_panels_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
