"""The history of what tiers gave: which columns there are, and that they add up."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fake_tiers import written
from tiered_engine import engine, loading_pays, prompts_of, serve

from coppice.frontend.report.encode import Names, report_schema, server_report
from coppice.frontend.report.samples import SAMPLE_SECONDS, SPANS, History, Sample
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report, make_stats
from coppice.runtime.report.snapshot import Counts, EngineStats, Histogram, TierReport, TiersReport

PROMPTS = prompts_of(7)


def tiers(*names: str) -> TiersReport:
    """Tiers of these names that did nothing."""
    nothing: dict[str, Any] = {each.name: 0 for each in fields(TierReport)}
    stores = tuple(TierReport(**nothing | {"name": name}) for name in names)
    sums: dict[str, Any] = {each.name: 0 for each in fields(TiersReport)}
    return TiersReport(**sums | {"stores": stores})


def stats(told: TiersReport | None, **counts: int) -> EngineStats:
    """What an engine with these tiers, or none, reports after these counts."""
    numbers = dict.fromkeys(
        ("hit_tokens", "computed_tokens", "generated_tokens", "preemptions", "rounded_off_tokens",
         "evicted_tokens", "pages_total", "pages_free", "pages_cached", "pages_pinned",
         "pages_held", "requests", "prompt_tokens"),
        0,
    )  # fmt: skip
    empty = dict.fromkeys(("eviction_age", "ttft", "itl", "step"), Histogram((1.0,), (0, 0), 0.0))
    return EngineStats(**numbers, **empty, page_size=16, counts=Counts(**counts), tiers=told)


def loaded(columns: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {name: found for name, found in columns.items() if name.startswith("loaded_")}


def test_each_tier_that_is_there_has_a_column() -> None:
    both = tiers("host", "shared")
    first = stats(both, requests=1, prompt_tokens=10)
    second = stats(both, requests=2, prompt_tokens=40, hit_tokens=25, loaded_shared=20)
    third = stats(
        both, requests=3, prompt_tokens=90, hit_tokens=70, loaded_shared=21, loaded_host=30
    )
    history = History()
    history.add(Sample(0.0, first))
    history.add(Sample(5.0, second))
    past = history.over_time("ten_minutes", Sample(10.0, third))
    assert loaded(past) == {"loaded_host": [0, 30], "loaded_shared": [20, 1]}
    assert past["hit_tokens"] == [25, 45]
    # An engine that began again has loaded all of it since.
    again = stats(both, requests=1, prompt_tokens=9, hit_tokens=8, loaded_host=8)
    past = history.over_time("ten_minutes", Sample(15.0, again))
    assert loaded(past) == {"loaded_host": [0, 8], "loaded_shared": [20, 0]}


def test_without_tiers_there_is_no_column() -> None:
    history = History()
    for number in range(3):
        history.add(Sample(5.0 * number, stats(None, requests=number)))
    for span in SPANS:
        assert loaded(history.over_time(span, Sample(60.0, stats(None, requests=9)))) == {}


def test_it_is_kept_as_long_as_all_else() -> None:
    history, host = History(), tiers("host")
    for number in range(2000):
        counts = dict.fromkeys(("prompt_tokens", "hit_tokens", "loaded_host"), 3 * number)
        history.add(Sample(SAMPLE_SECONDS * number, stats(host, requests=number, **counts)))
    now = Sample(
        SAMPLE_SECONDS * 2000,
        stats(host, requests=2000, prompt_tokens=6000, hit_tokens=6000, loaded_host=6000),
    )
    for span, (_, most) in SPANS.items():
        past = history.over_time(span, now)
        assert len({len(column) for column in past.values()}) == 1
        assert len(past["loaded_host"]) <= most
        assert past["loaded_host"] == past["prompt_tokens"]


@pytest.fixture
def restarted(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with host memory, whose disk has what an earlier one computed of `PROMPTS`."""
    loading_pays(monkeypatch)
    earlier = engine(checkpoint, tmp_path)
    serve(earlier, PROMPTS)
    earlier.close()
    # Pages come back when prompts ask for them, and not before.
    return engine(checkpoint, tmp_path, host_cache="64MiB", kv_cache_tokens=256, max_num_seqs=2)


def test_pool_tiers_and_computed_tokens_add_up(restarted: Engine) -> None:
    history = History()
    history.add(Sample(0.0, make_stats(restarted)))
    for number in range(1, 4):  # from disk at first, then from host memory, where it was evicted
        serve(restarted, PROMPTS)
        written(restarted)
        history.add(Sample(5.0 * number, make_stats(restarted)))
    made = make_report(restarted)
    now = history.over_time("ten_minutes", Sample(17.5, made))
    counts = made.counts
    assert loaded(now).keys() == {"loaded_host", "loaded_disk"}
    for tier, tokens in counts.loaded.items():
        assert sum(now.get(f"loaded_{tier}", [0])) == tokens
    assert counts.loaded_disk > 0 and counts.loaded_host > 0
    assert now["loaded_disk"][0] > 0
    for at in range(3):
        in_pool = now["hit_tokens"][at] - now["loaded_host"][at] - now["loaded_disk"][at]
        assert 0 <= in_pool <= now["hit_tokens"][at] < now["prompt_tokens"][at]
    report = server_report(made, history, Names(None), model="m", at=17.5, started=0.0)
    assert report["over_time"]["ten_minutes"] == now
    schema = report_schema()
    jsonschema.validate(json.loads(json.dumps(report)), schema)
    report["over_time"]["hour"]["loaded_disk"][-1] = None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, schema)
    restarted.close()
