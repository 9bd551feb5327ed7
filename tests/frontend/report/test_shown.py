"""A report that renders itself: printed, by rich, in a notebook, and after a pickle."""

from __future__ import annotations

import html
import io
import pickle
import re
from pathlib import Path

import pytest
from rich.console import Console

from coppice import LLM, CacheReport, SamplingParams
from coppice.frontend.commands.main import main

PROMPT = "The quick brown fox jumps over the lazy dog while the band plays on. <b>&amp; "


@pytest.fixture(scope="module")
def report(checkpoint: Path) -> CacheReport:
    llm = LLM(str(checkpoint), kv_cache_tokens=1024)
    llm.generate([PROMPT + each for each in "abc"], SamplingParams(max_tokens=2), use_tqdm=False)
    return llm.cache_report()


def test_it_is_a_report_with_a_short_repr(report: CacheReport) -> None:
    assert isinstance(report, CacheReport)
    assert report.requests == 3
    assert report.hit_tokens > 0
    assert len(repr(report)) < 100
    assert f"{report.hit_tokens} of {report.prompt_tokens} prompt tokens" in repr(report)


def test_printed_it_is_the_table_of_generate(
    report: CacheReport, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(report)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    for piece in (f"{report.hit_rate:.1%}", "Top shared prefixes", "The quick brown fox"):
        assert piece in text
    prompts = tmp_path / "prompts"
    prompts.write_text("".join(f"{PROMPT}{each}\n" for each in "abc"))
    options = ["--prompts-file", str(prompts), "--max-tokens", "2", "--kv-cache-tokens", "1024"]
    assert main(["generate", str(checkpoint), "--report", *options]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in text.splitlines() if not re.search("time saved|idle|fox", line)]
    lines = [line.rstrip() for line in printed.splitlines()]
    assert [row for row in rows if row not in lines] == []


def test_rich_prints_it_in_colours(report: CacheReport) -> None:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, color_system="standard").print(report)
    assert "\x1b[" in out.getvalue()


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_in_a_notebook_it_is_html_for_light_and_dark(report: CacheReport) -> None:
    page = report._repr_html_()  # type: ignore[attr-defined]
    text = html.unescape(re.sub("<[^>]*>", "", page))
    assert [line.rstrip() for line in text.rstrip().splitlines()] == str(report).splitlines()
    assert set(re.findall(r"<(\w+)", page)) == {"pre", "span"}, "text of prompts is escaped"
    assert "background" not in page
    colours = set(re.findall(r"color: (#[0-9a-f]{6})", page))
    assert len(colours) > 3
    for colour in colours:
        on_white, on_black = 1.05 / (luminance(colour) + 0.05), (luminance(colour) + 0.05) / 0.05
        assert min(on_white, on_black) >= 3, colour


def test_pickled_it_is_plain(report: CacheReport) -> None:
    again = pickle.loads(pickle.dumps(report))
    assert type(again) is CacheReport
    assert again.top_prefixes == report.top_prefixes
    assert repr(again) == repr(report)
