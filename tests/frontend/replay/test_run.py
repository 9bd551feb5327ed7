"""`coppice replay`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from coppice.frontend.commands.main import main
from coppice.frontend.replay.run import replay
from coppice.frontend.replay.trace import read_trace
from coppice.frontend.report.encode import report_schema
from coppice.frontend.report.memory import memory
from coppice.runtime.offline.replay import ReplayOptions

REPLAYS_OWN = {
    "schema", "version", "coppice", "trace", "options", "seconds", "over_time", "policies",
    "tier_sizes",
}  # fmt: skip


@pytest.fixture
def token_trace(tmp_path: Path) -> Path:
    """120 requests over 6 documents of 300 tokens, of two namespaces."""
    rng = random.Random(0)
    documents = [[rng.randrange(1000) for _ in range(300)] for _ in range(6)]
    path = tmp_path / "tokens.jsonl"
    with path.open("w") as out:
        for number in range(120):
            document = rng.choice(documents)
            start = [rng.randrange(1000) for _ in range(4)] if number % 4 == 3 else []
            line: dict[str, Any] = {
                "prompt": start + document + [rng.randrange(1000) for _ in range(20)],
                "output_tokens": rng.randint(0, 20),
                "timestamp": 2 * number,
            }
            if number % 10 == 9:
                line["namespace"] = "second"
            out.write(json.dumps(line) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Standard output of a replay that succeeds."""
    assert main(["replay", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message of a replay that is refused before it prints anything."""
    assert main(["replay", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_terminal_has_the_figures_of_the_json(
    token_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    out = run(capsys, token_trace, "--pool", 1600, "--page-size", 8, "--json", file)
    report = json.loads(file.read_text())
    counts = report["counts"]["since_start"]
    assert counts["requests"] == report["trace"]["requests"] == 120
    assert 0 < counts["hit_rate"] < counts["ideal_hit_rate"] < 1
    for number in (
        "120 requests · pool of 1,600 tokens · pages of 8 · lru · one after another",
        f"{counts['prompt_tokens']:,}",
        f"{counts['hit_tokens']:,}",
        f"{counts['hit_rate']:.1%}",
        f"{counts['ideal_hit_rate']:.1%}",
        f"{report['pool']['evicted_tokens']:,}",
        "With twice the memory your hit rate would be",
        "Near misses",
        "Top shared prefixes",
        "never seen before",
        "was cached; idle for",
    ):
        assert number in out, number
    for cause, tokens in counts["causes"].items():
        assert (f"{tokens:,}" in out) or not tokens, cause
    lines = [line for line in out.splitlines() if "report.json" not in line]  # a path of any length
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in out, "no colours and no progress bar in a file"

    assert report["options"] == {
        "pool_tokens": 1600, "page_size": 8, "eviction_policy": "lru", "concurrency": 1,
        "accounted_tokens": None, "unlimited": False,
    }  # fmt: skip
    over_time = report["over_time"]
    assert len({len(column) for column in over_time.values()}) == 1
    assert sum(over_time["requests"]) == over_time["finished"][-1] == 120
    assert sum(over_time["hit_tokens"]) == counts["hit_tokens"]
    assert sum(over_time["evicted_tokens"]) == report["pool"]["evicted_tokens"]
    assert over_time["at"][-1] == report["seconds"] == 238
    assert {each["name"] for each in report["namespaces"]} == {"default", "second"}
    assert report["near_misses"]
    assert report["requests"]["finished"]["length"] == 120
    top = report["prefixes"][0]
    assert top["tokens_saved"] > 0
    assert top["pages"] == -(-top["tokens"] // 8)
    assert 0 <= top["idle_seconds"] <= 238


def test_an_unlimited_pool_reaches_the_ideal(
    token_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    out = run(capsys, token_trace, "--pool", "unlimited", "--json", file)
    assert "unlimited pool" in out
    assert "× 0.0156 " in out, "the curve reaches from a 64th of the pool"
    assert "× 1 " in out
    assert "twice the memory" not in out
    report = json.loads(file.read_text())
    counts = report["counts"]["since_start"]
    assert report["pool"]["evicted_tokens"] == 0
    # The ideal is known at borders of blocks, of 16 tokens in a pool of this size.
    assert counts["hit_rate"] == pytest.approx(counts["ideal_hit_rate"], abs=0.05)
    assert report["options"]["accounted_tokens"] == report["options"]["pool_tokens"] // 16


def test_options_reach_the_replay(
    token_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rate(*options: object) -> float:
        file = tmp_path / "report.json"
        run(capsys, token_trace, "--json", file, *options)
        report = json.loads(file.read_text())
        return report["counts"]["since_start"]["hit_rate"]

    assert rate("--pool", 800) < rate("--pool", 1600) < rate()
    assert rate("--pool", 1600, "--eviction-policy", "lfu") != rate("--pool", 1600)
    assert rate("--pool", 1600, "--concurrency", 8) > rate("--pool", 1600)
    assert rate("--limit", 1) == 0
    out = run(capsys, token_trace, "--limit", 1, "--policy", "slru", "--concurrency", 3)
    assert "1 request ·" in out
    assert "slru · up to 3 at once" in out


def test_another_policy_is_not_measured_by_lrus_curve(
    token_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(capsys, token_trace, "--pool", 1600, "--eviction-policy", "slru")
    out = " ".join(out.split())
    assert "With twice the memory the hit rate of lru would be" in out
    assert "the curve is that of lru, not of slru" in out


def test_mooncakes_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = tmp_path / "mooncake.jsonl", tmp_path / "report.json"
    ids = [[0, 1, 2], [0, 1, 3], [0, 1, 2, 4]]
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 1000 * number,
                    "input_length": 512 * len(blocks) - 100,
                    "output_length": 7,
                    "hash_ids": blocks,
                }
            )
            + "\n"
            for number, blocks in enumerate(ids)
        )
    )
    run(capsys, path, "--json", file)
    report = json.loads(file.read_text())
    assert report["trace"]["format"] == "mooncake"
    # The second shares two blocks, the third two and what the first had of the third block.
    assert report["counts"]["since_start"]["hit_tokens"] == 1024 + (3 * 512 - 100)
    assert report["seconds"] == 2


def test_texts_are_read_and_shown_by_the_tokenizer(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    shared = "The quick brown fox jumps over the lazy dog while the band plays on. " * 3
    tools = " ".join(f"The key is under the mat of house {7 * house}." for house in range(30))
    with path.open("w") as out:
        for number in range(12):
            day = f"Day {number}. " if number % 2 else ""
            prompt = f"{shared}{day}{tools} Question {number}"
            out.write(json.dumps({"prompt": prompt, "output": "mat"}) + "\n")
    assert "needs --tokenizer MODEL" in refused(capsys, path)
    out = run(capsys, path, "--tokenizer", checkpoint, "--pool", 4000)
    assert "The quick brown fox" in out
    near_misses = out[out.index("Near misses") : out.index("Top shared")]
    assert "requests computed" in near_misses
    assert "band plays on." in near_misses
    assert "Day 1." in near_misses


def test_malformed_lines_are_refused_with_their_numbers(
    token_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = token_trace.read_text().splitlines()
    lines[6], lines[90] = "{", '{"prompt": []}'
    token_trace.write_text("\n".join(lines))
    file = tmp_path / "report.json"
    message = refused(capsys, token_trace, "--json", file, "--html", tmp_path / "page.html")
    assert "the trace has 2 malformed lines; nothing was replayed" in message
    assert f"{token_trace}:7: not JSON" in message
    assert f"{token_trace}:91: prompt must have at least one token" in message
    assert not file.exists()
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pool", "0"), "pool must be unlimited or at least 1 token, got '0'"),
        (("--pool", "1M"), "pool must be unlimited or at least 1 token, got '1M'"),
        (("--pool", "200"), "pool must have at least 343 tokens, for the request of "),
        (("--page-size", "0"), "page_size must be an integer of at least 1, got 0"),
        (("--concurrency", "0"), "concurrency must be an integer of at least 1, got 0"),
        (("--eviction-policy", "mru"), "eviction_policy must be one of lru, "),
        (("--policy", "mru"), "eviction_policy must be one of lru, "),
        (("--format", "csv"), "format must be one of auto, mooncake, jsonl, got 'csv'"),
        (("--limit", "0"), "limit must be at least 1, got 0"),
        (("--tokenizer", "/no/such/model"), "tokenizer cannot be loaded from '/no/such/model'"),
        (("--json", "/no/such/folder/a.json"), "json must be a file in a directory that exists"),
        (("--html", "/"), "html must be a file in a directory that exists, got '/'"),
    ],
)
def test_bad_options_are_refused_by_name(
    token_trace: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert message in refused(capsys, token_trace, *options)


def test_the_trace_is_never_written_over(
    token_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = token_trace.read_bytes()
    assert "json must not be the trace" in refused(capsys, token_trace, "--json", token_trace)
    assert token_trace.read_bytes() == before


def test_one_file_does_not_take_both_reports(
    token_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report"
    for _ in range(2):  # whether it is there already or not
        options = ("--json", file, "--html", tmp_path / "." / "report")
        assert "html must not be the file of json" in refused(capsys, token_trace, *options)
        file.touch()


def test_what_cannot_be_written_is_refused_before_the_replay(
    token_trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    message = refused(capsys, token_trace, "--html", token_trace.parent / "page.html")
    assert "html must be a file that may be written" in message


def test_a_terminal_gets_a_progress_bar(token_trace: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    report = replay(console, read_trace(token_trace), ReplayOptions())
    assert report.accounts.overall.since_start.requests == 120
    assert "replaying" in out.getvalue()
    assert "120/120" in out.getvalue()


def test_what_twice_the_memory_would_bring(token_trace: Path) -> None:
    trace = read_trace(token_trace)
    console = Console(file=io.StringIO())

    def sentence(pool: int) -> str:
        return memory(replay(console, trace, ReplayOptions(pool))).sentence

    assert ", not " in sentence(1600)
    assert "would still be" in sentence(16_000)
    assert "Nothing was evicted" in sentence(1_000_000)


def test_the_json_has_the_parts_of_a_servers_report(
    token_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    run(capsys, token_trace, "--pool", 1600, "--json", file)
    report, schema = json.loads(file.read_text()), report_schema()
    assert (report["schema"], report["version"]) == ("coppice.replay", 1)
    shared = {name: part for name, part in report.items() if name not in REPLAYS_OWN}
    servers = {"model", "at", "uptime_seconds", "latency_seconds"}
    assert set(schema["properties"]) - servers - REPLAYS_OWN == set(shared)
    jsonschema.validate(shared, schema | {"required": sorted(shared)})
