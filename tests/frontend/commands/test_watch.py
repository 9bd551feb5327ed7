"""`coppice report`: from a server, from a file, live, and its errors."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from coppice.frontend.commands import watch
from coppice.frontend.commands.keys import pressed
from coppice.frontend.commands.main import main
from coppice.frontend.commands.watch import ReportUnavailable, Window, fetch, report_url, run
from coppice.frontend.report.terminal import render_live

TEXT = " ".join(f"The key is under the mat of house {7 * number}." for number in range(14))


@pytest.fixture(scope="module")
def url(served: Callable[..., str], checkpoint: Path) -> str:
    url = served("--report-text")
    for number in range(4):
        for prompt in (f"Day {number} {TEXT}", f"{TEXT} Where is {number}?"):
            body = {"model": str(checkpoint), "prompt": prompt, "max_tokens": 3}
            assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200
    return url


def printed(report: Any, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=80, **options).print(render_live(report))
    return out.getvalue()


def test_the_numbers_of_a_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", url]) == 0
    text = capsys.readouterr().out
    report = fetch(url + "/cache/report", None)
    counts = report["counts"][report["present"]["window"]]
    assert f"{counts['hit_rate']:.1%} of prompt tokens came from the cache" in text
    assert f"{counts['hit_tokens']:,} of {counts['prompt_tokens']:,} tokens" in text
    for cause, tokens in counts["causes"].items():
        assert not tokens or report["causes"][cause]["meaning"][:20] in text, cause
    assert "Near misses" in text
    assert "The key is under the mat" in text
    assert "Put what differs after what is shared." in text


def test_it_fits_80_uncoloured_columns(url: str) -> None:
    report = fetch(url + "/cache/report", None)
    text = printed(report)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" in printed(report, force_terminal=True, color_system="standard")


def test_replicas_are_listed_where_there_are_any(url: str) -> None:
    report = fetch(url + "/cache/report", None)
    assert ("Replicas" in printed(report)) == bool(report["replicas"])
    keys = ("requests", "running", "waiting", "prompt_tokens", "hit_tokens", "generated_tokens")
    counts = dict.fromkeys(keys, 3) | {"hit_rate": 1.0, "other_replica_tokens": 0}
    pages = {"total": 4, "free": 1, "cached": 3, "pinned": 0, "held": 0}
    rows = [{"name": name, **counts, "pages": pages} for name in ("r0", "r1")]
    text = printed(report | {"replicas": rows})
    assert "Replicas" in text and "r1" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_tiers_gave_over_time_has_a_line_each(url: str) -> None:
    report = fetch(url + "/cache/report", None)
    assert "loaded from" not in printed(report)
    past = {"prompt_tokens": [100, 0, 100, 100], "hit_tokens": [90, 0, 90, 100]}
    past |= {"loaded_host": [0, 0, 0, 0], "loaded_disk": [0, 0, 45, 100]}
    told = report | {"over_time": report["over_time"] | {"ten_minutes": past}}
    lines = printed(told).splitlines()
    at = next(number for number, line in enumerate(lines) if "hit rate, ten minutes" in line)
    assert lines[at] == "█ ██  hit rate, ten minutes"
    assert lines[at + 1] == "▁ ▄█  loaded from disk", "at the same times"
    assert "loaded from host" not in printed(told), "nothing came from it"
    for width in (30, 79):
        out = io.StringIO()
        long = {name: 60 * column for name, column in past.items()}
        told["over_time"]["ten_minutes"] = long
        Console(file=out, width=width).print(render_live(told, width=width))
        (line,) = (line for line in out.getvalue().splitlines() if "loaded from disk" in line)
        assert len(line) <= width


def test_a_saved_report_reads_like_the_servers(url: str, tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    saved.write_bytes(httpx.get(url + "/cache/report").content)
    out = io.StringIO()
    run(Console(file=out, width=80), str(saved), interval=2, once=False, api_key=None)
    assert out.getvalue() == printed(json.loads(saved.read_text()))


def test_an_empty_server(url: str) -> None:
    report = fetch(url + "/cache/report", None)
    nothing = dict.fromkeys(report["counts"]["since_start"]["causes"], 0)
    counts = report["counts"]["since_start"] | {"prompt_tokens": 0, "causes": nothing}
    quiet = report | {"present": report["present"] | {"window": "since_start", "advice": []}}
    quiet |= {"counts": {"since_start": counts}, "near_misses": [], "prefixes": []}
    assert "No prompt has come since the server started." in printed(quiet)


def test_live_it_fetches_again_and_reports_a_missing_answer(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Exception):
        pass

    answers = [fetch(url + "/cache/report", None) for _ in range(2)]
    waits: list[float] = []

    def answer(url: str, key: str | None) -> Any:
        if not answers:
            raise ReportUnavailable("it stopped")
        return answers.pop()

    def wait(seconds: float) -> list[str]:
        waits.append(seconds)
        if len(waits) == 3:
            raise Interrupted
        return []

    monkeypatch.setattr(watch, "fetch", answer)
    out = io.StringIO()
    console = Console(file=out, width=80, height=60, force_terminal=True)
    with pytest.raises(Interrupted):
        run(console, url, interval=7, once=False, api_key=None, wait=wait)
    assert all(0 <= seconds <= 7 for seconds in waits)
    assert answers == []
    assert out.getvalue().count("it stopped; shown is the last answer") >= 1


@pytest.mark.parametrize("width", [30, 44, 60, 79])
def test_numbers_are_whole_in_narrow_windows(url: str, width: int) -> None:
    report = fetch(url + "/cache/report", None)
    out = io.StringIO()
    Console(file=out, width=width).print(render_live(report, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    counts = report["counts"][report["present"]["window"]]
    for cause, tokens in counts["causes"].items():
        if tokens:
            share = tokens / counts["prompt_tokens"]
            row = f"{report['causes'][cause]['name']} +{share:.1%} +{tokens:,}"
            assert any(re.match(row, line) for line in lines), row
    assert sum("█" in line and "▓" in line for line in lines) == 1, "bars are not broken"


def test_a_window_is_moved_like_a_pagers(url: str) -> None:
    report = fetch(url + "/cache/report", None)
    whole = printed(report).rstrip("\n").split("\n")
    window = Window(report, with_keys=True)

    def shown(*keys: str) -> tuple[list[str], str]:
        for key in keys:
            window.press(key)
        out = io.StringIO()
        Console(file=out, width=80, height=11).print(window)
        *lines, last = out.getvalue().rstrip("\n").split("\n")
        assert len(lines) == 10
        return lines, last

    below = len(whole) - 10
    assert shown() == (whole[:10], f"{below} more lines below · arrows, space and b move · q ends")
    assert shown("up")[0] == whole[:10]
    assert shown("down", "down")[0] == whole[2:12]
    assert shown("page down")[0] == whole[12:22]
    assert shown("page up", "up")[0] == whole[1:11]
    assert shown("end", "down") == (whole[-10:], "arrows, space and b move · q ends")
    assert shown("home")[0] == whole[:10]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudoterminal")
def test_keys_of_a_terminal(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    import pty
    import termios

    ours, theirs = pty.openpty()
    with open(theirs, "rb", buffering=0) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(theirs)
        with pressed() as wait:
            assert wait is not None
            assert wait(0) == []
            os.write(ours, b"j\x1b[A\x1bOB x\x1b[5~")
            assert wait(10) == ["down", "up", "down", "page down", "page up"]
        assert termios.tcgetattr(theirs) == before
        left = threading.Event()

        def leave() -> None:  # keys that come before the command listens are dropped
            while not left.wait(0.1):
                os.write(ours, b"q")

        thread = threading.Thread(target=leave)
        thread.start()
        console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
        run(console, url, interval=30, once=False, api_key=None)
        left.set()
        thread.join()
    os.close(ours)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pressed() as wait:
        assert wait is None


def test_where_the_report_of_a_server_is() -> None:
    for source in ("", "/", "/cache", "/cache/", "/cache/report"):
        assert report_url("http://host:1" + source) == "http://host:1/cache/report"
    assert report_url("https://host/prefix/") == "https://host/prefix/cache/report"
    with pytest.raises(ValueError, match="source must be a file or the URL of a server"):
        report_url("http://")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "is no report of a server's cache"),
        ('{"schema": "other"}', "is no report of a server's cache"),
        ('{"schema": "coppice.cache-report", "version": 2}', "has version 2, this command knows 1"),
        ('{"schema": "coppice.cache-report", "version": 1}', "lacks "),
    ],
)
def test_a_file_that_is_not_a_report(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    if content is not None:
        saved.write_text(content)
    assert main(["report", str(saved)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_without_a_report(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", url + "/elsewhere"]) == 1
    assert "answered 404: GET /elsewhere/cache/report: Not Found" in capsys.readouterr().err
    assert main(["report", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["report", "localhost:8000"]) == 2
    assert "a server's URL begins with http://" in capsys.readouterr().err
    assert main(["report", url, "--interval", "0"]) == 2
    assert "interval must be more than 0 seconds" in capsys.readouterr().err
