"""The report, the pins and the reset over a real socket, and that they do not leak text."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from coppice.frontend.report.encode import Names, report_schema, server_report
from coppice.frontend.report.reporter import Reporter
from coppice.frontend.report.samples import History, Sample
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.process.service import EngineService
from coppice.runtime.report.gather import make_report, make_stats
from coppice.runtime.report.merged import merged_report
from coppice.runtime.requests.sampling_params import SamplingParams

SHARED = " ".join(f"The key is under the mat of house {7 * number}." for number in range(14)) + " "
SECRET = "salt-that-nobody-may-see"


class Server:
    """A running server and the model's name there."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)
        self.model = model

    def complete(self, prompt: str, **more: Any) -> Any:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 3, "ignore_eos": True} | more
        return self.ok("POST", "/v1/completions", json=body)

    def ok(self, method: str, path: str, **more: Any) -> Any:
        answer = self.http.request(method, path, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, status: int, method: str, path: str, **more: Any) -> dict[str, Any]:
        answer = self.http.request(method, path, **more)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


@pytest.fixture(scope="module")
def quiet(served: Callable[..., str], checkpoint: Path) -> Server:
    """A server that shows no text, after requests with hits, near misses and namespaces."""
    server = Server(served(), str(checkpoint))
    for number in range(6):
        server.complete(f"Day {number} " + SHARED)
        server.complete(SHARED + f"Where is {number}?")
    for salt in (SECRET, SECRET + " too"):  # behind an ingress one of them where the text is known
        server.complete(SHARED, cache_salt=salt)
    # A report is kept for a moment; an older one may have been asked for by other tests.
    deadline = time.monotonic() + 20
    while len(server.ok("GET", "/cache/report")["namespaces"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return server


def pieces(report: Any) -> list[dict[str, Any]]:
    """All pieces of text of a report, wherever they are."""
    if isinstance(report, dict):
        own = [report] if report.keys() == {"tokens", "hash", "text"} else []
        return own + [piece for value in report.values() for piece in pieces(value)]
    if isinstance(report, list):
        return [piece for value in report for piece in pieces(value)]
    return []


# -- the report --------------------------------------------------------------------------------


def test_the_report_fits_its_schema(quiet: Server) -> None:
    schema = quiet.ok("GET", "/cache/report/schema")
    assert schema == report_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    report = quiet.ok("GET", "/cache/report")
    jsonschema.validate(report, schema)
    assert report.keys() == schema["properties"].keys(), "nothing is undocumented"
    assert (report["schema"], report["version"]) == ("coppice.cache-report", 1)


def test_the_numbers_of_a_report_agree(quiet: Server) -> None:
    report = quiet.ok("GET", "/cache/report")
    counts = report["counts"]["since_start"]
    assert counts["prompt_tokens"] == counts["hit_tokens"] + counts["computed_tokens"]
    assert counts["computed_tokens"] == sum(counts["causes"].values())
    assert counts["hit_rate"] == counts["hit_tokens"] / counts["prompt_tokens"] > 0.2
    assert counts["causes"]["diverged"] > 0
    assert counts["causes"]["namespace"] > 0
    parts = [each["since_start"]["prompt_tokens"] for each in report["namespaces"]]
    assert sum(parts) == counts["prompt_tokens"]
    pages = report["pool"]["pages"]
    assert pages.pop("total") == sum(pages.values())
    for span in report["over_time"].values():
        assert len({len(column) for column in span.values()}) == 1
    total = sum(report["over_time"]["ten_minutes"]["prompt_tokens"])
    assert total <= counts["prompt_tokens"]
    for place, node in enumerate(report["tree"]):
        assert node["parent"] is None or node["parent"] < place
    waits = report["latency_seconds"]["ttft"]["since_start"]
    assert waits["count"] == sum(report["requests"]["finished"].values())
    assert 0 < waits["p50"] <= waits["p99"]


def test_no_text_is_shown_without_the_option_and_no_salt_ever(quiet: Server) -> None:
    raw = quiet.http.get("/cache/report").text
    report = json.loads(raw)
    assert report["has_text"] is False
    assert report["near_misses"], "there is text to hide"
    found = pieces(report)
    assert len(found) > 10
    assert {piece["text"] for piece in found} == {None}
    assert not any(word in raw for word in ("under the mat", "door", "house", "Day "))
    for path in ("/cache/report", "/cache/pins", "/metrics"):
        assert SECRET not in quiet.http.get(path).text
    names = [each["name"] for each in report["namespaces"]]
    assert names[0] == "default"
    assert names[1].startswith("#")
    assert len(names[1]) == 9


@pytest.mark.slow
def test_text_is_shown_with_report_text(served: Callable[..., str], checkpoint: Path) -> None:
    server = Server(served("--report-text"), str(checkpoint))
    for number in range(3):
        server.complete(f"Night {number} " + SHARED)
        server.complete(f"Night {number} " + SHARED)
    report = server.ok("GET", "/cache/report")
    assert report["has_text"] is True
    jsonschema.validate(report, report_schema())
    assert all(isinstance(piece["text"], str) for piece in pieces(report))
    assert any("The key is under the mat" in piece["text"] for piece in pieces(report["tree"]))
    (night,) = pieces(report["recent"][-4]["divergence"])[1:2]  # of the second night
    assert "1" in night["text"]
    server.complete("Hidden " + SHARED, cache_salt=SECRET)
    assert SECRET not in server.http.get("/cache/report").text


def test_recent_requests_show_nothing_of_other_namespaces(quiet: Server) -> None:
    quiet.complete(SHARED + "One end.", cache_salt="fresh")
    quiet.complete(SHARED + "Another end.", cache_salt="fresh")
    end = time.monotonic() + 30
    while time.monotonic() < end:  # the report may be a second old
        first, second = quiet.ok("GET", "/cache/report")["recent"][-2:]
        if first["namespace"] == second["namespace"] != "default":
            break
    assert first["namespace"] == second["namespace"]
    assert first["namespace"].startswith("#")
    for each in (first, second):
        assert each["prompt_tokens"] == each["hit_tokens"] + sum(each["causes"].values())
        assert each["evicted_idle_seconds"] is None and each["evicted_seconds"] is None
        assert 0 <= second["seconds_ago"] <= each["seconds_ago"] < 60
    # In the default namespace the same tokens are continued in many ways.
    assert first["causes"]["namespace"] > 0
    assert (first["hit_tokens"], first["divergence"]) == (0, None)
    assert second["hit_tokens"] == second["divergence"]["before"]["tokens"] > 50
    assert second["divergence"]["ours"]["tokens"] > 0
    assert second["divergence"]["ours"]["hash"] != second["divergence"]["theirs"]["hash"]
    assert {piece["text"] for piece in pieces(second)} == {None}


def test_equal_hashes_mean_equal_texts_within_one_run() -> None:
    one, other = Names(None, b"1" * 16), Names(None, b"2" * 16)
    assert one.piece((1, 2, 3)) == one.piece((1, 2, 3))
    assert one.piece((1, 2, 3))["hash"] != one.piece((1, 2))["hash"]
    assert one.piece((1, 2, 3))["hash"] != other.piece((1, 2, 3))["hash"], "keyed by the run"


def test_a_namespace_is_named_by_its_tenant_and_a_hash_of_its_salt() -> None:
    from coppice.radix import Namespace

    names = Names(None, b"1" * 16)
    assert names.namespace(Namespace("m")) == "default"
    assert names.namespace(Namespace("m", tenant="team-a")) == "team-a"
    salted = names.namespace(Namespace("m", None, "salt"))
    assert salted.startswith("#")
    assert "salt" not in salted
    assert names.namespace(Namespace("m", "lora", "salt", "team-a")) == f"lora team-a {salted}"


def test_text_cut_inside_a_character_stays_readable(tokenizer: Tokenizer) -> None:
    def decode(ids: Any) -> str:
        return tokenizer.decode(list(ids))

    ids = tokenizer.encode("東京")
    text = Names(decode, b"1" * 16).piece(ids[1:-1])["text"]
    assert "\ufffd" not in text


# -- what it costs -----------------------------------------------------------------------------


class Counted:
    """An engine that records how it is asked for reports."""

    def __init__(self, checkpoint: Path, seconds: float) -> None:
        engine = Engine(EngineConfig(str(checkpoint), kv_cache_tokens=512))
        self.service = EngineService(engine)
        self.seconds = seconds  # reported as the duration of finding the tree
        self.asked: list[bool] = []  # for each report: whether with its tree

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(kwargs["tree"])
        found = self.service.call(method, args, kwargs)
        return replace(found, tree=found.tree and replace(found.tree, seconds=self.seconds))


async def test_many_readers_cost_the_engine_no_more_than_one(
    checkpoint: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Counted(checkpoint, seconds=0.1)
    reporter = Reporter(engine, tokenizer, "tiny", show_text=False)
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    reports = await asyncio.gather(*(reporter.report() for _ in range(20)))
    assert len(set(reports)) == 1
    assert engine.asked == [True]
    now += 1.5
    await reporter.report()
    assert engine.asked[1:] == [False], "a walk of 0.1 s is due every 5 s"
    now += 4
    await reporter.report()
    assert engine.asked[2:] == [True]
    reporter.forget()
    await reporter.report()
    assert engine.asked[3:] == [True]


def test_history_keeps_three_spans_in_fixed_memory(checkpoint: Path) -> None:
    engine = Engine(EngineConfig(str(checkpoint), kv_cache_tokens=512))
    history = History()
    for number in range(2000):
        if number % 400 == 0:
            engine.add_request(f"{number}", [5, 6, 7], SamplingParams(max_tokens=2))
            while engine.has_unfinished():
                engine.step()
            stats = make_stats(engine)
        history.add(Sample(5.0 * number, stats))
    now = Sample(5.0 * 2000, stats)
    spans = {span: history.over_time(span, now) for span in ("ten_minutes", "hour", "day")}
    assert {span: len(found["at"]) for span, found in spans.items()} == {
        "ten_minutes": 121, "hour": 120, "day": 17,
    }  # fmt: skip
    for found in spans.values():
        assert found["at"] == sorted(found["at"])
        assert found["at"][-1] == 10_000
    assert sum(spans["day"]["seconds"]) == 10_000
    assert sum(spans["day"]["prompt_tokens"]) == 4 * 3, "all but what was before the first sample"
    fresh = make_stats(Engine(EngineConfig(str(checkpoint), kv_cache_tokens=512)))
    again = history.over_time("hour", Sample(10_005.0, fresh))
    assert min(again["prompt_tokens"]) >= 0, "an engine that began again counts from zero"
    report = server_report(
        make_report(engine), history, Names(None), model="m", at=now.at, started=0.0
    )
    jsonschema.validate(json.loads(json.dumps(report)), report_schema())


def test_the_report_of_replicas_fits_the_schema(checkpoint: Path) -> None:
    parts = {}
    for number in range(2):
        engine = Engine(EngineConfig(str(checkpoint), kv_cache_tokens=512))
        engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=2), held_elsewhere=2 * number)
        while engine.has_unfinished():
            engine.step()
        engine.pin("p", [5, 6])
        parts[f"r{number}"] = make_report(engine)
    merged = merged_report(parts, [parts["r1"]])
    report = server_report(merged, History(), Names(None), model="m", at=1.0, started=0.0)
    jsonschema.validate(json.loads(json.dumps(report)), report_schema())
    rows = [(each["name"], each["other_replica_tokens"]) for each in report["replicas"]]
    assert rows == [("r0", 0), ("r1", 2)]
    assert report["counts"]["since_start"]["causes"]["other_replica"] == 4
    assert report["pool"]["tokens"] == 1024
    assert [pin["name"] for pin in report["pins"]] == ["p"]


# -- pins and reset ----------------------------------------------------------------------------


def test_pins_are_put_listed_and_ended(quiet: Server) -> None:
    pin = quiet.ok("PUT", "/cache/pins", json={"name": "house", "prompt": SHARED, "ttl": 3600})
    assert pin["tokens"] == pin["cached_tokens"] > 50
    assert (pin["namespace"], pin["ttl_seconds"]) == ("default", 3600)
    assert 3500 < pin["seconds_left"] <= 3600
    again = quiet.ok("PUT", "/cache/pins", json={"name": "house", "prompt": SHARED})
    assert again["ttl_seconds"] is None, "the same prefix may be put again"
    error = quiet.refused(409, "PUT", "/cache/pins", json={"name": "house", "prompt": "other"})
    assert "there is a pin named 'house' already" in error["message"]
    ids = {"name": "a/b ç", "prompt_token_ids": [9, 8, 7], "cache_salt": SECRET}
    assert quiet.ok("PUT", "/cache/pins", json=ids)["cached_tokens"] == 0
    system = [{"role": "system", "content": "Be brief."}]
    chat = quiet.ok("PUT", "/cache/pins", json={"name": "chat", "messages": system})
    listed = quiet.ok("GET", "/cache/pins")
    assert [each["name"] for each in listed["data"]] == ["house", "a/b ç", "chat"]
    assert listed["data"] == quiet.ok("GET", "/cache/report")["pins"]
    body = {
        "model": quiet.model,
        "max_tokens": 1,
        "messages": [*system, {"role": "user", "content": "?"}],
    }
    quiet.ok("POST", "/v1/chat/completions", json=body)
    (now,) = [each for each in quiet.ok("GET", "/cache/pins")["data"] if each["name"] == "chat"]
    assert now["cached_tokens"] == chat["tokens"], "all of it is a prefix of the conversation"
    for name in ("house", "a/b ç", "chat"):
        assert quiet.ok("DELETE", f"/cache/pins/{name}") == {"name": name, "deleted": True}
    assert quiet.ok("GET", "/cache/pins")["data"] == []
    assert "no pin named 'house'" in quiet.refused(404, "DELETE", "/cache/pins/house")["message"]


def test_a_pin_beyond_the_budget_is_refused(quiet: Server) -> None:
    ids = {"name": "much", "prompt_token_ids": [7] * 3000}
    assert "pages more" in quiet.refused(409, "PUT", "/cache/pins", json=ids)["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ([], None, "the body must be a JSON object"),
        ({}, "name", "name is required"),
        ({"name": "x" * 201, "prompt": "a"}, "name", "1 to 200 characters"),
        ({"name": "\ud800", "prompt": "a"}, "name", "name must be valid Unicode"),
        ({"name": "x", "prompt": "\ud800"}, "prompt", "prompt must be valid Unicode"),
        ({"name": "x", "prompt": "a", "cache_salt": "\ud800"}, "cache_salt", "valid Unicode"),
        ({"name": "x", "prompt_token_ids": [10**30]}, "prompt_token_ids", "from 0 to"),
        ({"name": "x", "prompt": "a", "tenant": "b"}, "tenant", "tenant must be the name of a key"),
        ({"name": "x"}, "prompt", "one of prompt, prompt_token_ids and messages"),
        ({"name": "x", "prompt": "a", "messages": []}, "prompt", "prompt and messages"),
        ({"name": "x", "prompt": 3}, "prompt", "prompt must be a string, got 3"),
        ({"name": "x", "prompt_token_ids": "a"}, "prompt_token_ids", "a list of integers"),
        ({"name": "x", "prompt_token_ids": [1.5]}, "prompt_token_ids", "a list of integers"),
        ({"name": "x", "prompt_token_ids": [99999]}, "prompt_token_ids", "from 0 to"),
        ({"name": "x", "prompt_token_ids": []}, None, "at least one token"),
        ({"name": "x", "messages": []}, "messages", "messages must be a list"),
        ({"name": "x", "prompt": "a", "ttl": 0}, "ttl", "above 0 and at most 1,000,000,000, got 0"),
        ({"name": "x", "prompt": "a", "ttl": True}, "ttl", "at most 1,000,000,000, got True"),
        ({"name": "x", "prompt": "a", "cache_salt": 1}, "cache_salt", "must be a string, got 1"),
        ({"name": "x", "prompt": "a", "tokens": 1}, "tokens", "tokens is not a parameter"),
    ],
)
def test_a_bad_pin_is_refused_by_name(quiet: Server, body: Any, param: Any, message: str) -> None:
    error = quiet.refused(400, "PUT", "/cache/pins", content=json.dumps(body))
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_the_cache_is_emptied_unless_it_is_busy(
    served: Callable[..., str], checkpoint: Path
) -> None:
    server = Server(served("--report-text"), str(checkpoint))
    server.complete("something")
    body = {"model": server.model, "prompt": "endless", "max_tokens": 480, "ignore_eos": True}
    ended = threading.Event()

    def stream() -> None:
        with httpx.Client(timeout=60) as http:
            http.post(f"{server.url}/v1/completions", json=body | {"n": 8})
        ended.set()

    thread = threading.Thread(target=stream)
    thread.start()
    until = time.monotonic() + 20
    while server.http.post("/cache/reset").status_code == 200 and not ended.is_set():
        assert time.monotonic() < until
    assert not ended.is_set(), "it was refused while the request ran"
    error = server.refused(409, "POST", "/cache/reset")
    assert "requests are unfinished" in error["message"]
    thread.join()
    server.ok("PUT", "/cache/pins", json={"name": "ended", "prompt": "something"})
    assert server.ok("POST", "/cache/reset") == {"reset": True}
    report = server.ok("GET", "/cache/report")
    assert report["pool"]["pages"]["free"] == report["pool"]["pages"]["total"]
    assert (report["tree"], report["pins"]) == ([], [])
