"""The page of a replay: one HTML file that needs nothing else, and opens offline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from coppice import __version__
from coppice.frontend.replay.charts import (
    cause_chart,
    cause_colour,
    curve_chart,
    prefix_chart,
    rate_chart,
)
from coppice.frontend.replay.run import Replayed, describe
from coppice.frontend.report.tables import excerpt, worth_showing
from coppice.frontend.report.words import (
    CAUSE_NAMES,
    Decode,
    cause_meaning,
    causes,
    duration,
    memory_sentence,
    short_count,
)
from coppice.runtime.report.cache import Counts, NearMiss, SharedPrefix

_TEMPLATE = Path(__file__).with_name("page.html")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render_page(replayed: Replayed) -> str:
    """The whole page. All text of the trace is escaped."""
    report = replayed.report
    accounts, options = report.accounts, report.options
    counts = accounts.overall.since_start
    pool = options.pages * options.page_size
    charts = {
        "rate": rate_chart(report.stretches),
        "cause": cause_chart(report),
    }
    if accounts.curve:
        charts["curve"] = curve_chart(accounts, pool, options.policy)
    if report.nodes:
        charts["prefix"] = prefix_chart(report.nodes, replayed.decode)
    still_there = sum(node.subtree_saved for node in report.nodes if node.parent < 0)
    parts = {
        "title": escape(f"Replay of {replayed.trace.path.name}"),
        "subtitle": escape(" · ".join(describe(replayed.trace, options, replayed.unlimited))),
        "tiles": _tiles(replayed),
        "memory": escape(
            "The pool held everything: no other size would hit more."
            if replayed.unlimited
            else memory_sentence(accounts, options.policy) or "There is no curve yet."
        ),
        "curve_table": _table(
            ("tokens in the cache", "hit rate"),
            ((f"{point.pool_tokens:,}", f"{point.hit_rate:.1%}") for point in accounts.curve),
        ),
        "rate_table": _rate_table(replayed),
        "cause_list": _cause_list(counts),
        "still_there": f"{min(still_there, counts.hit_tokens):,}",
        "hit_tokens": f"{counts.hit_tokens:,}",
        "prefix_table": _prefix_table(report.top_prefixes, replayed.decode),
        "near_misses": _near_misses(accounts.near_misses, replayed.decode),
        "version": escape(__version__),
        "charts": _embedded({name: _plain(figure) for name, figure in charts.items()}),
        "plotly": get_plotlyjs(),
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    return _PLACE.sub(lambda place: parts[place.group(1)], template)


def _plain(figure: go.Figure) -> dict[str, Any]:
    made = figure.to_plotly_json()
    del made["layout"]["template"]
    return made


def _embedded(value: Any) -> str:
    """JSON inside a script element: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- parts -------------------------------------------------------------------------------------


def _tiles(replayed: Replayed) -> str:
    report = replayed.report
    counts = report.accounts.overall.since_start
    used = 1 - report.pages_free / report.pages_total
    evicted = f"wanted again after {duration(counts.evicted_idle_seconds)}"
    tiles = [
        ("hit_rate", "hit rate", f"{counts.hit_rate:.1%}", "of prompt tokens were in the cache"),
        ("ideal", "ideal hit rate", f"{counts.ideal_hit_rate:.1%}", "of an unlimited cache"),
        ("saved", "tokens saved", _short(counts.hit_tokens), f"of {counts.prompt_tokens:,}"),
        ("requests", "requests", f"{counts.requests:,}", _over(report.accounts.seconds)),
        (
            "evicted",
            "tokens evicted",
            _short(report.evicted_tokens),
            evicted if counts.evicted else "none was wanted again" if report.evicted_tokens else "",
        ),
        (
            "pool",
            "pool",
            "unlimited" if replayed.unlimited else _short(report.options.pool_tokens),
            f"tokens, {used:.0%} in use at the end",
        ),
    ]
    if report.preemptions:
        tiles.append(
            ("preemptions", "preemptions", f"{report.preemptions:,}", "sequences had to resume")
        )
    return "\n".join(
        f'<div class="tile"><dt>{name}</dt><dd><b id="tile-{key}">{value}</b>'
        f"<small>{escape(note)}</small></dd></div>"
        for key, name, value, note in tiles
    )


def _over(seconds: float) -> str:
    return f"over {duration(seconds)}" if seconds else "all at one time"


def _short(count: int) -> str:
    """A short count whose exact value shows when it is pointed at."""
    return f'<data value="{count}" title="{count:,}">{short_count(count)}</data>'


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"


def _cause_list(counts: Counts) -> str:
    rows = []
    for cause, tokens in causes(counts):
        share = tokens / counts.computed_tokens
        rows.append(
            f'<li style="--colour:{cause_colour(cause)}"><span class="name">{CAUSE_NAMES[cause]}'
            f'</span><span class="share">{share:.1%}</span>'
            f'<span class="bar" aria-hidden="true"><i style="width:{share:.2%}"></i></span>'
            f'<span class="note">{_tokens(tokens)}: {escape(cause_meaning(cause, counts))}</span>'
            "</li>"
        )
    return f'<ul class="causes">{"".join(rows)}</ul>' if rows else "<p>No token was computed.</p>"


def _rate_table(replayed: Replayed) -> str:
    rows = (
        (
            duration(stretch.seconds),
            f"{stretch.counts.requests:,}",
            f"{stretch.counts.hit_rate:.1%}",
            f"{stretch.counts.ideal_hit_rate:.1%}",
            f"{stretch.evicted_tokens:,}",
        )
        for stretch in replayed.report.stretches
    )
    return _table(("until", "requests", "hit rate", "ideal", "tokens evicted"), rows)


def _prefix_table(prefixes: Sequence[SharedPrefix], decode: Decode) -> str:
    if not prefixes:
        return '<p class="empty">No prefix that is still cached was hit.</p>'
    rows = (
        (
            f"{prefix.num_tokens:,}",
            f"{prefix.hits:,}",
            f"{prefix.tokens_saved:,}",
            f"{prefix.resident_pages:,}",
            "–" if prefix.idle_seconds is None else duration(prefix.idle_seconds),
            escape(excerpt(prefix.token_ids, decode)),
        )
        for prefix in worth_showing(prefixes)
    )
    return _table(
        ("tokens", "hits", "tokens saved", "pages", "idle", "beginning … end"), rows, escaped=True
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, escaped: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell if escaped else escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _near_misses(groups: Sequence[NearMiss], decode: Decode) -> str:
    if not groups:
        return '<p class="empty">None: no known text came behind another beginning.</p>'
    return "\n".join(_near_miss(group, decode) for group in groups)


def _near_miss(group: NearMiss, decode: Decode) -> str:
    sides = []
    for example in group.differences:
        ours, theirs = escape(decode(example.ours)), escape(decode(example.theirs))
        sides.append(
            f'<div class="side ours"><span>this prompt</span><del>{ours or "(nothing)"}</del></div>'
            '<div class="side theirs"><span>in the cache</span>'
            f"<ins>{theirs or '(nothing, or no longer cached)'}</ins></div>"
        )
    requests = f"{group.requests:,} request{'s' * (group.requests != 1)}"
    before = f'<p class="shared">… {escape(decode(group.before))}</p>' if group.before else ""
    namespace = f" in namespace {escape(str(group.namespace))}" if group.namespace else ""
    return (
        f'<article class="near"><h3>{requests} computed '
        f"{group.tokens_cost:,} known tokens again{namespace}</h3>"
        f'<p class="note">The prompts differ after {_tokens(group.position)}; about '
        f"{_tokens(group.tokens_after)} of each come again behind that.</p>"
        f'{before}<div class="sides">{"".join(sides)}</div>'
        f'<p class="shared">{escape(decode(group.after))} …</p></article>'
    )
