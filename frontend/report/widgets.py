"""Tables without borders and bars of characters, for reports in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich import box
from rich.table import Table
from rich.text import Text

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
