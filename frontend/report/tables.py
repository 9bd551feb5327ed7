"""The cache's report for the terminal: what it saved, which prefixes did it, why tokens missed."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coppice.frontend.report.words import (
    CAUSE_NAMES,
    Decode,
    cause_meaning,
    causes,
    duration,
    memory_sentence,
)
from coppice.runtime.report.cache import CacheAccounts, CacheReport, NearMiss, SharedPrefix

BAR_WIDTH = 30
START_CHARACTERS = 20  # with the end and the sign between: what is left of 80 columns
END_CHARACTERS = 20
LEAST_SHARE = 0.01  # of all that was saved: prefixes below are not worth a row
ENOUGH_TOKENS = 64  # decoded from either end of a prefix: more than the characters shown need
NEAR_MISSES = 3
EXAMPLES = 2  # of each near miss
SHOWN_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
CAUSE_STYLES = {
    "cold": "bright_black",
    "evicted": "red",
    "diverged": "yellow",
    "namespace": "magenta",
    "in_flight": "blue",
    "last_token": "cyan",
    "prompt_logprobs": "green",
}


def render_report(report: CacheReport, decode: Decode) -> RenderableType:
    """The report as something that a rich console prints, readable at 80 columns and uncoloured.

    Args:
        report: the engine's counts.
        decode: token ids to text, special tokens kept visible.
    """
    parts = [_numbers(report), Text(), _causes(report.accounts), Text()]
    if report.evicted_tokens and report.accounts.curve:
        parts += [Text(memory_sentence(report.accounts, report.eviction_policy)), Text()]
    if report.accounts.near_misses:
        parts += [_near_misses(report.accounts.near_misses, decode), Text()]
    return Group(*parts, render_prefixes(report.top_prefixes, decode))


def _numbers(report: CacheReport) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    hit_rate = f"{report.hit_rate:.1%}"
    table.add_row("requests", f"{report.requests:,}", "")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}", "")
    table.add_row("hit tokens", f"{report.hit_tokens:,}", "prompt tokens found in the cache")
    table.add_row("hit rate", hit_rate, bar(report.hit_rate, "green"))
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
    table.add_row("pool use", f"{in_use:.1%}", bar(in_use, "cyan"))
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


def render_prefixes(top_prefixes: Sequence[SharedPrefix], decode: Decode) -> RenderableType:
    """The prefixes that saved the most, as a table of 80 columns at most."""
    if not top_prefixes:
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
    # Times are told by engines that keep accounts, and by replays.
    told = any(prefix.idle_seconds is not None for prefix in top_prefixes)
    if told:
        table.add_column("idle", justify="right", no_wrap=True)
    table.add_column("text: beginning … end", overflow="fold")
    for prefix in worth_showing(top_prefixes):
        table.add_row(
            f"{prefix.num_tokens:,}",
            f"{prefix.hits:,}",
            f"{prefix.tokens_saved:,}",
            *([duration(prefix.idle_seconds or 0.0, units=1)] if told else []),
            Text(excerpt(prefix.token_ids, decode)),
        )
    return table


def render_accounts(
    accounts: CacheAccounts, policy: str, decode: Decode, *, pool_tokens: int | None = None
) -> RenderableType:
    """Why tokens missed, and what could have been: for 80 columns, and uncoloured too.

    Args:
        accounts: the cache's own.
        policy: by which it evicts.
        decode: token ids to text, special tokens kept visible.
        pool_tokens: the pool, if the accounts were kept for one of another size.
    """
    counts = accounts.overall.since_start
    rates = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rates.add_column(style="bold", width=15)
    rates.add_column(justify="right", width=11)
    rates.add_column(style="dim")
    rates.add_row("hit rate", f"{counts.hit_rate:.1%}", bar(counts.hit_rate, "green"))
    ideal = counts.ideal_hit_rate
    rates.add_row("ideal hit rate", f"{ideal:.1%}", bar(ideal, "cyan"))
    rates.add_row("", "", "what an unlimited cache would have hit")
    parts: list[RenderableType] = [rates, Text(), _causes(accounts), Text()]
    if accounts.curve:
        parts.append(_curve(accounts, pool_tokens or accounts.pool_tokens))
        if pool_tokens in (None, accounts.pool_tokens):
            parts.append(Text(memory_sentence(accounts, policy)))
        parts.append(Text())
    parts.append(_near_misses(accounts.near_misses, decode))
    return Group(*parts)


def _titled(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        padding=(0, 2, 0, 0),
    )


def _causes(accounts: CacheAccounts) -> RenderableType:
    counts = accounts.overall.since_start
    if not counts.computed_tokens:
        return Text("No prompt token was computed yet.", style="dim")
    table = _titled("Why prompt tokens were computed")
    table.add_column(width=10)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for cause, tokens in causes(counts):
        share = tokens / counts.computed_tokens
        table.add_row(
            CAUSE_NAMES[cause],
            f"{share:.1%}",
            f"{tokens:,}",
            bar(share, CAUSE_STYLES[cause], width=9),
            cause_meaning(cause, counts),
        )
    return table


def _curve(accounts: CacheAccounts, pool_tokens: int) -> Table:
    table = _titled("Hit rate by size of the cache (LRU, estimated)")
    table.add_column(justify="right", width=13)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    for point in accounts.curve:
        if point.factor in SHOWN_FACTORS:
            times = f"{point.pool_tokens / pool_tokens:.3g}"
            present = times == "1"
            table.add_row(
                f"{point.pool_tokens:,}",
                f"× {times}",
                f"{point.hit_rate:.1%}",
                bar(point.hit_rate, "green" if present else "cyan"),
                style="bold" if present else None,
            )
    return table


def _near_misses(near_misses: Sequence[NearMiss], decode: Decode) -> RenderableType:
    """The costliest groups: what they share before and after a difference, and the difference."""
    if not near_misses:
        return Text("No near misses: no known text came behind another beginning.", style="dim")
    parts: list[RenderableType] = [
        Text("Near misses: text that was known, but behind another beginning", style="bold")
    ]
    for group in near_misses[:NEAR_MISSES]:
        said, table = near_miss(group.requests, group.tokens_cost, group.position)
        parts.append(said)
        if group.before:
            table.add_row("before", Text("… " + _end(one_line(decode(group.before)))))
        for example in group.differences[:EXAMPLES]:
            table.add_row("here", Text(one_line(decode(example.ours)) or "(nothing)", "red"))
            theirs = one_line(decode(example.theirs)) or "(nothing, or no longer cached)"
            table.add_row("there", Text(theirs, "green"))
        table.add_row("after", Text(one_line(decode(group.after)) + " …"))
        parts.append(table)
    if len(near_misses) > NEAR_MISSES:
        cost = sum(group.tokens_cost for group in near_misses[NEAR_MISSES:])
        parts.append(Text(f"and others that cost {cost:,} tokens", style="dim"))
    return Group(*parts)


def near_miss(requests: int, tokens_cost: int, position: int) -> tuple[Text, Table]:
    """What a group of near misses cost, and an empty table for the texts that differ."""
    said = Text(
        f"{requests:,} request{'s' if requests > 1 else ''} computed {tokens_cost:,} tokens again, "
        f"since they differ after {position:,}"
    )
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(style="dim", min_width=8)
    table.add_column(overflow="ellipsis", no_wrap=True, max_width=66)
    return said, table


def _end(text: str, width: int = 64) -> str:
    return text[-width:].lstrip()


def worth_showing(top_prefixes: Sequence[SharedPrefix]) -> list[SharedPrefix]:
    """Those that saved at least `LEAST_SHARE` of what all of them did."""
    least = LEAST_SHARE * sum(prefix.tokens_saved for prefix in top_prefixes)
    return [prefix for prefix in top_prefixes if prefix.tokens_saved >= least]


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


def bar(share: float, style: str, width: int = BAR_WIDTH) -> Text:
    filled = round(width * min(max(share, 0.0), 1.0))
    return Text.assemble(("█" * filled, style), ("░" * (width - filled), "dim"))
