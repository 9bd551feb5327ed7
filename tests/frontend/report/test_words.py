"""Times, counts and pieces of text as reports write them."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from coppice.frontend.report.words import (
    adapter_lines,
    drafts_sentence,
    duration,
    one_line,
    short_count,
    tiers_sentence,
    token_text,
    windows_sentence,
)
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.report.snapshot import WindowReport
from coppice.runtime.tiers.told import TierReport, TiersReport


def test_tokens_without_text_are_counted_or_shown_as_numbers(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the key")
    decode = token_text(tokenizer)
    assert decode(ids) == "the key"
    assert decode([*ids, 10**6, 10**6 + 1]) == "the key⟨2 tokens without text⟩"
    assert decode([10**6, *ids]) == "⟨1 token without text⟩the key"
    numbers = token_text(None)
    assert numbers([5, 6, 7]) == "5 6 7"
    assert numbers(range(7)) == "0 1 2 3 4 5 6", "one id is no longer than its count"
    assert numbers(range(100, 200)) == "100 101 102 …94… 197 198 199"


def test_short_counts_and_durations() -> None:
    counts = (0, 7, 999, 1000, 12_345, 999_499, 999_500, 3_000_000, 1_234_567_890)
    assert [short_count(count) for count in counts] == [
        "0", "7", "999", "1k", "12.3k", "999k", "1M", "3M", "1.23G",
    ]  # fmt: skip
    seconds = (0, 3.14, 59.96, 60, 125, 3600, 9000, 200_000)
    assert [duration(each) for each in seconds] == [
        "0.0 s", "3.1 s", "1 min", "1 min", "2 min 5 s", "1 h", "2 h 30 min", "2 d 7 h",
    ]  # fmt: skip
    assert [duration(each, units=1) for each in (125, 9000, 200_000)] == ["2 min", "2 h", "2 d"]
    assert duration(3605) == "1 h"


def test_unprintable_characters_are_made_visible() -> None:
    assert one_line("a\r\nb\tc\x1b[0m\u200b") == "a↵b·c·[0m·"


def test_adapters_and_windows_in_words() -> None:
    counts: dict[str, object] = {"requests": 3, "prompt_tokens": 1200, "hit_tokens": 900}
    plain = {"name": "french", "invoked": False, "base_hit_tokens": 0} | counts
    judge = {"name": "judge", "invoked": True, "base_hit_tokens": 880} | counts
    assert adapter_lines([]) is None
    lines = adapter_lines([plain, judge])
    assert lines is not None
    assert lines.splitlines() == [
        "Adapters",
        "french: 3 requests, 75.0% of 1,200 prompt tokens hit",
        "judge: 3 requests, 75.0% of 1,200 prompt tokens hit, 880 of them from the base model's "
        "cache",
    ]
    report = WindowReport(26, ((512, 22),), 600, 200, 0, 12.5, 0)
    assert windows_sentence(report) == (
        "22 of 26 layers see the last 512 tokens alone: they did not read 25.0% of their "
        "sequences' keys. Running sequences keep 12.5 pages' worth of keys that are older, for "
        "prompts that begin alike"
    )


def test_what_drafts_came_to() -> None:
    def said(**told: Any) -> str:
        stats: dict[str, Any]
        names = ("accepted_tokens", "drafted_tokens", "draft_seconds_saved", "draft_model_tokens")
        stats = {name: {} for name in names} | {"draft_model_seconds": 0.0, "tokens_a_step": 2.5}
        return drafts_sentence(SimpleNamespace(**stats | told))  # type: ignore[arg-type]

    made = {"drafted_tokens": {"text": 1200, "model": 90}, "accepted_tokens": {"text": 1000}}
    assert said(**made, draft_seconds_saved={"text": 7.25, "model": -0.25}) == (
        "1,000 of 1,290 drafted tokens were accepted (1,000 from text): 2.50 tokens a step, which "
        "saved 7.0 s"
    )
    assert said(**made, draft_seconds_saved={"text": -1.5}).endswith(
        "cost 1.5 s more than it saved"
    )
    assert said(**made, draft_seconds_saved={"text": -0.01}).endswith("saved 0.0 s")
    model = {"draft_model_tokens": {"hit": 40, "computed": 9}, "draft_model_seconds": 0.5}
    assert said(**model).startswith("0 of 0 drafted tokens were accepted: 2.50")
    assert said(**model).endswith("the draft model had 40 tokens in its tree and took 0.5 s")


def test_what_tiers_brought_back_before_anybody_asked() -> None:
    counts: dict[str, Any] = {each.name: 0 for each in fields(TierReport)}
    disk = TierReport(**(counts | {"name": "disk", "loaded_tokens": 500, "warmed_tokens": 7000}))
    sums: dict[str, Any] = {each.name: 0 for each in fields(TiersReport)}
    said = tiers_sentence(TiersReport(**(sums | {"stores": (disk,)})))
    assert "the 7,000 hottest tokens came back before anybody asked for them" in said
    quiet = tiers_sentence(TiersReport(**(sums | {"stores": (replace(disk, warmed_tokens=0),)})))
    assert "hottest" not in quiet
