"""`coppice simulate` and `coppice bench`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coppice.frontend.commands.main import main
from coppice.frontend.simulate.bench import batch_sizes, fitted
from coppice.frontend.simulate.load import at_rate, made, read_lengths

TEXTBOOK = (
    "--requests", 4, "--lengths", "1:32,1:128,1:64,1:256", "--max-num-seqs", 4,
    "--step-ms", 1000, "--prefill-rate", "inf", "--row-ms", 0, "--pool", 1040,
)  # fmt: skip
STAGE_KEYS = {
    "name", "meaning", "places", "seconds", "busy_seconds", "steps", "prompt_tokens", "hit_tokens",
    "computed_tokens", "output_tokens", "output_tokens_a_second", "requests_a_second", "slots",
    "ttft_seconds", "itl_seconds", "latency_seconds", "preemptions", "memory", "over_time",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, command="simulate") -> str:
    assert main([command, *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_textbooks_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    out = run(capsys, *TEXTBOOK, "--json", file)
    rows = {line[:16].strip(): line[16:].split() for line in out.splitlines() if line[:1].strip()}
    assert rows["slots"] == ["1,024", "480", "480", "480"]
    assert rows["slots useful"] == ["480"] * 4
    assert rows["utilisation"] == ["46.9%", "100.0%", "100.0%", "100.0%"]
    assert rows["pages, peak"] == ["64", "64", "16", "16"]
    assert rows["pages, mean"] == ["64.0", "30.0", "11.6", "11.6"]
    assert rows["memory wasted"] == ["83.3%", "64.4%", "7.6%", "7.6%"]
    lines = [line for line in out.splitlines() if "out.json" not in line]
    assert max(map(len, lines)) <= 80
    report = json.loads(file.read_text())
    assert (report["schema"], report["version"]) == ("coppice.simulation", 1)
    assert set(report) == {"schema", "version", "coppice", "requests", "options", "machine",
                           "stages"}  # fmt: skip
    assert [stage["name"] for stage in report["stages"]] == [
        "static", "continuous", "chunked", "prefix",
    ]  # fmt: skip
    for stage in report["stages"]:
        assert set(stage) == STAGE_KEYS
        assert stage["output_tokens"] == 480
        assert len({len(column) for column in stage["over_time"].values()}) == 1
    assert report["stages"][0]["slots"] == {"all": 1024, "useful": 480, "utilisation": 0.46875}


def test_a_trace_and_its_hits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "out.json"
    with trace.open("w") as out:
        for number in range(12):
            line: dict[str, Any] = {"prompt": [*range(200), 1000 + number], "timestamp": number}
            out.write(json.dumps(line | {"output_tokens": number}) + "\n")
    out_text = run(capsys, trace, "--json", file, "--pool", 3000)
    assert "trace.jsonl" in out_text
    report = json.loads(file.read_text())
    assert report["requests"] == {
        "source": "trace.jsonl", "count": 12, "prompt_tokens": 12 * 201, "output_tokens": 67,
        "seconds": 11.0,
    }  # fmt: skip
    hits = {stage["name"]: stage["hit_tokens"] for stage in report["stages"]}
    assert hits == {"static": 0, "continuous": 0, "chunked": 0, "prefix": 11 * 200}
    ttft = {stage["name"]: stage["ttft_seconds"]["p50"] for stage in report["stages"]}
    assert ttft["prefix"] < ttft["chunked"]
    limited = tmp_path / "limited.json"
    run(capsys, trace, "--limit", 3, "--rate", 100, "--json", limited)
    assert json.loads(limited.read_text())["requests"]["count"] == 3


def test_lengths_are_taken_in_turn_and_share_what_they_should() -> None:
    arrivals = made(6, read_lengths("30:5, 10-20:1-3"), shared=12, seed=1)
    assert [len(each.prompt) for each in arrivals[::2]] == [30] * 3
    assert [each.output for each in arrivals[::2]] == [5] * 3
    assert all(10 <= len(each.prompt) <= 20 for each in arrivals[1::2])
    assert all(1 <= each.output <= 3 for each in arrivals[1::2])
    long = [each.prompt for each in arrivals if len(each.prompt) > 12]
    assert len({tuple(prompt[:12]) for prompt in long}) == 1
    assert len({prompt[12] for prompt in long}) == len(long)
    assert arrivals == made(6, read_lengths("30:5,10-20:1-3"), shared=12, seed=1)
    times = [each.time for each in at_rate(made(400, read_lengths("1:1"), shared=0, seed=0), 8, 0)]
    assert times == sorted(times)
    assert 40 < times[-1] < 60, "400 of them at 8 a second"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "trace: none given; give one, or --requests N with --lengths"),
        (["--requests", 3], "or --requests N with --lengths"),
        (["--requests", 3, "--lengths", "5"], "lengths must be PROMPT:OUTPUT"),
        (["--requests", 3, "--lengths", "5:x"], "got '5:x'"),
        (["--requests", 3, "--lengths", "0:5"], "a prompt must have at least 1 token"),
        (["--requests", 3, "--lengths", "5:9-3"], "a range must rise, got '9-3'"),
        (["--requests", 0, "--lengths", "5:5"], "requests must be at least 1, got 0"),
        (["--requests", 9, "--lengths", "5:5", "--shared", -1], "shared must be at least 0"),
        (["--requests", 9, "--lengths", "5:5", "--rate", 0], "rate must be a number of requests"),
        (["--requests", 9, "--lengths", "5:5", "--limit", 2], "limit is for a trace"),
        (["none.jsonl", "--requests", 9], "requests makes requests, but a trace is given, too"),
        (["none.jsonl"], "trace 'none.jsonl' cannot be read"),
        (
            ["--requests", 9, "--lengths", "5:5", "--pool", 8, "--page-size", 4],
            "pool must have at least 10 tokens",
        ),
        (["--requests", 9, "--lengths", "900000000:1"], "may have at most 268,435,456 tokens"),
        (["--requests", 9, "--lengths", "5:5", "--step-ms", 0], "step-ms must be above 0"),
        (["--requests", 9, "--lengths", "5:5", "--prefill-rate", -1], "prefill-rate must be above"),
        (["--requests", 9, "--lengths", "5:5", "--row-ms", "nan"], "row-ms must be at least 0"),
        (["--requests", 9, "--lengths", "5:5", "--machine", "m", "--row-ms", 1], "go without it"),
        (["--requests", 9, "--lengths", "5:5", "--machine", "none.json"], "cannot be read"),
        (["--requests", 9, "--lengths", "5:5", "--json", "/none/x"], "json must be a file in a"),
        (["--requests", 9, "--lengths", "5:5", "--page-size", 0], "page_size must be an integer"),
    ],
)
def test_bad_input_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list, message: str
) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[]", "must be a file that `coppice bench` wrote"),
        ("{", "is not JSON"),
        ({"version": 2}, "version must be 1, got 2"),
        ({"step_seconds": "1"}, "step_seconds must be a number of seconds, got '1'"),
        ({"decode": []}, "decode must be a list with at least one step"),
        ({"decode": [{"sequences": 1.5, "seconds": 1}]}, "sequences must be an integer, got 1.5"),
        ({"decode": [{"sequences": 1}]}, "'seconds' is missing"),
        ({"decode": [3]}, "of a wrong kind"),
        ({"prefill_token_seconds": -1}, "token must be a number of seconds from 0, got -1"),
    ],
)
def test_machines_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    file = tmp_path / "machine.json"
    machine = {
        "schema": "coppice.machine", "version": 1, "step_seconds": 1, "prefill_token_seconds": 0,
        "decode": [{"sequences": 1, "seconds": 1}],
    }  # fmt: skip
    file.write_text(change if isinstance(change, str) else json.dumps(machine | change))
    assert message in refused(capsys, "--requests", 1, "--lengths", "5:5", "--machine", file)


def test_a_measured_machine_is_simulated(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, result = tmp_path / "machine.json", tmp_path / "out.json"
    small = ["--prompt-tokens", "32", "--context-tokens", "8", "--max-batch", "3", "--rounds", "2"]
    memory = ["--kv-cache-tokens", "1024"]
    assert main(["bench", str(checkpoint), *small, *memory, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "prompt tokens a second, in a step of 32" in printed
    machine = json.loads(file.read_text())
    assert [point["sequences"] for point in machine["decode"]] == [1, 2, 3]
    times = [point["seconds"] for point in machine["decode"]]
    assert times == sorted(times)
    assert times[0] > 0
    assert machine["measured"]["prompt_tokens"] == 32
    run(capsys, "--requests", 5, "--lengths", "20:4", "--machine", file, "--json", result)
    report = json.loads(result.read_text())
    assert report["machine"] == {
        name: machine[name] for name in ("step_seconds", "prefill_token_seconds", "decode")
    }
    for bad, message in (
        (["--prompt-tokens", "1"], "prompt-tokens must be from 2 to"),
        (["--max-batch", "0"], "max-batch must be from 1 to"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--context-tokens", "900"], "context-tokens must be from 1 to"),
    ):
        assert message in refused(capsys, checkpoint, *memory, *small, *bad, command="bench"), (
            message
        )


def test_the_fitted_machine_has_the_measured_times() -> None:
    machine = fitted(100, 0.5, {1: 0.1, 2: 0.3, 4: 0.2, 8: 0.4})
    assert machine.seconds(100, 0) == pytest.approx(0.5)
    assert [machine.seconds(0, rows) for rows in (1, 2, 4, 8)] == [0.1, 0.2, 0.2, 0.4]
    assert fitted(10, 0.1, {1: 5.0}).seconds(10, 0) == pytest.approx(0.1)
    assert batch_sizes(1) == [1]
    assert batch_sizes(12) == [1, 2, 4, 8, 12]


# -- the page ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), pytest.param(400, "dark", marks=pytest.mark.slow)]
)
def test_the_page_shows_the_jsons_figures(
    browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], width: int, scheme: str
) -> None:
    trace, page, file = tmp_path / "<b>&.jsonl", tmp_path / "page.html", tmp_path / "out.json"
    with trace.open("w") as out:
        for number in range(30):
            prompt = [*range(300), 1000 + number]
            out.write(json.dumps({"prompt": prompt, "output_tokens": 1 + 7 * number}) + "\n")
    run(capsys, trace, "--pool", 4000, "--html", page, "--json", file)
    report = json.loads(file.read_text())
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    complaints: list[str] = []
    requests: list[str] = []
    window = context.new_page()
    window.on("console", lambda message: complaints.append(message.text))
    window.on("pageerror", lambda error: complaints.append(str(error)))
    window.on("request", lambda request: requests.append(request.url))
    window.goto(page.as_uri())
    window.wait_for_selector("#chart-pages .scatterlayer path.js-line")
    for stage in report["stages"]:
        tile = window.inner_text(f"#tile-{stage['name']}")
        assert tile == f"{stage['output_tokens_a_second']:,.1f}"
    table = window.inner_text("#stages-table")
    for stage in report["stages"]:
        assert f"{stage['slots']['utilisation']:.1%}" in table
        assert f"{stage['memory']['waste']:.1%}" in table
    drawn = window.evaluate("Array.from(document.getElementById('chart-throughput').data[0].y)")
    assert drawn == [stage["output_tokens_a_second"] for stage in report["stages"]]
    shares = window.evaluate(
        "Array.from(document.getElementById('chart-slots').data, each => Array.from(each.y))"
    )
    assert [sum(parts) for parts in zip(*shares, strict=True)] == pytest.approx([1.0] * 4)
    for name in ("slots", "throughput", "ttft", "itl", "pages"):
        box = window.query_selector(f"#chart-{name} .main-svg").bounding_box()
        assert box["width"] > 100, name
        assert window.get_attribute(f"#chart-{name}", "role") == "img"
    assert window.evaluate("document.documentElement.scrollWidth") <= width
    assert "<b>&.jsonl" in window.inner_text("h1")
    assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]
    assert complaints == []
    context.close()
