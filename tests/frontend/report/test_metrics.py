"""The metrics over a real socket, in both formats, and the dashboard that asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import make_mocked_request
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.samples import Sample

from coppice.frontend.errors import EngineStopped
from coppice.frontend.report.metrics.engine import engine_families
from coppice.frontend.report.metrics.scrape import Metrics
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_stats
from coppice.runtime.report.merged import merged_stats
from coppice.runtime.report.snapshot import CAUSES
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.graphs import DECODE_STEPS
from tests.runtime.report.test_merged import full

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"
PROMPT = "The quick brown fox jumps over the lazy dog while the band plays on. "


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
    assert causes["no_cache"] == 0
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
    replicas = {s.labels["replica"] for s in found if s.name == "coppice_replica_pool_pages"}
    tokens = sum(pages.values()) * value(found, "coppice_page_size_tokens")
    assert tokens == 4096 * max(1, len(replicas))
    assert pages["held"] == 0 < pages["cached"]


def test_answers_are_counted_by_route_and_status(url: str) -> None:
    found = samples(url)
    name = "coppice_http_responses_total"
    assert value(found, name, route="/v1/completions", status="200", method="POST") >= 2
    assert value(found, name, route="/v1/completions", status="400", method="POST") >= 1
    assert value(found, name, route="other", status="404", method="GET") >= 1
    routes = {s.labels["route"] for s in found if s.name == name}
    assert not any("nowhere" in route for route in routes), "what clients make up is no label"


def test_answers_that_never_were_are_reported_as_0(url: str) -> None:
    """rate() sees nothing of a series that begins with 1."""
    found = samples(url)
    name = "coppice_http_responses_total"
    for status in ("500", "504"):
        assert value(found, name, route="/v1/completions", status=status, method="POST") == 0
    # Other tests may have caused such answers; `value` raises an error if the series is missing.
    for status in ("429", "499", "503"):
        assert value(found, name, route="/v1/completions", status=status, method="POST") >= 0
    path = "/cache/pins/{name}"
    assert value(found, name, route=path, status="500", method="DELETE") == 0
    assert len([sample for sample in found if sample.name == name]) < 300


def test_a_client_that_asks_for_openmetrics_gets_it(url: str) -> None:
    answer = httpx.get(url + "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(answer.text)}
    assert "coppice_hit_tokens" in names


def test_every_name_contains_its_unit_and_has_a_description(url: str) -> None:
    families = list(parser.text_string_to_metric_families(httpx.get(url + "/metrics").text))
    ours = [family for family in families if family.name.startswith("coppice_")]
    assert len(ours) >= 25
    units = ("_seconds", "_tokens", "_pages", "_requests", "_sequences", "_responses", "_steps",
             "_pins", "_preemptions", "_running", "_waiting", "_finished", "_refused", "_up",
             "_info", "_restarts", "_bytes", "_graphs", "_keys",
             "_calls", "_loads")  # fmt: skip
    for family in ours:
        assert family.documentation, family.name
        assert family.name.endswith(units), family.name


async def test_without_an_engine_the_rest_is_still_reported() -> None:
    class Dead:
        async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
            raise EngineStopped("it died")

    (route,) = Metrics(Dead(), "tiny", lambda: 3, lambda: False).routes()
    answer: Any = await route.handler(make_mocked_request("GET", "/metrics"))
    text = answer.body.decode()
    assert 'coppice_engine_info{model="tiny"} 1.0' in text
    assert "coppice_engine_up 0.0" in text
    assert "coppice_engine_restarts_total 3.0" in text
    assert "coppice_prompt_tokens" not in text


@pytest.mark.parametrize("caching", [True, False])
async def test_prompt_tokens_are_counted_with_and_without_a_cache(
    checkpoint: Path, caching: bool
) -> None:
    engine = Engine(
        EngineConfig(model=str(checkpoint), kv_cache_tokens=256, enable_prefix_caching=caching)
    )
    for name in ("a", "b"):
        engine.add_request(name, range(5, 25), SamplingParams(max_tokens=1))
        while engine.has_unfinished():
            engine.step()

    class Live:
        async def ask(self, method: str) -> Any:
            return make_stats(engine)

    (route,) = Metrics(Live(), "tiny", lambda: 0, lambda: True).routes()
    answer: Any = await route.handler(make_mocked_request("GET", "/metrics"))
    text = answer.body.decode()
    assert "coppice_prompt_tokens_total 40.0" in text
    assert f'coppice_computed_tokens_total{{cause="no_cache"}} {0.0 if caching else 40.0}' in text
    assert f'coppice_hit_tokens_total{{kind="cross"}} {19.0 if caching else 0.0}' in text


async def test_each_replica_has_its_series(checkpoint: Path) -> None:
    parts = {}
    for number in range(2):
        engine = Engine(EngineConfig(model=str(checkpoint), kv_cache_tokens=256))
        for name in "ab"[: 1 + number]:
            held = 15 if name == "a" else 0
            engine.add_request(
                name, range(5, 25), SamplingParams(max_tokens=1), held_elsewhere=held
            )
            while engine.has_unfinished():
                engine.step()
        parts[f"r{number}"] = make_stats(engine)

    class Replicated:
        async def ask(self, method: str) -> Any:
            return merged_stats(parts)

    (route,) = Metrics(Replicated(), "tiny", lambda: 0, lambda: True).routes()
    answer: Any = await route.handler(make_mocked_request("GET", "/metrics"))
    found = [s for f in parser.text_string_to_metric_families(answer.body.decode())
             for s in f.samples]  # fmt: skip

    def by_replica(name: str, **labels: str) -> list[float]:
        return [value(found, f"coppice_{name}", replica=each, **labels) for each in parts]

    assert by_replica("replica_requests_total") == [1, 2]
    assert by_replica("replica_prompt_tokens_total") == [20, 40]
    assert by_replica("replica_hit_tokens_total") == [0, 19]
    assert by_replica("replica_lost_tokens_total") == [15, 15]
    assert by_replica("replica_generated_tokens_total") == [1, 2]
    assert (
        by_replica("replica_requests_running") == by_replica("replica_requests_waiting") == [0, 0]
    )
    states = [by_replica("replica_pool_pages", state=each)
              for each in ("free", "cached", "pinned", "held")]  # fmt: skip
    assert [sum(pages) for pages in zip(*states, strict=True)] == [
        each.pages_total for each in parts.values()
    ]
    assert sum(by_replica("replica_memory_bytes")) == value(found, "coppice_engine_memory_bytes")
    assert value(found, "coppice_prompt_tokens_total") == 60
    assert value(found, "coppice_computed_tokens_total", cause="other_replica") == 30


def test_there_are_series_of_the_replicas_that_there_are(url: str) -> None:
    replicas = httpx.get(url + "/cache/report").json()["replicas"]
    named = {each.labels["replica"] for each in samples(url) if "replica" in each.labels}
    assert named == {each["name"] for each in replicas}, "a single engine has none"


def test_every_metric_is_in_the_documentation(url: str) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(coppice_\w+)", text))
    kinds = {"counter": "_total", "gauge": "", "histogram": ""}
    families = parser.text_string_to_metric_families(httpx.get(url + "/metrics").text)
    there = {f"{family.name}{kinds[family.type]}" for family in families
             if family.name.startswith("coppice_")}  # fmt: skip
    assert documented == there


# -- the dashboard -----------------------------------------------------------------------------


def queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


@dataclass
class Selector:
    """What a query takes from a metric, and the labels by which it is grouped."""

    metric: str
    matchers: dict[str, str] = field(default_factory=dict)
    is_range: bool = False
    grouped_by: set[str] = field(default_factory=set)
    only_of: set[tuple[str, ...]] = field(default_factory=set)  # `and on`: metric, labels


class Query:
    """Reads the part of PromQL that the dashboard uses; anything else is an AssertionError."""

    def __init__(self, text: str) -> None:
        pattern = r'[a-zA-Z_]\w*|[\d.]+|"[^"]*"|\$\w+|=~|[-+*/(){}\[\],=]'
        self.tokens = re.findall(pattern, text)
        assert "".join(self.tokens) == text.replace(" ", ""), f"characters of no token in {text}"
        self.selectors = self.expression()
        assert not self.tokens, f"{self.tokens} are left over in {text}"

    def take(self, *wanted: str) -> str:
        assert self.tokens and (not wanted or self.tokens[0] in wanted), (wanted, self.tokens)
        return self.tokens.pop(0)

    def take_if(self, wanted: str) -> bool:
        return bool(self.tokens) and self.tokens[0] == wanted and bool(self.tokens.pop(0))

    def expression(self) -> list[Selector]:
        found = self.term()
        while self.tokens and self.tokens[0] in ("+", "-", "*", "/", "and"):
            if self.take() == "and":
                self.take("on")
                by, other = self.names(), self.term()
                for selector in found:
                    selector.only_of |= {(each.metric, *sorted(by)) for each in other}
                found += other
            else:
                found += self.term()
        return found

    def term(self) -> list[Selector]:
        word = self.take()
        if word in ("sum", "min", "max"):
            by = self.names() if self.take_if("by") else set()
            found = self.arguments(1)
            for selector in found:
                assert not selector.is_range
                selector.grouped_by |= by
            return found
        if word == "rate":
            (selector,) = self.arguments(1)
            assert selector.is_range, "rate takes a range"
            selector.is_range = False
            return [selector]
        if word == "histogram_quantile":
            assert 0 < float(self.tokens[1]) < 1
            found = self.arguments(2)
            assert all("le" in selector.grouped_by for selector in found)
            return found
        if re.fullmatch(r"[\d.]+", word):
            return []
        return [self.selector(word)]

    def arguments(self, count: int) -> list[Selector]:
        self.take("(")
        found = self.expression()
        for _ in range(count - 1):
            self.take(",")
            found += self.expression()
        self.take(")")
        return found

    def names(self) -> set[str]:
        self.take("(")
        found = {self.take()}
        while self.take_if(","):
            found.add(self.take())
        self.take(")")
        return found

    def selector(self, metric: str) -> Selector:
        selector = Selector(metric)
        if self.take_if("{"):
            while not self.take_if("}"):
                name, _, value = self.take(), self.take("=", "=~"), self.take()
                selector.matchers[name] = value.strip('"')
                self.take_if(",")
        if self.take_if("["):
            self.take("$__rate_interval")
            self.take("]")
            selector.is_range = True
        return selector


@pytest.mark.parametrize(
    "wrong",
    ["sum(a", "sum(a))", "rate(a)", "sum(a[$__rate_interval])", "a{b=c", "a b", "avg(a)", "a % 2",
     "histogram_quantile(0.5, rate(a[$__rate_interval]))", "sum by (rate(a[5m]))",
     "a and b"],
)  # fmt: skip
def test_queries_that_are_none(wrong: str) -> None:
    with pytest.raises(AssertionError):
        Query(wrong)


def test_tiers_have_their_numbers() -> None:
    stats = full()
    tiers = stats.tiers
    assert tiers is not None
    disk, other = tiers.stores
    families = [each for each in engine_families(stats) if each.name.startswith("coppice_tier")]
    told = {
        (sample.name, sample.labels.get("tier")): sample.value
        for family in families
        for sample in family.samples
    }
    assert told["coppice_tier_used_bytes", disk.name] == disk.used_bytes
    assert told["coppice_tier_capacity_bytes", disk.name] == disk.capacity_bytes
    assert other.capacity_bytes is None
    assert ("coppice_tier_capacity_bytes", other.name) not in told, "it can't say"
    assert told["coppice_tier_damaged_pages_total", other.name] == other.damaged
    assert told["coppice_tiers_found_tokens_total", None] == tiers.found_tokens
    assert told["coppice_tiers_computed_instead_tokens_total", None] == tiers.computed_instead
    without = [
        family
        for family in engine_families(replace(stats, tiers=None))
        if family.name.startswith("coppice_tier")
    ]
    assert len(without) == len(families)
    assert not any(family.samples for family in without)


def test_the_dashboard_asks_only_for_metrics_that_exist(url: str) -> None:
    found = samples(url)
    values: dict[str, dict[str, set[str]]] = {}
    for sample in found:
        labels = values.setdefault(sample.name, {})
        for label, value in sample.labels.items():
            labels.setdefault(label, set()).add(value)
    # Counted where there are CUDA graphs only.
    values["coppice_decode_steps_total"] = {"how": set(DECODE_STEPS)}
    # Of several replicas only.
    for name in set(re.findall(r"coppice_replica_\w+", " ".join(queries()))):
        values.setdefault(name, {"replica": set(), "state": set()})
    # Of engines with tiers only.
    for name in set(re.findall(r"coppice_tiers?_\w+", " ".join(queries()))):
        values.setdefault(name, {"tier": set()})
    # Of engines with speculation only.
    for name in set(
        re.findall(r"coppice_(?:drafted|accepted_draft|draft_saved)_\w+", " ".join(queries()))
    ):
        values.setdefault(name, {"source": set()})
    # Of those with a draft model only.
    values.setdefault("coppice_draft_model_tokens_total", {"kind": set()})
    assert len(queries()) > 30
    used = set()
    for query in queries():
        selectors = Query(query).selectors
        assert selectors, query
        for selector in selectors:
            labels = values[selector.metric]
            assert selector.matchers.pop("instance") == "$instance", "Prometheus' own"
            assert selector.grouped_by <= set(labels), query
            for label, value in selector.matchers.items():
                assert value in labels[label], query
            if not selector.metric.startswith("coppice_"):  # others export it too
                assert ("coppice_engine_up", "instance", "job") in selector.only_of, query
            used.add(selector.metric)
    counted = {re.sub(r"_(bucket|sum|count|created)$", "", s.name) for s in found}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    missing = {name for name in counted if name.startswith("coppice_")} - shown
    # What stays as it was at the start.
    assert missing == {"coppice_engine_info", "coppice_page_size_tokens"}


def test_the_dashboard_lets_an_instance_be_chosen(url: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    asked = variables["instance"]["definition"]
    metric = re.fullmatch(r"label_values\((\w+), instance\)", asked)
    assert metric is not None
    assert metric[1] in {sample.name for sample in samples(url)}


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
