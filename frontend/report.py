"""The prefix-hit report for the terminal: what the cache saved, and which prefixes did it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coppice.runtime.report import CacheReport

BAR_WIDTH = 30
START_CHARACTERS = 22  # with the end and the sign between: what is left of 80 columns
END_CHARACTERS = 30
LEAST_SHARE = 0.01  # of all that was saved: prefixes below are not worth a row
ENOUGH_TOKENS = 64  # decoded from either end of a prefix: more than the characters shown need

Decode = Callable[[Sequence[int]], str]


def render_report(report: CacheReport, decode: Decode) -> RenderableType:
    """The report as something that a rich console prints, readable at 80 columns and uncoloured.

    Args:
        report: the engine's counts.
        decode: token ids to text, special tokens kept visible.
    """
    return Group(_numbers(report), Text(), _prefixes(report, decode))


def _numbers(report: CacheReport) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    hit_rate = f"{report.hit_rate:.1%}"
    table.add_row("requests", f"{report.requests:,}", "")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}", "")
    table.add_row("hit tokens", f"{report.hit_tokens:,}", "prompt tokens found in the cache")
    table.add_row("hit rate", hit_rate, _bar(report.hit_rate, "green"))
    table.add_row("tokens computed", f"{report.computed_tokens:,}", "prompt tokens not found there")
    table.add_row("tokens generated", f"{report.generated_tokens:,}", "")
    table.add_row(
        "time saved",
        f"~{report.time_saved_seconds:.2f} s",
        "estimated from the time a computed token took",
    )
    used = report.pages_total - report.pages_free
    in_use = used / report.pages_total
    pinned = f"{report.pages_pinned:,} pinned, " if report.pages_pinned else ""
    table.add_row("pool use", f"{in_use:.1%}", _bar(in_use, "cyan"))
    table.add_row(
        "pages",
        f"{report.pages_total:,}",
        f"{report.pages_held:,} held, {report.pages_cached:,} cached, {pinned}"
        f"{report.pages_free:,} free; {report.page_size} tokens each",
    )
    if report.evicted_tokens or report.preemptions:
        table.add_row("tokens evicted", f"{report.evicted_tokens:,}", "")
        table.add_row("preemptions", f"{report.preemptions:,}", "")
    return table


def _prefixes(report: CacheReport, decode: Decode) -> RenderableType:
    if not report.top_prefixes:
        return Text("No prefix was hit yet.", style="dim")
    table = Table(
        title="Top shared prefixes",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tokens", justify="right")
    table.add_column("hits", justify="right")
    table.add_column("saved", justify="right", style="green")
    table.add_column("text: beginning … end", overflow="fold")
    least = LEAST_SHARE * sum(prefix.tokens_saved for prefix in report.top_prefixes)
    for prefix in report.top_prefixes:
        if prefix.tokens_saved < least:
            break
        table.add_row(
            f"{prefix.num_tokens:,}",
            f"{prefix.hits:,}",
            f"{prefix.tokens_saved:,}",
            Text(excerpt(prefix.token_ids, decode)),
        )
    return table


def excerpt(token_ids: Sequence[int], decode: Decode) -> str:
    """The text of a prefix on one line, its middle left out if it is long.

    Both ends stay, since prefixes of one conversation begin alike and differ in how they end.
    """
    if len(token_ids) <= 2 * ENOUGH_TOKENS:
        text = one_line(decode(token_ids))
        if len(text) <= START_CHARACTERS + END_CHARACTERS + 3:
            return text
        start = end = text
    else:
        start = one_line(decode(token_ids[:ENOUGH_TOKENS]))
        end = one_line(decode(token_ids[-ENOUGH_TOKENS:]))
    return f"{start[:START_CHARACTERS].rstrip()} … {end[-END_CHARACTERS:].lstrip()}"


def one_line(text: str) -> str:
    """Text with line breaks and other unprintable characters made visible."""
    return "".join(
        "↵" if character == "\n" else character if character.isprintable() else "·"
        for character in text.replace("\r\n", "\n").replace("\n\n", "\n")
    )


def _bar(share: float, style: str) -> Text:
    filled = round(BAR_WIDTH * min(max(share, 0.0), 1.0))
    return Text.assemble(("█" * filled, style), ("░" * (BAR_WIDTH - filled), "dim"))
