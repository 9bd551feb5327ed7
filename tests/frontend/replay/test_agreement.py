"""A replay's report agrees with itself: numbers that stand twice are equal, claims are true."""

from __future__ import annotations

import io
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coppice.frontend.replay.encode import encode_plan, encode_replay
from coppice.frontend.replay.page import render_page
from coppice.frontend.replay.run import compared, replay
from coppice.frontend.replay.trace import read_trace
from coppice.frontend.report.terminal import render_totals
from coppice.frontend.report.words import token_text
from coppice.radix import POLICIES
from coppice.runtime.offline.replay import ReplayOptions

POOLS = (150, 400, 900, 2000, 10**6)


def random_trace(folder: Path, seed: int) -> Path:
    """Documents of very different popularity, conversations, and beginnings that differ."""
    rng = random.Random(seed)
    documents = [
        [rng.randrange(50_000) for _ in range(rng.randint(10, 100))]
        for _ in range(rng.randint(2, 12))
    ]
    path, said = folder / f"{seed}.jsonl", []
    with path.open("w") as out:
        for number in range(60):
            base = rng.choice(said[-9:]) if said and rng.random() < 0.3 else rng.choice(documents)
            start = [rng.randrange(50_000)] if rng.random() < 0.15 else []
            prompt = [*start, *base[-110:], *(rng.randrange(50_000) for _ in range(5))]
            output = [rng.randrange(50_000) for _ in range(rng.randint(0, 6))]
            said.append(prompt + output)
            line = {"prompt": prompt, "output": output, "timestamp": 5 * number}
            out.write(json.dumps(line) + "\n")
    return path


def made(path: Path, options: ReplayOptions, *, compare: bool) -> dict[str, Any]:
    console, trace = Console(file=io.StringIO()), read_trace(path)
    found = replay(console, trace, options)
    others = compared(console, trace, options) if compare and found.evicted_tokens else {}
    plan = encode_plan(trace, options, unlimited=False)
    return encode_replay(plan, found, token_text(None), others)


def shown(report: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(render_totals(report, full=True))
    return out.getvalue()


def percentages(text: str) -> list[str]:
    return re.findall(r"\d+\.\d%", text)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 8)) for seed in range(20)]
)
def test_numbers_that_stand_twice_are_equal(tmp_path: Path, seed: int) -> None:
    policy = list(POLICIES)[seed % len(POLICIES)]
    pool, compare = POOLS[seed % len(POOLS)], seed % 3 != 2
    options = ReplayOptions(pool, 1 + seed % 16, policy, 1 + seed % 3)
    report = made(random_trace(tmp_path, seed), options, compare=compare)
    counts, curve = report["counts"]["since_start"], report["curve"]
    points = curve["points"]
    size = report["pool"]["tokens"]
    (here,) = (each["hit_rate"] for each in points if each["pool_tokens"] == size)
    (twice,) = (each["hit_rate"] for each in points if each["pool_tokens"] == 2 * size)
    evicted = report["pool"]["evicted_tokens"]
    measured = {each["name"]: each["hit_rate"] for each in report["policies"]}

    # The curve goes through what is known, never falls, and stays between nothing and the ideal.
    if policy == "lru" or not evicted:
        assert here == counts["hit_rate"]
    elif measured:
        assert here == measured["lru"]
    rates = [each["hit_rate"] for each in points]
    assert all(one <= other + 1e-12 for one, other in pairwise(rates))
    assert rates[0] >= 0
    assert rates[-1] <= max(counts["ideal_hit_rate"], here, counts["hit_rate"]) + 1e-9
    if not evicted:
        assert {each["hit_rate"] for each in points if each["pool_tokens"] >= size} == {here}

    # The sentence and the note name figures of the table and of the headline, and are true of them.
    sentence, note = curve["sentence"], curve["note"]
    if evicted:
        expected = {f"{twice:.1%}", f"{here:.1%}"}
        assert set(percentages(sentence)) == expected, sentence
        assert ("still" in sentence) == (len(expected) == 1)
    else:
        assert "Nothing was evicted" in sentence
    assert percentages(note)[0] == f"{counts['hit_rate']:.1%}"
    if "above" in note:
        assert counts["hit_rate"] > here
    elif "below" in note:
        assert counts["hit_rate"] < here
    else:
        assert f"{counts['hit_rate']:.1%}" == f"{here:.1%}"

    # One denominator: hits and causes are shares of the prompt tokens.
    assert counts["hit_tokens"] + sum(counts["causes"].values()) == counts["prompt_tokens"]
    text = shown(report)
    names = "|".join(cause["name"] for cause in report["causes"].values())
    rows = re.findall(rf"^(?:{names}) +(\d+\.\d)% ", text, re.M)
    assert len(rows) == sum(1 for tokens in counts["causes"].values() if tokens)
    whole = 100 * counts["hit_rate"] + sum(map(float, rows))
    assert whole == pytest.approx(100, abs=0.05 * (len(rows) + 1))

    # Terminal and page have the same.
    page = re.sub(r"<script.*?</script>", "", render_page(report), flags=re.S)
    flat = " ".join(text.split())
    assert f"hit rate {counts['hit_rate']:.1%}" in flat
    assert f'<b id="tile-hit_rate">{counts["hit_rate"]:.1%}</b>' in page
    assert not evicted or sentence in flat
    assert sentence in page
    assert note in flat
    assert note in page
    for each in report["present"]["advice"]:
        assert f"{each['title']}. {each['text']}" in flat or each not in advised(report)
        assert each["title"] in page
    for point in points:
        assert f"<td>{point['pool_tokens']:,}</td><td>{point['hit_rate']:.1%}</td>" in page
    for row in re.findall(r"× (\S+) +(\d+\.\d%)", text):
        at = [p for p in points if f"{p['pool_tokens'] / size:.3g}" == row[0]]
        assert f"{at[0]['hit_rate']:.1%}" == row[1]

    # The policies were measured: the chosen one's figure is the headline's, the best one is named.
    if measured:
        assert set(measured) == set(POLICIES)
        assert measured[policy] == counts["hit_rate"]
        best = max(measured.values())
        named = [each for each in report["present"]["advice"] if "Evict by" in each["title"]]
        worth = best - counts["hit_rate"] >= 0.005 and counts["causes"]["evicted"] > 0
        assert bool(named) == worth
        for each in named:
            assert percentages(each["text"]) == [f"{best:.1%}", f"{counts['hit_rate']:.1%}"]
    else:
        assert not compare or not evicted


def advised(report: dict[str, Any]) -> list[Any]:
    """The advice that a terminal has room for."""
    return report["present"]["advice"][:3]


def test_other_policies_hit_what_their_own_replays_hit(tmp_path: Path) -> None:
    path = random_trace(tmp_path, 4)
    rates = compared(Console(file=io.StringIO()), read_trace(path), ReplayOptions(400, 4))
    assert set(rates) == set(POLICIES) - {"lru"}
    for policy, rate in rates.items():
        report = made(path, ReplayOptions(400, 4, policy), compare=False)
        assert rate == report["counts"]["since_start"]["hit_rate"], policy
        assert report["policies"] == []


def test_an_estimate_of_twice_the_pool_is_near_what_it_hits(tmp_path: Path) -> None:
    errors = []
    for seed in range(12):
        path = random_trace(tmp_path, seed)
        report = made(path, ReplayOptions(400, 4), compare=False)
        point = next(p for p in report["curve"]["points"] if p["pool_tokens"] == 800)
        twice = made(path, ReplayOptions(800, 4), compare=False)
        errors.append(abs(point["hit_rate"] - twice["counts"]["since_start"]["hit_rate"]))
    assert sum(errors) / len(errors) < 0.02
    assert max(errors) < 0.08


def test_token_ids_are_folded(tmp_path: Path) -> None:
    """Of a long list three ids are left at either end, whole, and the count of the others."""
    report = made(random_trace(tmp_path, 1), ReplayOptions(900, 4), compare=False)
    text, page = shown(report), render_page(report)
    body = page[: page.index("<script>")]
    for written in (text, re.sub(r"<[^>]+>", "\n", body)):
        lists = re.findall(r"(?:\b\d{3,5} ){6,}", written)
        assert lists == []
    assert re.search(r"(\d+ ){3}…\d+…( \d+){3}", text)
    known = {str(each) for line in (tmp_path / "1.jsonl").read_text().splitlines()
             for each in json.loads(line)["prompt"] + json.loads(line)["output"]}  # fmt: skip
    table = text[text.index("Top shared prefixes") :]
    rows = [row.split("  ")[-1] for row in table.splitlines() if "…" in row]
    rows = [row for row in rows if "beginning" not in row]
    assert rows
    for row in rows:
        ids = [each for each in row.replace("…", " ").split() if len(each) > 2]
        assert set(ids) <= known, row
