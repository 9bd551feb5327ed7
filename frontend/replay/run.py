"""The command `coppice replay`: a trace through the real tree and scheduler, and what it tells."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from coppice.frontend.replay.trace import Encode, Trace, read_trace
from coppice.frontend.report.tables import render_accounts, render_prefixes
from coppice.frontend.report.words import Decode, token_text
from coppice.runtime.offline.replay import Replay, ReplayOptions, ReplayReport

if TYPE_CHECKING:
    from coppice.frontend.text.tokenizer import Tokenizer

UNLIMITED = "unlimited"
_ENDS = 32  # token ids of a prefix that the JSON has of either end


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace, what its replay has shown, and how its tokens are read."""

    trace: Trace
    report: ReplayReport
    unlimited: bool
    decode: Decode


def run(
    console: Console,
    path: Path,
    *,
    format: str,
    policy: str,
    pool: str,
    page_size: int,
    concurrency: int,
    tokenizer: str | None,
    limit: int | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Checks the trace, replays it, prints the report and writes the files.

    Raises ValueError, with nothing replayed, for a trace that is not sound, for a request that
    does not fit the pool, and for bad options.
    """
    # Whatever can be refused is refused before the trace is read.
    pool_tokens = _pool_tokens(pool)
    ReplayOptions(pool_tokens or 1, page_size, policy, concurrency)
    for name, file in (("json", json_file), ("html", html_file)):
        if file is not None:
            _check_writable(name, file, path)
    if json_file is not None and html_file is not None and _same(json_file, html_file):
        raise ValueError(f"html must not be the file of json, got {str(html_file)!r}")
    loaded = None if tokenizer is None else _load(tokenizer)
    with console.status(f"reading {path}"):
        trace = read_trace(
            path, format=format, encode=_encode(loaded) if loaded else None, limit=limit
        )
    options = _options(trace, pool_tokens, page_size, policy, concurrency)
    if options.pages * page_size < trace.longest:
        raise ValueError(
            f"pool must have at least {trace.longest:,} tokens, for the request of "
            f"{path}:{trace.longest_line}, got {pool_tokens:,}"
        )
    _print_head(console, trace, options, pool_tokens is None)
    report = replay(console, trace, options)
    replayed = Replayed(trace, report, pool_tokens is None, token_text(loaded))
    _print_report(console, replayed)
    if json_file is not None:
        _write(json_file, json.dumps(to_dict(replayed), indent=1, ensure_ascii=False) + "\n")
        console.print(Text(f"JSON: {json_file}"), soft_wrap=True)
    if html_file is not None:
        from coppice.frontend.replay.page import render_page

        _write(html_file, render_page(replayed))
        console.print(Text(f"page: {html_file}"), soft_wrap=True)


def replay(console: Console, trace: Trace, options: ReplayOptions) -> ReplayReport:
    """Replays all of a trace, with a progress bar if the console is a terminal."""
    columns = (
        TextColumn("[bold]replaying"),
        BarColumn(bar_width=34),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
    )
    try:
        machine = Replay(options)
    except MemoryError:
        raise ValueError(
            f"pool: the books of {options.pages:,} pages do not fit into memory"
        ) from None
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=trace.count)
        for finished in machine.run(trace.requests(), trace.count):
            bar.update(task, completed=finished)
    return machine.report()


def _options(
    trace: Trace, pool_tokens: int | None, page_size: int, policy: str, concurrency: int
) -> ReplayOptions:
    if pool_tokens is not None:
        return ReplayOptions(pool_tokens, page_size, policy, concurrency)
    # A request takes at most its tokens, the rest of a page at its end, and a copy of a page.
    everything = trace.prompt_tokens + trace.output_tokens + 2 * page_size * trace.count
    return ReplayOptions(everything, page_size, policy, concurrency, max(1, everything // 16))


def _pool_tokens(pool: str) -> int | None:
    """Tokens of the pool; None: unlimited."""
    if pool == UNLIMITED:
        return None
    try:
        tokens = int(pool)
    except ValueError:
        tokens = 0
    if tokens < 1:
        raise ValueError(f"pool must be unlimited or at least 1 token, got {pool!r}")
    return tokens


def _load(name: str) -> Tokenizer:
    from coppice.frontend.text.tokenizer import Tokenizer, model_source  # takes seconds to import

    return Tokenizer(model_source(name))


def _encode(tokenizer: Tokenizer) -> Encode:
    def encode(text: str, prompt: bool) -> list[int]:
        return (tokenizer.encode if prompt else tokenizer.encode_more)(text)

    return encode


def _check_writable(name: str, file: Path, trace: Path) -> None:
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"{name} must be a file in a directory that exists, got {str(file)!r}")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ValueError(f"{name} must be a file that may be written, got {str(file)!r}")
    if _same(file, trace):
        raise ValueError(f"{name} must not be the trace itself, got {str(file)!r}")


def _same(one: Path, other: Path) -> bool:
    """Whether both are one file, or will be."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written: {error.strerror}") from error


# -- the terminal ------------------------------------------------------------------------------


def describe(trace: Trace, options: ReplayOptions, unlimited: bool) -> list[str]:
    """What is replayed and how, in a few short phrases."""
    concurrency = options.concurrency
    return [
        f"{trace.count:,} request{'s' if trace.count > 1 else ''}",
        "unlimited pool" if unlimited else f"pool of {options.pages * options.page_size:,} tokens",
        f"pages of {options.page_size}",
        options.policy,
        "one after another" if concurrency == 1 else f"up to {concurrency:,} at once",
    ]


def _print_head(console: Console, trace: Trace, options: ReplayOptions, unlimited: bool) -> None:
    console.print(Text(trace.path.name, "bold"), soft_wrap=True)
    console.print(Text(" · ".join(describe(trace, options, unlimited))))
    console.print()


def _print_report(console: Console, replayed: Replayed) -> None:
    report, decode = replayed.report, replayed.decode
    counts = report.accounts.overall.since_start
    lines = [
        ("requests", counts.requests),
        ("prompt tokens", counts.prompt_tokens),
        ("hit tokens", counts.hit_tokens),
        ("output tokens", report.output_tokens),
        ("tokens evicted", report.evicted_tokens),
        ("preemptions", report.preemptions),
    ]
    parts = [Text(f"{name:<15}  {value:>11,}") for name, value in lines]
    for part in parts:
        part.stylize("bold", 0, 15)
    console.print(Group(*parts))
    options = report.options
    pool = options.pages * options.page_size
    console.print(render_accounts(report.accounts, options.policy, decode, pool_tokens=pool))
    console.print()
    console.print(render_prefixes(report.top_prefixes, decode))


# -- JSON --------------------------------------------------------------------------------------


def to_dict(replayed: Replayed) -> dict[str, Any]:
    """All that the replay has shown, as JSON takes it."""
    trace, report, decode = replayed.trace, replayed.report, replayed.decode
    options = asdict(report.options)
    return {
        "trace": {
            "file": trace.path.name,
            "format": trace.format,
            "requests": trace.count,
            "prompt_tokens": trace.prompt_tokens,
            "output_tokens": trace.output_tokens,
        },
        "options": options | {"unlimited": replayed.unlimited},
        "accounts": report.accounts.to_dict(),
        "evicted_tokens": report.evicted_tokens,
        "preemptions": report.preemptions,
        "cached_tokens": report.cached_tokens,
        "pages_total": report.pages_total,
        "pages_free": report.pages_free,
        "over_time": [
            {
                "seconds": stretch.seconds,
                "requests": stretch.counts.requests,
                "prompt_tokens": stretch.counts.prompt_tokens,
                "hit_tokens": stretch.counts.hit_tokens,
                "hit_rate": stretch.counts.hit_rate,
                "ideal_hit_rate": stretch.counts.ideal_hit_rate,
                "causes": stretch.counts.causes,
                "evicted_tokens": stretch.evicted_tokens,
            }
            for stretch in report.stretches
        ],
        "top_prefixes": [
            {
                "num_tokens": prefix.num_tokens,
                "hits": prefix.hits,
                "tokens_saved": prefix.tokens_saved,
                "resident_pages": prefix.resident_pages,
                "idle_seconds": prefix.idle_seconds,
                "first_token_ids": prefix.token_ids[:_ENDS],
                "last_token_ids": prefix.token_ids[-_ENDS:],
                "first_text": decode(prefix.token_ids[:_ENDS]),
                "last_text": decode(prefix.token_ids[-_ENDS:]),
            }
            for prefix in report.top_prefixes
        ],
        "nodes": [asdict(node) for node in report.nodes],
    }
