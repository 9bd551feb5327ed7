"""The report in the terminal: every number is there, and it fits 80 uncoloured columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from coppice.frontend.report import excerpt, one_line, render_report
from coppice.radix import Accounting
from coppice.runtime.report import CacheReport, SharedPrefix

LETTERS = tuple(range(1000))

REPORT = CacheReport(
    requests=64,
    prompt_tokens=61_234,
    hit_tokens=52_345,
    computed_tokens=8_889,
    generated_tokens=777,
    preemptions=0,
    evicted_tokens=0,
    prefill_seconds=2.0,
    decode_seconds=1.0,
    page_size=16,
    pages_total=2_000,
    pages_free=1_500,
    pages_cached=390,
    pages_pinned=7,
    pages_held=103,
    top_prefixes=(
        SharedPrefix(LETTERS[:900], hits=63, tokens_saved=56_700),
        SharedPrefix((1, 2, 3), hits=2, tokens_saved=6),
    ),
    accounts=Accounting(32_000, now=0.0).snapshot(now=1.0),
)


def decode(token_ids: Sequence[int]) -> str:
    """Each token as its number in brackets, the first of all as a special token and two breaks."""
    return "".join("<|system|>\n\n" if token == 0 else f"[{token}]" for token in token_ids)


def printed(report: CacheReport, **options: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, **options)  # type: ignore[arg-type]
    console.print(render_report(report, decode))
    return out.getvalue()


def test_every_number_is_there() -> None:
    text = printed(REPORT)
    for number in ("64", "61,234", "52,345", "8,889", "777", "85.5%", "25.0%", "2,000", "1,500"):
        assert number in text, number
    for number in ("390", "7 pinned", "103", "900", "63", "56,700"):
        assert number in text, number
    assert f"~{52_345 * 2.0 / 8_889:.2f} s" in text
    assert "evicted" not in text
    assert "1,234" in printed(replace(REPORT, evicted_tokens=1_234, preemptions=9))


def test_it_is_plain_text_of_80_columns_in_a_file() -> None:
    text = printed(REPORT)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" in printed(REPORT, force_terminal=True, color_system="standard")


def test_prefixes_are_readable_at_both_ends() -> None:
    text = printed(REPORT)
    assert "<|system|>↵[1][2]" in text
    assert "[899]" in text
    assert "[450]" not in text
    assert "[1][2][3]" in text


def test_before_the_first_hit() -> None:
    text = printed(
        replace(
            REPORT, requests=0, prompt_tokens=0, hit_tokens=0, computed_tokens=0, top_prefixes=()
        )
    )
    assert "No prefix was hit yet." in text
    assert "0.0%" in text


def test_a_short_prefix_is_shown_whole() -> None:
    assert excerpt((0, 1, 2), decode) == "<|system|>↵[1][2]"


def test_a_long_text_of_few_tokens_is_cut_in_the_middle() -> None:
    shown = excerpt((5,) * 100, decode)
    assert " … " in shown
    assert len(shown) < 90


def test_unprintable_characters_are_made_visible() -> None:
    assert one_line("a\r\nb\tc\x1b[0m\u200b") == "a↵b·c·[0m·"


def test_a_prefix_that_saved_next_to_nothing_gets_no_row() -> None:
    small = SharedPrefix(LETTERS[:5], hits=2, tokens_saved=10)
    large = SharedPrefix(LETTERS[:900], hits=63, tokens_saved=56_700)
    both = printed(replace(REPORT, top_prefixes=(large, small)))
    assert both == printed(replace(REPORT, top_prefixes=(large,)))
    assert both != printed(replace(REPORT, top_prefixes=(small,)))
