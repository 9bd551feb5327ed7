"""Tables without borders and bars of characters, for reports in the terminal.

Namespaces, replicas and pins are lists of named things, each a table of a few columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coppice.frontend.report.words import (
    Report,
    duration,
    one_line,
    short_count,
    tier_row_name,
)

BAR_WIDTH = 30


def titled(title: str | None, padding: tuple[int, int, int, int] = (0, 2, 0, 0)) -> Table:
    """A table without a header, to which the caller adds columns."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        padding=padding,
    )


def listed(title: str, columns: Mapping[str, bool]) -> Table:
    """A table with named columns; True: a column of numbers."""
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


def bar(share: float, style: str, width: int = BAR_WIDTH) -> Text:
    """A bar of `width` columns, filled to `share`, which is cut to the range from 0 to 1."""
    filled = round(width * min(max(share, 0.0), 1.0))
    return Text.assemble(("█" * filled, style), ("░" * (width - filled), "dim"))


def divided(parts: Iterable[tuple[int, str, str]], whole: int, width: int) -> Text:
    """A bar of `width` columns for a count `whole`; each part is a count, a character, a style."""
    text, done, drawn = Text(), 0, 0
    for count, sign, style in parts:
        done += count
        end = round(width * done / whole)
        text.append(sign * (end - drawn), style)
        drawn = end
    return text


def namespace_table(namespaces: Sequence[Report]) -> Table | None:
    """The namespaces with the most prompt tokens, if there are several."""
    if len(namespaces) < 2:
        return None
    columns = {"namespace": False, "requests": True, "prompt tokens": True, "hit rate": True}
    table = listed("Namespaces", columns | {"": False})
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


def replica_table(replicas: Sequence[Report], width: int) -> Table | None:
    """All replicas, if there are any; in less than 76 columns without what can be left out.

    "elsewhere" is the share of prompt tokens that another replica held.
    """
    if not replicas:
        return None
    shown = ["tokens", "hit rate", "running", "waiting"]
    if wide := width >= 76:
        shown = ["requests", *shown[:2], "elsewhere", *shown[2:], "pool use"]
    table = listed("Replicas", {"replica": False} | dict.fromkeys(shown, True))
    table.columns[0].max_width = max(6, width - (70 if wide else 38))  # what numbers leave
    for each in replicas:
        prompt, pages = each["prompt_tokens"], each["pages"]
        cells = {
            "requests": short_count(each["requests"]),
            "tokens": short_count(prompt),
            "hit rate": f"{each['hit_rate']:.1%}",
            "elsewhere": f"{each['other_replica_tokens'] / prompt if prompt else 0:.1%}",
            "running": f"{each['running']:,}",
            "waiting": f"{each['waiting']:,}",
            "pool use": f"{1 - pages['free'] / pages['total'] if pages['total'] else 0:.0%}",
        }
        table.add_row(Text(one_line(each["name"])), *(cells[name] for name in shown))
    return table


def draft_line(drafts: Report | None) -> RenderableType | None:
    """What drafts came to; None without any."""
    return None if drafts is None else Text(f"{drafts['sentence']}.", "dim")


def _rate(size: float, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s" if seconds else "–"


def tier_table(tiers: Report | None) -> RenderableType | None:
    """The tiers beyond the pool, and what they saved; None without any."""
    if tiers is None:
        return None
    columns = {"loaded": True, "read": True, "stored": True, "written": True, "kept": True,
               "failures": True}  # fmt: skip
    table = listed("Tiers", {"tier": False} | columns)
    for each in tiers["stores"]:
        used = each["used_bytes"]
        table.add_row(
            Text(each["name"]),
            f"{short_count(each['loaded_tokens'])} tokens",
            _rate(each["loaded_bytes"], each["load_seconds"]),
            f"{each['written_bytes'] / 1e9:,.2f} GB",
            _rate(each["written_bytes"], each["write_seconds"]),
            "–" if used is None else f"{used / 1e9:,.2f} GB",
            f"{each['failures'] + each['slow'] + each['damaged']:,}",
        )
    return Group(table, Text(f"{tiers['sentence']}.", "dim"))


def tier_size_table(sizes: Report | None) -> RenderableType | None:
    """What a replay hit with each combination of tiers, and which to buy; None without any."""
    if sizes is None:
        return None
    table = titled("Hit rate by tiers beyond the pool (measured on the same requests)")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    for row in sizes["rows"]:
        saved = row["saved_seconds"]
        table.add_row(
            tier_row_name(row, sizes["token_bytes"]),
            f"{row['hit_rate']:.1%}",
            "" if saved is None else f"saves {duration(saved)}",
            bar(row["hit_rate"], "green" if row["chosen"] else "cyan", width=16),
            style="bold" if row["chosen"] else None,
        )
    return Group(table, Text(sizes["advice"]), Text(sizes["note"], "dim"))


def pin_table(pins: Sequence[Report]) -> Table | None:
    """The first pins, if there are any."""
    if not pins:
        return None
    table = listed("Pins", {"name": False, "tokens": True, "cached": True, "ends unused": True})
    for pin in pins[:6]:
        left = pin["seconds_left"]
        table.add_row(
            Text(one_line(pin["name"])),
            f"{pin['tokens']:,}",
            f"{pin['cached_tokens'] / pin['tokens']:.0%}",
            "never" if left is None else f"in {duration(left)}",
        )
    return table
