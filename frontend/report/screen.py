"""A server's report, read from its JSON, for the terminal: at 80 columns or fewer, plain too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from coppice.frontend.report.tables import CAUSE_STYLES, bar, near_miss, one_line
from coppice.frontend.report.words import duration, short_count

Report = Mapping[str, Any]

_WIDTH = 78
_NARROW = 60  # columns; in fewer there is no room for words beside numbers
_WINDOWS = {"last_ten_minutes": "last ten minutes", "since_start": "since the start"}
_LATENCIES = {
    "queue": "in the queue",
    "ttft": "to the first token",
    "itl": "between tokens",
    "request": "to the end",
}
_PAGES = {"held": "cyan", "pinned": "magenta", "cached": "green", "free": "bright_black"}
_STEPS = "▁▂▃▄▅▆▇█"


class Window:
    """The report as far as it fits the terminal, in which it can be moved.

    Attributes:
        report: what is shown.
        trouble: why it is not the present one, if so.
    """

    def __init__(self, report: Report, *, with_keys: bool) -> None:
        """`with_keys`: whether there are keys by which to move it."""
        self.report = report
        self.trouble = ""
        self._with_keys = with_keys
        self._first = 0  # line at the top
        self._page, self._most = 1, 0  # lines that fit, and how far down it can be moved

    def press(self, key: str) -> None:
        """Moves it as a pager does."""
        steps = {"up": -1, "down": 1, "page up": -self._page, "page down": self._page}
        steps |= {"home": -self._most, "end": self._most}
        self._first = min(max(0, self._first + steps.get(key, 0)), self._most)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        whole = render_screen(self.report, trouble=self.trouble, width=width)
        lines = console.render_lines(whole, options.update(height=None), pad=False)
        self._page = max(1, console.height - 1)
        self._most = max(0, len(lines) - self._page)
        self._first = min(self._first, self._most)
        for line in lines[self._first : self._first + self._page]:
            yield from line
            yield Segment.line()
        below = len(lines) - self._first - self._page
        said = ["q ends"] if self._with_keys else []
        if self._most and self._with_keys:
            said.insert(0, "arrows, space and b move")
        if below > 0:
            said.insert(0, f"{below} more line{'s' * (below > 1)} below")
        yield Text(" · ".join(said), "dim", overflow="ellipsis", no_wrap=True, end="")


def render_screen(report: Report, *, trouble: str = "", width: int = 80) -> RenderableType:
    """The report, what matters most first, for so many columns.

    `trouble` says why it is not the present one.
    """
    width = min(width, _WIDTH)
    parts: list[RenderableType] = [_head(report)]
    if trouble:
        parts.append(Text(trouble, "red"))
    parts += [Text(), *_now(report, width), Text()]
    if report["present"]["advice"]:
        parts += [_advice(report["present"]["advice"]), Text()]
    parts += [_requests(report), Text(), _pool(report["pool"], width)]
    if report["curve"]["sentence"] and report["pool"]["evicted_tokens"]:
        parts.append(Text(report["curve"]["sentence"]))
    for made in (_prefixes(report["prefixes"]), _near_misses(report["near_misses"]),
                 _namespaces(report["namespaces"]), _pins(report["pins"])):  # fmt: skip
        if made is not None:
            parts += [Text(), made]
    return Group(*parts)


def _head(report: Report) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(report["at"]))
    return Text.assemble(
        (one_line(str(report["model"])), "bold"),
        (f"  up {duration(report['uptime_seconds'])}, {at}", "dim"),
    )


def _now(report: Report, width: int) -> list[RenderableType]:
    present = report["present"]
    counts = report["counts"][present["window"]]
    prompt = counts["prompt_tokens"]
    if not prompt:
        return [Text("No prompt has come since the server started.", "dim")]
    lines: list[RenderableType] = [
        Text.assemble(
            (f"{counts['hit_rate']:.1%}", "bold green"),
            (" of prompt tokens came from the cache", "bold"),
            (f", {_WINDOWS[present['window']]}", "dim"),
        ),
        Text(
            f"saved about {duration(present['saved_seconds'])}: {counts['hit_tokens']:,} of "
            f"{prompt:,} tokens, {counts['requests']:,} requests; "
            f"ideal {counts['ideal_hit_rate']:.1%}"
        ),
        _mix(counts, width),
    ]
    rates = _rates(report["over_time"]["ten_minutes"], min(50, max(10, width - 23)))
    if rates:
        lines.append(Text.assemble((rates, "green"), ("  hit rate, ten minutes", "dim")))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(width=10)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    if width >= _NARROW:
        table.add_column(style="dim")
    for cause, tokens in sorted(counts["causes"].items(), key=lambda each: -each[1]):
        if tokens:
            said = report["causes"].get(cause, {"name": cause, "meaning": ""})
            name = Text(said["name"], CAUSE_STYLES.get(cause, ""))
            told = [f"{tokens / prompt:.1%}", f"{tokens:,}", said["meaning"]]
            table.add_row(name, *told[: len(table.columns) - 1])
    return [*lines, Text(), Text("Why the rest was computed", "bold"), table]


def _mix(counts: Report, width: int) -> Text:
    """All prompt tokens as one bar: the hit, then each cause; told apart without colour too."""
    parts = [(counts["hit_tokens"], "█", "green")]
    causes = sorted(counts["causes"].items(), key=lambda each: -each[1])
    signs = "▓▒░▚▞▖·"
    parts += [
        (tokens, signs[min(place, len(signs) - 1)], CAUSE_STYLES.get(cause, ""))
        for place, (cause, tokens) in enumerate(causes)
    ]
    text, done, drawn = Text(), 0, 0
    for tokens, sign, style in parts:
        done += tokens
        end = round(width * done / counts["prompt_tokens"])
        text.append(sign * (end - drawn), style)
        drawn = end
    return text


def _rates(past: Report, width: int) -> str:
    """The hit rate over time as a line of steps from 0 to 1; a space where nothing came."""
    columns = zip(past["hit_tokens"], past["prompt_tokens"], strict=True)
    rates = [hit / prompt if prompt else None for hit, prompt in columns][-width:]
    if not any(rate is not None for rate in rates):
        return ""
    return "".join(
        " " if rate is None else _STEPS[min(len(_STEPS) - 1, int(rate * len(_STEPS)))]
        for rate in rates
    ).lstrip()


def _advice(advice: Sequence[Report]) -> Table:
    table = _titled("What to do")
    table.add_column(overflow="fold")
    for each in advice[:3]:
        text = Text.assemble((f"{each['title']}. ", CAUSE_STYLES.get(each["cause"], "")))
        table.add_row(text + Text(each["text"]))
    return table


def _requests(report: Report) -> Group:
    requests = report["requests"]
    refused = sum(requests["refused"].values())
    said = (
        f"{requests['running']:,} running, {requests['waiting']:,} waiting; "
        f"{sum(requests['finished'].values()):,} ended, {refused:,} refused, "
        f"{requests['preemptions']:,} preemptions"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("last ten minutes")
    for name in ("median", "90%", "99%"):
        table.add_column(name, justify="right", min_width=8, no_wrap=True)
    for key, name in _LATENCIES.items():
        told = report["latency_seconds"][key]["last_ten_minutes"]
        table.add_row(name, *(_latency(told[share]) for share in ("p50", "p90", "p99")))
    return Group(Text("Requests", "bold"), Text(said), table)


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 99.95 else duration(seconds)


def _pool(pool: Report, width: int) -> Group:
    pages = pool["pages"]
    line, done, drawn = Text(), 0, 0
    for (state, style), sign in zip(_PAGES.items(), "█▓▒░", strict=True):
        done += pages[state]
        end = round(width * done / pages["total"])
        line.append(sign * (end - drawn), style)
        drawn = end
    told = ", ".join(f"{pages[state]:,} {state}" for state in _PAGES if pages[state])
    evicted = f"; {short_count(pool['evicted_tokens'])} tokens evicted by {pool['eviction_policy']}"
    said = f"{told} of {pages['total']:,} pages"
    return Group(
        Text("The pool", "bold"), line, Text(said + (evicted if pool["evicted_tokens"] else ""))
    )


def _titled(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        padding=(0, 2, 0, 0),
    )


def _listed(title: str, columns: Mapping[str, bool]) -> Table:
    """A table of named columns, of which some (True) hold numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name, number in columns.items():
        if number:
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="ellipsis", no_wrap=True)
    return table


def _piece(piece: Report | None, width: int, *, end: bool = False) -> str:
    """A piece's text, cut to `width` characters, or its hash."""
    if piece is None:
        return ""
    if piece["text"] is None:
        return f"#{piece['hash']}"
    text = one_line(piece["text"])
    if len(text) <= width:
        return text
    return "…" + text[-width:] if end else text[:width] + "…"


def _prefixes(prefixes: Sequence[Report]) -> Table | None:
    if not prefixes:
        return None
    columns = {"tokens": True, "hits": True, "saved": True, "idle": True, "prefix": False}
    table = _listed("Top shared prefixes", columns)
    for prefix in prefixes[:6]:
        idle = prefix["idle_seconds"]
        table.add_row(
            f"{prefix['tokens']:,}",
            f"{prefix['hits']:,}",
            f"{prefix['tokens_saved']:,}",
            "" if idle is None else duration(idle, units=1),
            Text(f"{_piece(prefix['first'], 20)} {_piece(prefix['last'], 20, end=True)}".strip()),
        )
    return table


def _near_misses(groups: Sequence[Report]) -> Group | None:
    if not groups:
        return None
    parts: list[RenderableType] = [Text("Near misses: known text behind another beginning", "bold")]
    for group in groups[:2]:
        said, table = near_miss(group["requests"], group["tokens_cost"], group["position"])
        parts.append(said)
        if group["before"]["tokens"]:
            table.add_row("shared", Text(_piece(group["before"], 60, end=True)))
        for each in group["differences"][:1]:
            table.add_row("they had", Text(_piece(each["ours"], 60), "red"))
            gone = "nothing, or no longer cached"
            theirs = _piece(each["theirs"], 60) if each["theirs"]["tokens"] else gone
            table.add_row("cached", Text(theirs, "green"))
        table.add_row("then", Text(_piece(group["after"], 60)))
        parts.append(table)
    return Group(*parts)


def _namespaces(namespaces: Sequence[Report]) -> Table | None:
    if len(namespaces) < 2:
        return None
    columns = {"namespace": False, "requests": True, "prompt tokens": True, "hit rate": True}
    table = _listed("Namespaces", columns | {"": False})
    ordered = sorted(namespaces, key=lambda each: -each["since_start"]["prompt_tokens"])
    for each in ordered[:6]:
        counts = each["since_start"]
        table.add_row(
            Text(each["name"]),
            f"{counts['requests']:,}",
            f"{counts['prompt_tokens']:,}",
            f"{counts['hit_rate']:.1%}",
            bar(counts["hit_rate"], "green", width=16),
        )
    return table


def _pins(pins: Sequence[Report]) -> Table | None:
    if not pins:
        return None
    table = _listed("Pins", {"name": False, "tokens": True, "cached": True, "ends unused": True})
    for pin in pins[:6]:
        left = pin["seconds_left"]
        table.add_row(
            Text(one_line(pin["name"])),
            f"{pin['tokens']:,}",
            f"{pin['cached_tokens'] / pin['tokens']:.0%}",
            "never" if left is None else f"in {duration(left)}",
        )
    return table
