"""The report in the terminal: every number is there, and it fits 80 columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console

from coppice.frontend.report.encode import Names, encode
from coppice.frontend.report.terminal import render_totals
from coppice.frontend.report.widgets import replica_table
from coppice.frontend.report.words import excerpt
from coppice.radix import Accounting, CacheAccounts
from coppice.radix.accounting.counts import Windows
from coppice.radix.accounting.miss_ratio import FACTORS, CurvePoint
from coppice.radix.accounting.near_misses import Difference
from coppice.runtime.report.snapshot import (
    AdapterReport,
    CacheReport,
    Counts,
    Histogram,
    NearMiss,
    ReplicaReport,
    SharedPrefix,
    TreeReport,
    WindowReport,
)

LETTERS = tuple(range(1000))


def shared(tokens: int, hits: int, saved: int) -> SharedPrefix:
    return SharedPrefix(np.arange(tokens, dtype=np.int32).tobytes(), hits, saved)


def counted(counts: Counts) -> CacheAccounts:
    """Accounts of these counts, with no curve and no near misses."""
    empty = Accounting(32_000, now=0.0).snapshot(now=1.0)
    return replace(empty, overall=replace(empty.overall, since_start=counts))


HITS = Counts(requests=64, prompt_tokens=61_234, hit_tokens=52_345, cold=8_889, ideal_tokens=55_000)
LARGE, SMALL = shared(900, 63, 56_700), shared(3, 2, 600)
REPORT = CacheReport(
    requests=64,
    prompt_tokens=61_234,
    hit_tokens=52_345,
    computed_tokens=8_889,
    generated_tokens=777,
    counts=HITS,
    preemptions=0,
    rounded_off_tokens=0,
    evicted_tokens=0,
    eviction_age=Histogram((), (), 0.0),
    prefill_seconds=2.0,
    decode_seconds=1.0,
    page_size=16,
    pages_total=2_000,
    pages_free=1_500,
    pages_cached=390,
    pages_pinned=7,
    pages_held=103,
    eviction_policy="lru",
    accounts=counted(HITS),
    tree=TreeReport((LARGE, SMALL), ()),
)


def decode(token_ids: Sequence[int]) -> str:
    """Each token as its number in brackets; token 0 as a special token and two line breaks."""
    return "".join("<|system|>\n\n" if token == 0 else f"[{token}]" for token in token_ids)


def printed(report: CacheReport, *, full: bool = False, **options: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, **options)  # type: ignore[arg-type]
    console.print(render_totals(encode(report, Names(decode)), full=full))
    return out.getvalue()


def test_every_number_is_there() -> None:
    text = printed(REPORT)
    for number in ("64", "61,234", "52,345", "8,889", "777", "85.5%", "25.0%", "2,000", "1,500"):
        assert number in text, number
    for number in ("390", "7 pinned", "103", "900", "63", "56,700", "89.8%"):
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


def test_before_the_first_hit() -> None:
    text = printed(replace(REPORT, accounts=counted(Counts()), tree=None))
    assert "No prefix was hit yet." in text
    assert "0.0%" in text


def piece(tokens: int) -> str:
    """What is shown of a prefix of this length."""
    report = replace(REPORT, tree=TreeReport((shared(tokens, 2, 9),), ()))
    return excerpt(encode(report, Names(decode))["prefixes"][0])


def test_a_short_prefix_is_shown_whole() -> None:
    assert piece(3) == "<|system|>↵[1][2]"


def test_a_long_text_is_cut_in_the_middle() -> None:
    for tokens in (40, 60, 100, 1000):  # with one end, two that touch, two with a gap
        assert piece(tokens).startswith("<|system|>↵[1]")
        assert piece(tokens).endswith(f"[{tokens - 1}]")
        assert " … " in piece(tokens)
        assert len(piece(tokens)) <= 43


def test_hidden_texts_are_shown_as_hashes() -> None:
    (prefix, _) = encode(REPORT, Names(None))["prefixes"]
    assert excerpt(prefix) == f"#{prefix['first']['hash']} … #{prefix['last']['hash']}"


def test_a_prefix_that_saved_next_to_nothing_gets_no_row() -> None:
    tiny = shared(5, 2, 10)

    def rows(*prefixes: SharedPrefix) -> str:
        return printed(replace(REPORT, tree=TreeReport(prefixes, ())))

    assert rows(LARGE, tiny) == rows(LARGE) != rows(tiny)


# -- why tokens missed -------------------------------------------------------------------------

COUNTS = Counts(
    requests=10,
    prompt_tokens=200_000_000,
    hit_tokens=96_000_000,
    last_token=1,
    in_flight=999,
    prompt_logprobs=90_000,
    evicted=60_000_000,
    namespace=3_000_000,
    diverged=999_000,
    cold=39_910_000,
    ideal_tokens=150_000_000,
    evicted_idle=60_000_000 * 125,
)
NEAR = NearMiss(None, 37, 1_234_567, 900, LETTERS[:48], (Difference((7, 8), ()),) * 3, 33, (500,))
ACCOUNTS = CacheAccounts(
    seconds=60.0,
    pool_tokens=4_000_000,
    overall=Windows(Counts(), Counts(), COUNTS),
    namespaces={},
    other_namespaces=Windows(Counts(), Counts(), Counts()),
    curve=tuple(
        CurvePoint(factor, round(factor * 4e6), 0.45 + 0.1299 * (factor >= 2)) for factor in FACTORS
    ),
    near_misses=(NEAR,) * 5,
)


def full_report(accounts: CacheAccounts, policy: str = "lru") -> str:
    report = replace(REPORT, accounts=accounts, eviction_policy=policy, evicted_tokens=1)
    text = printed(replace(report, page_size=2000), full=True)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    return text


def test_adapters_and_windows_are_reported() -> None:
    windows = WindowReport(2, ((11, 1),), 9, 1, 64, 1.0, 512)
    adapter = AdapterReport("judge", "judge@12", True, False, 3, 100, 90, 80, 70)
    report = replace(REPORT, windows=windows, adapters=(adapter,))
    assert encode(report, Names(None))["windows"]["windows"] == [{"tokens": 11, "layers": 1}]
    shown = " ".join(printed(report).split())
    assert "judge: 3 requests, 90.0% of 100 prompt tokens hit, 70 of them from" in shown
    assert "1 of 2 layers see the last 11 tokens alone: they did not read 10.0%" in shown
    assert "Adapters" not in printed(REPORT)
    assert "layers" not in printed(REPORT)


def test_replicas_have_a_table_where_there_are_any() -> None:
    one = ReplicaReport("r0", 9, 12_345, 6_000, 1_234, 7, 2, 3, 100, 40, 50, 4, 6, None)
    replicas = (one, replace(one, name="a-much-longer-name-of-a-replica" * 3, prompt_tokens=0))
    encoded = encode(replace(REPORT, replicas=replicas), Names(None))["replicas"]
    assert encoded[0]["pages"] == {"total": 100, "free": 40, "cached": 50, "pinned": 4, "held": 6}
    for width in (44, 60, 76, 80):
        out = io.StringIO()
        Console(file=out, width=width).print(replica_table(encoded, width))
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        (row,) = (line.split() for line in lines if "r0" in line)
        wide = ["r0", "9", "12.3k", "48.6%", "10.0%", "2", "3", "60%"]
        assert row == (wide if width >= 76 else ["r0", "12.3k", "48.6%", "2", "3"])
    assert replica_table(encode(REPORT, Names(None))["replicas"], 80) is None


def test_tokens_that_another_replica_holds_are_told_and_advised_on() -> None:
    counts = replace(COUNTS, cold=19_910_000, other_replica=20_000_000)
    text = full_report(replace(ACCOUNTS, overall=replace(ACCOUNTS.overall, since_start=counts)))
    assert "elsewhere" in text and "cached on another replica" in text
    told = " ".join(text.split())
    assert "10.0% of the prompt tokens were computed though another replica holds them" in told
    assert "elsewhere" not in full_report(ACCOUNTS)


def test_rates_and_causes() -> None:
    text = full_report(ACCOUNTS)
    for number in ("48.0%", "75.0%", "60,000,000", "30.0%", "20.0%", "3,000,000", "999,000"):
        assert number in text, number
    assert "was cached; idle for 2 min 5 s" in text
    order = ["evicted", "cold", "namespace", "diverged", "logprobs", "in flight", "last token"]
    places = [text.index(f"\n{name} ") for name in order]
    assert places == sorted(places), "the largest first"
    lines = text.splitlines()
    assert len([line for line in lines if "█" in line or "░" in line]) == 3 + 7 + 7


def test_the_curve_in_a_sentence() -> None:
    assert "With twice the memory your hit rate would be 59.7%, not 48.0%." in full_report(ACCOUNTS)
    flat = tuple(replace(point, hit_rate=0.4) for point in ACCOUNTS.curve)
    assert "would still be 48.0%." in full_report(replace(ACCOUNTS, curve=flat))
    other = " ".join(full_report(ACCOUNTS, "slru").split())
    assert "the hit rate of lru would be 58.0%, not 45.0%: the curve is that of lru" in other
    steep = tuple(replace(p, hit_rate=p.hit_rate * 2 - 0.45) for p in ACCOUNTS.curve)
    assert "would be 71.4%, not" in full_report(replace(ACCOUNTS, curve=steep))
    steeper = tuple(replace(p, hit_rate=p.hit_rate * 3 - 0.9) for p in ACCOUNTS.curve)
    assert "would be 75.0%, not" in full_report(replace(ACCOUNTS, curve=steeper)), (
        "at most the ideal"
    )


def test_near_misses_show_both_sides() -> None:
    text = full_report(ACCOUNTS)
    assert (
        text.count("37 requests computed 1,234,567 tokens again, since they differ after 900") == 3
    )
    assert "and others that cost 2,469,134 tokens" in text
    lines = [line.split() for line in text.splitlines()]
    assert lines.count(["here", "[7][8]"]) == 3 * 2, "two examples each"
    assert ["there", "(nothing,", "or", "no", "longer", "cached)"] in lines
    assert ["after", "[500]", "…"] in lines
    assert "[47]" in text, "the end of what is shared, not its beginning"


def test_accounts_of_nothing() -> None:
    text = full_report(Accounting(32_000, now=0.0).snapshot(now=1.0))
    assert "No prompt token was computed yet." in text
    assert "No near misses" in text
    assert "twice the memory" not in text


def test_figures_of_another_span_than_the_headlines_name_it() -> None:
    """The headline is of ten minutes; the curve and the near misses are since the start."""
    recent = replace(COUNTS, requests=3, hit_tokens=2_000_000, evicted=154_000_000)
    report = replace(REPORT, accounts=ACCOUNTS, evicted_tokens=1, page_size=2000)
    for window, span in (("since_start", ""), ("last_ten_minutes", " since the start")):
        accounts = replace(ACCOUNTS, overall=Windows(recent, recent, COUNTS))
        made = encode(replace(report, accounts=accounts), Names(decode), window=window)
        headline = made["counts"][window]["hit_rate"]
        assert made["present"]["hit_rate"] == headline
        assert f"your hit rate{span} would be 59.7%, not 48.0%." in made["curve"]["sentence"]
        advised = {each["cause"]: each for each in made["present"]["advice"]}
        assert f"hit rate{span} would be 59.7%, not 48.0%." in advised["evicted"]["text"]
        assert made["curve"]["note"].endswith("the 48.0% that were achieved.")
        for each in made["present"]["advice"]:
            assert each["tokens"] == made["counts"][window]["causes"][each["cause"]]
    more = replace(accounts, overall=Windows(recent, recent, replace(COUNTS, diverged=10**8)))
    many = replace(recent, diverged=10**8)
    more = replace(more, overall=replace(more.overall, last_ten_minutes=many))
    made = encode(replace(report, accounts=more), Names(decode), window="last_ten_minutes")
    (text,) = (e["text"] for e in made["present"]["advice"] if e["cause"] == "diverged")
    assert text.startswith("The costliest case since the start: 37 requests")
