"""Renders a report's JSON for the terminal, in at most 80 columns, with colours or without.

`render_live` shows a running server's report and begins with the present; `render_totals` shows the
totals since the start, for `generate`, the demo, notebooks and replays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coppice.frontend.report.widgets import (
    bar,
    divided,
    draft_line,
    listed,
    namespace_table,
    pin_table,
    replica_table,
    tier_size_table,
    tier_table,
    titled,
)
from coppice.frontend.report.words import (
    Report,
    adapter_lines,
    duration,
    excerpt,
    one_line,
    ordered_causes,
    short_count,
    shown_text,
    worth_showing,
)

_WIDTH = 78
_NARROW = 60  # columns; in fewer there is no room for words beside numbers
_SHOWN_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # of the points of the curve
_WINDOWS = {"last_ten_minutes": "last ten minutes", "since_start": "since the start"}
_LATENCIES = {
    "queue": "in the queue",
    "ttft": "to the first token",
    "itl": "between tokens",
    "request": "to the end",
}
_PAGES = {"held": "cyan", "pinned": "magenta", "cached": "green", "free": "bright_black"}
_STEPS = "▁▂▃▄▅▆▇█"
_CAUSE_STYLES = {
    "cold": "bright_black",
    "evicted": "red",
    "diverged": "yellow",
    "namespace": "magenta",
    "in_flight": "blue",
    "other_replica": "bright_blue",
    "last_token": "cyan",
    "prompt_logprobs": "green",
    "not_loaded": "bright_yellow",
    "no_cache": "bright_black",
}


def render_live(report: Report, *, trouble: str = "", width: int = 80) -> RenderableType:
    """The report of a running server in at most `width` columns, what matters most first.

    `trouble` is why the report is not the newest one; empty if it is.
    """
    width = min(width, _WIDTH)
    prompt = _present(report)["prompt_tokens"]
    return _paragraphs(
        Group(_head(report), Text(trouble, "red")) if trouble else _head(report),
        _now(report, width)
        if prompt
        else Text("No prompt has come since the server started.", "dim"),
        _causes(report, width) if prompt else None,
        _advice(report["present"]["advice"]),
        _requests(report),
        _pool(report, width),
        _prefixes(report["prefixes"]),
        _near_misses(report["near_misses"], groups=2, examples=1),
        namespace_table(report["namespaces"]),
        replica_table(report.get("replicas", ()), width),
        tier_table(report.get("tiers")),
        draft_line(report.get("drafts")),
        adapter_lines(report.get("adapters", ())),
        pin_table(report["pins"]),
    )


def render_totals(report: Report, *, full: bool = False) -> RenderableType:
    """The totals since the start; with `full` also the hit rate by size of the cache."""
    none = Text("No near misses: no known text came after another beginning.", "dim")
    computed = report["counts"]["since_start"]["computed_tokens"]
    return _paragraphs(
        _totals(report),
        _causes(report, _WIDTH) if computed else Text("No prompt token was computed yet.", "dim"),
        _advice(report["present"]["advice"]) if full else None,
        _policies(report.get("policies", ())),
        tier_size_table(report.get("tier_sizes")),
        _curve(report) if full and report["curve"]["points"] else None,
        _sentence(report),
        adapter_lines(report.get("adapters", ())),
        _near_misses(report["near_misses"], groups=3, examples=2) or (none if full else None),
        _prefixes(report["prefixes"]) or Text("No prefix was hit yet.", "dim"),
    )


def _paragraphs(*parts: RenderableType | None) -> Group:
    """The parts that are not None, with an empty line between each two."""
    shown = [line for part in parts if part is not None for line in (part, Text())]
    return Group(*shown[:-1])


def _present(report: Report) -> Report:
    """The counts that stand for now."""
    counts: Report = report["counts"][report["present"]["window"]]
    return counts


# -- the present and the totals ----------------------------------------------------------------


def _head(report: Report) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(report["at"]))
    return Text.assemble(
        (one_line(str(report["model"])), "bold"),
        (f"  up {duration(report['uptime_seconds'])}, {at}", "dim"),
    )


def _now(report: Report, width: int) -> Group:
    present, counts = report["present"], _present(report)
    lines: list[RenderableType] = [
        Text.assemble(
            (f"{counts['hit_rate']:.1%}", "bold green"),
            (" of prompt tokens came from the cache", "bold"),
            (f", {_WINDOWS[present['window']]}", "dim"),
        ),
        Text(
            f"saved about {duration(present['saved_seconds'])}: {counts['hit_tokens']:,} of "
            f"{counts['prompt_tokens']:,} tokens, {counts['requests']:,} requests; "
            f"ideal {counts['ideal_hit_rate']:.1%}"
        ),
        _mix(counts, width),
    ]
    past, room = report["over_time"]["ten_minutes"], min(50, max(10, width - 23))
    return Group(*lines, *_over_time(past, room))


def _mix(counts: Report, width: int) -> Text:
    """All prompt tokens as one bar: hits, then each cause, each with a character of its own."""
    signs = "▓▒░▚▞▖▘·"
    parts = [(counts["hit_tokens"], "█", "green")]
    for place, (cause, tokens) in enumerate(ordered_causes(counts)):
        parts.append((tokens, signs[min(place, len(signs) - 1)], _CAUSE_STYLES.get(cause, "")))
    return divided(parts, counts["prompt_tokens"], width)


def _over_time(past: Report, width: int) -> Iterator[Text]:
    """A line for the hit rate, and one for the share of each tier from which something came."""
    if rates := _shares(past, "hit_tokens", width):
        yield Text.assemble((rates, "green"), ("  hit rate, ten minutes", "dim"))
    for column in past:
        if column.startswith("loaded_") and any(past[column][-width:]):
            words = f"  loaded from {column.removeprefix('loaded_')}"
            yield Text.assemble((_shares(past, column, width), "green"), (words, "dim"))


def _shares(past: Report, column: str, width: int) -> str:
    """Tokens over time as shares of the prompt tokens, a block character each.

    A stretch without a prompt is a space.
    """
    columns = zip(past[column], past["prompt_tokens"], strict=True)
    rates = [part / prompt if prompt else None for part, prompt in columns][-width:]
    return "".join(
        " " if rate is None else _STEPS[min(len(_STEPS) - 1, int(rate * len(_STEPS)))]
        for rate in rates
    ).strip()


def _totals(report: Report) -> Table:
    counts, pages = report["counts"]["since_start"], report["pool"]["pages"]
    table = titled(None)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    hit_rate, ideal = counts["hit_rate"], counts["ideal_hit_rate"]
    table.add_row("requests", f"{counts['requests']:,}")
    table.add_row("prompt tokens", f"{counts['prompt_tokens']:,}")
    table.add_row("hit tokens", f"{counts['hit_tokens']:,}", "prompt tokens found in the cache")
    for tier, tokens in counts.get("loaded_tokens", {}).items():
        if tokens:
            table.add_row(f"  from {tier}", f"{tokens:,}", "of them, loaded from that tier")
    table.add_row("hit rate", f"{hit_rate:.1%}", bar(hit_rate, "green"))
    table.add_row("ideal hit rate", f"{ideal:.1%}", bar(ideal, "cyan"))
    table.add_row("", "", "what an unlimited cache would have hit")
    computed = f"{counts['computed_tokens']:,}"
    table.add_row("tokens computed", computed, "prompt tokens not found there")
    table.add_row("tokens generated", f"{report['generated_tokens']:,}")
    if report["saved_seconds"]:
        saved = f"~{report['saved_seconds']:.2f} s"
        table.add_row("time saved", saved, "estimated from the time a computed token took")
    used = 1 - pages["free"] / pages["total"]
    table.add_row("pool use", f"{used:.1%}", bar(used, "cyan"))
    states = ", ".join(f"{pages[s]:,} {s}" for s in _PAGES if pages[s] or s != "pinned")
    size = report["pool"]["page_size"]
    table.add_row("pages", f"{pages['total']:,}", f"{states}; {size} tokens each")
    evicted, preemptions = report["pool"]["evicted_tokens"], report["requests"]["preemptions"]
    if evicted or preemptions:
        table.add_row("tokens evicted", f"{evicted:,}")
        table.add_row("preemptions", f"{preemptions:,}")
    return table


# -- why, and what to do -----------------------------------------------------------------------


def _causes(report: Report, width: int) -> Table:
    """The causes of misses, the costliest first, as shares of the prompt tokens.

    With the hit rate, which has the same denominator, the shares add up to 1.
    """
    counts = _present(report)
    table = titled("Why prompt tokens were computed, as shares of all prompt tokens")
    table.add_column(width=10)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    if width >= _NARROW:
        table.add_column(no_wrap=True)
        table.add_column(style="dim")
    for cause, tokens in ordered_causes(counts):
        cause_words = report["causes"].get(cause, {"name": cause, "meaning": ""})
        share, style = tokens / counts["prompt_tokens"], _CAUSE_STYLES.get(cause, "")
        row = (
            Text(cause_words["name"], style),
            f"{share:.1%}",
            f"{tokens:,}",
            bar(share, style, width=9),
            cause_words["meaning"],
        )
        table.add_row(*row[: len(table.columns)])
    if sentence := counts.get("estimate"):
        table.caption, table.caption_justify = sentence, "left"
    return table


def _advice(advice: Sequence[Report]) -> Table | None:
    if not advice:
        return None
    table = titled("What to do")
    table.add_column(overflow="fold")
    for each in advice[:3]:
        text = Text.assemble((f"{each['title']}. ", _CAUSE_STYLES.get(each["cause"], "")))
        table.add_row(text + Text(each["text"]))
    return table


def _sentence(report: Report) -> Text | None:
    """What other sizes of cache would hit, if anything was evicted, and what windows saved."""
    said = [report["curve"]["sentence"]] if report["pool"]["evicted_tokens"] else []
    said += [windows["sentence"]] if (windows := report.get("windows")) else []
    return Text("\n".join(said)) if any(said) else None


def _policies(policies: Sequence[Report]) -> Table | None:
    """The eviction policies that were measured on the same requests, the best first."""
    if not policies:
        return None
    table = titled("Hit rate by eviction policy (measured on the same requests)")
    table.add_column(width=13)
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    for each in policies:
        table.add_row(
            each["name"],
            f"{each['hit_rate']:.1%}",
            bar(each["hit_rate"], "green" if each["chosen"] else "cyan"),
            style="bold" if each["chosen"] else None,
        )
    return table


def _curve(report: Report) -> Group:
    table = titled("Hit rate by size of the cache (LRU, estimated)")
    table.add_column(justify="right", width=13)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    for point in report["curve"]["points"]:
        if point["factor"] in _SHOWN_FACTORS:
            times = f"{point['pool_tokens'] / report['pool']['tokens']:.3g}"
            present = times == "1"
            table.add_row(
                f"{point['pool_tokens']:,}",
                f"× {times}",
                f"{point['hit_rate']:.1%}",
                bar(point["hit_rate"], "green" if present else "cyan"),
                style="bold" if present else None,
            )
    return Group(table, Text(report["curve"]["note"], "dim"))


def _near_misses(near_misses: Sequence[Report], *, groups: int, examples: int) -> Group | None:
    """The costliest groups: the shared text before and after a difference, and both its sides."""
    if not near_misses:
        return None
    parts: list[RenderableType] = [Text("Near misses: known text after another beginning", "bold")]
    for group in near_misses[:groups]:
        requests = f"{group['requests']:,} request{'s' if group['requests'] > 1 else ''}"
        parts.append(
            Text(
                f"{requests} computed {group['tokens_cost']:,} tokens again, "
                f"since they differ after {group['position']:,}"
            )
        )
        table = titled(None, padding=(0, 1, 0, 2))
        table.add_column(style="dim", min_width=8)
        table.add_column(overflow="ellipsis", no_wrap=True, max_width=66)
        if group["before"]["tokens"]:
            table.add_row("before", Text("… " + shown_text(group["before"])[-64:].lstrip()))
        for each in group["differences"][:examples]:
            absent = "(nothing, or no longer cached)"
            table.add_row("here", Text(shown_text(each["ours"]) or "(nothing)", "red"))
            table.add_row("there", Text(shown_text(each["theirs"]) or absent, "green"))
        table.add_row("after", Text(shown_text(group["after"]) + " …"))
        parts.append(table)
    if rest := near_misses[groups:]:
        cost = sum(group["tokens_cost"] for group in rest)
        parts.append(Text(f"and others that cost {cost:,} tokens", "dim"))
    return Group(*parts)


# -- the engine and its tree -------------------------------------------------------------------


def _requests(report: Report) -> Group:
    requests = report["requests"]
    line = (
        f"{requests['running']:,} running, {requests['waiting']:,} waiting; "
        f"{sum(requests['finished'].values()):,} ended, "
        f"{sum(requests['refused'].values()):,} refused, {requests['preemptions']:,} preemptions"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("last ten minutes")
    for name in ("median", "90%", "99%"):
        table.add_column(name, justify="right", min_width=8, no_wrap=True)
    for key, name in _LATENCIES.items():
        quantiles = report["latency_seconds"][key]["last_ten_minutes"]
        table.add_row(name, *(_latency(quantiles[share]) for share in ("p50", "p90", "p99")))
    return Group(Text("Requests", "bold"), Text(line), table)


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 99.95 else duration(seconds)


def _pool(report: Report, width: int) -> Group:
    pool = report["pool"]
    pages, evicted = pool["pages"], pool["evicted_tokens"]
    signs = zip(_PAGES.items(), "█▓▒░", strict=True)
    parts = [(pages[state], sign, style) for (state, style), sign in signs]
    states = ", ".join(f"{pages[state]:,} {state}" for state in _PAGES if pages[state])
    line = f"{states} of {pages['total']:,} pages"
    if evicted:
        line += f"; {short_count(evicted)} tokens evicted by {pool['eviction_policy']}"
    sentence = _sentence(report)
    return Group(
        Text("The pool", "bold"),
        divided(parts, pages["total"], width),
        Text(line),
        *([sentence] if sentence else []),
    )


def _prefixes(prefixes: Sequence[Report]) -> Table | None:
    if not prefixes:
        return None
    columns = {"tokens": True, "hits": True, "saved": True, "idle": True}
    table = listed("Top shared prefixes", columns | {"beginning … end": False})
    for prefix in worth_showing(prefixes)[:8]:
        idle = prefix["idle_seconds"]
        table.add_row(
            f"{prefix['tokens']:,}",
            f"{prefix['hits']:,}",
            Text(f"{prefix['tokens_saved']:,}", "green"),
            "" if idle is None else duration(idle, units=1),
            Text(excerpt(prefix)),
        )
    return table
