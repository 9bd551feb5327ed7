"""The page of a replay: one HTML file, which loads no other and opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from coppice.frontend.replay.charts import (
    cause_chart,
    cause_colour,
    curve_chart,
    prefix_chart,
    rate_chart,
    saved_by_tree,
)
from coppice.frontend.replay.encode import describe
from coppice.frontend.replay.shell import fill, table
from coppice.frontend.report.words import (
    Report,
    duration,
    excerpt,
    ordered_causes,
    short_count,
    tier_row_name,
    worth_showing,
)

_TEMPLATE = Path(__file__).with_name("page.html")


def render_page(report: Report) -> str:
    """The whole page of a replay, from its JSON. All text of the trace is escaped."""
    counts, nodes, points = (
        report["counts"]["since_start"],
        report["tree"],
        report["curve"]["points"],
    )
    charts = {"rate": rate_chart(report["over_time"]), "cause": cause_chart(report)}
    if points:
        charts["curve"] = curve_chart(report)
    if nodes:
        charts["prefix"] = prefix_chart(nodes)
    parts = {
        "title": escape(f"Replay of {report['trace']['file']}"),
        "subtitle": escape(describe(report)),
        "tiles": _tiles(report),
        "memory": escape(
            "The pool held everything: a larger one would not hit more."
            if report["options"]["unlimited"]
            else report["curve"]["sentence"] or "There is no curve yet."
        ),
        "curve_note": escape(report["curve"]["note"]),
        "advice": _advice(report),
        "policy_table": _policy_table(report["policies"]),
        "tier_sizes": _tier_sizes(report.get("tier_sizes")),
        "curve_table": table(
            ("tokens in the cache", "hit rate"),
            ((f"{point['pool_tokens']:,}", f"{point['hit_rate']:.1%}") for point in points),
        ),
        "rate_table": _rate_table(report["over_time"]),
        "cause_list": _cause_list(report),
        "still_there": f"{min(saved_by_tree(nodes), counts['hit_tokens']):,}",
        "hit_tokens": f"{counts['hit_tokens']:,}",
        "prefix_table": _prefix_table(report["prefixes"]),
        "near_misses": _near_misses(report["near_misses"]),
        "version": escape(report["coppice"]),
    }
    return fill(_TEMPLATE, parts, charts)


# -- parts -------------------------------------------------------------------------------------


def _tiles(report: Report) -> str:
    counts, pool = report["counts"]["since_start"], report["pool"]
    used = 1 - pool["pages"]["free"] / pool["pages"]["total"]
    note = "none was wanted again" if pool["evicted_tokens"] else ""
    if counts["causes"]["evicted"]:
        note = f"wanted again after {duration(counts['evicted_idle_seconds'])}"
    size = _short(report["options"]["pool_tokens"])
    tiles = [
        ("hit_rate", "hit rate", f"{counts['hit_rate']:.1%}", "of prompt tokens were in the cache"),
        ("ideal", "ideal hit rate", f"{counts['ideal_hit_rate']:.1%}", "of an unlimited cache"),
        ("saved", "tokens saved", _short(counts["hit_tokens"]), f"of {counts['prompt_tokens']:,}"),
        ("requests", "requests", f"{counts['requests']:,}", _over(report["seconds"])),
        ("evicted", "tokens evicted", _short(pool["evicted_tokens"]), note),
        (
            "pool",
            "pool",
            "unlimited" if report["options"]["unlimited"] else size,
            f"tokens, {used:.0%} in use at the end",
        ),
    ]
    if preemptions := report["requests"]["preemptions"]:
        tiles.append(("preemptions", "preemptions", f"{preemptions:,}", "sequences had to resume"))
    return "\n".join(
        f'<div class="tile"><dt>{name}</dt><dd><b id="tile-{key}">{value}</b>'
        f"<small>{escape(note)}</small></dd></div>"
        for key, name, value, note in tiles
    )


def _over(seconds: float) -> str:
    return f"over {duration(seconds)}" if seconds else "all at one time"


def _short(count: int) -> str:
    """A short count as HTML, with the exact one as its title."""
    return f'<data value="{count}" title="{count:,}">{short_count(count)}</data>'


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"


def _cause_list(report: Report) -> str:
    rows, counts = [], report["counts"]["since_start"]
    for cause, tokens in ordered_causes(counts):
        share, words = tokens / counts["prompt_tokens"], report["causes"][cause]
        rows.append(
            f'<li style="--colour:{cause_colour(cause)}"><span class="name">{words["name"]}'
            f'</span><span class="share">{share:.1%}</span>'
            f'<span class="bar" aria-hidden="true"><i style="width:{share:.2%}"></i></span>'
            f'<span class="note">{_tokens(tokens)}: {escape(words["meaning"])}</span>'
            "</li>"
        )
    return f'<ul class="causes">{"".join(rows)}</ul>' if rows else "<p>No token was computed.</p>"


def _advice(report: Report) -> str:
    """The advice of the report as a list, in the words of the page of a server."""
    whole = report["counts"]["since_start"]["prompt_tokens"]
    rows = [
        f'<li style="--colour:{cause_colour(each["cause"])}"><b>{escape(each["title"])}</b> '
        f'<span class="note">{each["tokens"] / whole:.1%} of prompt tokens</span>'
        f"<p>{escape(each['text'])}</p></li>"
        for each in report["present"]["advice"]
    ]
    if not rows:
        return '<p class="empty">Nothing: no cause costs enough to be worth it.</p>'
    return f'<ol class="advice">{"".join(rows)}</ol>'


def _policy_table(policies: Sequence[Report]) -> str:
    if not policies:
        return ""
    rows = (
        (each["name"] + (" (this replay)" if each["chosen"] else ""), f"{each['hit_rate']:.1%}")
        for each in policies
    )
    made = table(("eviction policy", "hit rate on the same requests"), rows)
    return f'<div id="policies">{made}</div>'


def _tier_sizes(sizes: Report | None) -> str:
    """What was hit with each combination of tiers, and which to buy; "" without any."""
    if sizes is None:
        return ""
    rows = (
        (
            tier_row_name(row, sizes["token_bytes"]) + (" (this replay)" if row["chosen"] else ""),
            f"{row['hit_rate']:.1%}",
            "–" if row["saved_seconds"] is None else duration(row["saved_seconds"]),
        )
        for row in sizes["rows"]
    )
    made = table(("tiers beyond the pool", "hit rate on the same requests", "time saved"), rows)
    return (
        f'<div id="tier-sizes"><h3>Tiers</h3><p class="say">{escape(sizes["advice"])}</p>{made}'
        f'<p class="hint">{escape(sizes["note"])}</p></div>'
    )


def _rate_table(over_time: Report) -> str:
    names = ("at", "requests", "prompt_tokens", "hit_tokens", "ideal_tokens", "evicted_tokens")
    rows = (
        (
            duration(at),
            f"{requests:,}",
            f"{hit / prompt:.1%}",
            f"{ideal / prompt:.1%}",
            f"{evicted:,}",
        )
        for at, requests, prompt, hit, ideal, evicted in zip(
            *(over_time[name] for name in names), strict=True
        )
    )
    return table(("until", "requests", "hit rate", "ideal", "tokens evicted"), rows)


def _prefix_table(prefixes: Sequence[Report]) -> str:
    if not prefixes:
        return '<p class="empty">No prefix that is still cached was hit.</p>'
    rows = (
        (
            f"{prefix['tokens']:,}",
            f"{prefix['hits']:,}",
            f"{prefix['tokens_saved']:,}",
            f"{prefix['pages']:,}",
            "–" if prefix["idle_seconds"] is None else duration(prefix["idle_seconds"]),
            escape(excerpt(prefix)),
        )
        for prefix in worth_showing(prefixes)
    )
    return table(
        ("tokens", "hits", "tokens saved", "pages", "idle", "beginning … end"), rows, escaped=True
    )


def _near_misses(groups: Sequence[Report]) -> str:
    if not groups:
        return '<p class="empty">None: no known text came after another beginning.</p>'
    shown, rest = list(map(_near_miss, groups[:3])), list(map(_near_miss, groups[3:]))
    return "\n".join(shown) + _folded(f"{len(rest)} more that cost less", "\n".join(rest))


def _folded(summary: str, content: str) -> str:
    """Content that a click unfolds; "" if there is none."""
    return f"<details><summary>{summary}</summary>{content}</details>" if content else ""


def _near_miss(group: Report) -> str:
    sides = []
    for example in group["differences"]:
        ours, theirs = escape(example["ours"]["text"]), escape(example["theirs"]["text"])
        sides.append(
            f'<div class="side ours"><span>this prompt</span><del>{ours or "(nothing)"}</del></div>'
            '<div class="side theirs"><span>in the cache</span>'
            f"<ins>{theirs or '(nothing, or no longer cached)'}</ins></div>"
        )
    requests = f"{group['requests']:,} request{'s' * (group['requests'] != 1)}"
    before = ""
    if group["before"]["tokens"]:
        before = f'<p class="shared">… {escape(group["before"]["text"])}</p>'
    named = group["namespace"] != "default"
    namespace = f" in namespace {escape(group['namespace'])}" if named else ""
    return (
        f'<article class="near"><h3>{requests} computed '
        f"{group['tokens_cost']:,} known tokens again{namespace}</h3>"
        f'<p class="note">The prompts differ after {_tokens(group["position"])}; about '
        f"{_tokens(group['tokens_after'])} of each follow that are known.</p>"
        f'{before}<div class="sides">{sides[0] if sides else ""}'
        f"{_folded(f'{len(sides) - 1} more of these differences', ''.join(sides[1:]))}</div>"
        f'<p class="shared">{escape(group["after"]["text"])} …</p></article>'
    )
