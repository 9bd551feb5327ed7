"""The work of `coppice replay`: reads a trace, replays it, and prints and writes the report."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from coppice.frontend.replay.encode import describe, encode_plan, encode_replay
from coppice.frontend.replay.tiers import (
    Measured,
    TierOptions,
    TierPlan,
    encode_tier_sizes,
    plan_tiers,
)
from coppice.frontend.replay.trace import Encode, Trace, read_trace
from coppice.frontend.report.terminal import render_totals
from coppice.frontend.report.words import token_text
from coppice.runtime.offline.replay import POLICY_NAMES, Replay, ReplayOptions, ReplayReport
from coppice.runtime.offline.tiers import TierSize

if TYPE_CHECKING:
    from coppice.frontend.text.tokenizer import Tokenizer

UNLIMITED = "unlimited"


def run(
    console: Console,
    path: Path,
    *,
    format: str,
    eviction_policy: str,
    pool: str,
    page_size: int,
    concurrency: int,
    tokenizer: str | None,
    limit: int | None,
    json_file: Path | None,
    html_file: Path | None,
    compare: bool = True,
    tiers: TierOptions | None = None,
) -> None:
    """Checks the trace, replays it, prints the report and writes the files.

    The arguments are the options of `coppice replay`; `compare`: the requests are replayed under
    the other eviction policies, too, if anything was evicted; with `tiers`, all combinations of
    their sizes instead. Raises ValueError before the replay if the trace is malformed, a request
    does not fit the pool, or an option is wrong.
    """
    # Options are checked before the trace is read, which may take minutes.
    pool_tokens = _pool_tokens(pool)
    ReplayOptions(pool_tokens or 1, page_size, eviction_policy, concurrency)
    check_files(path, json_file, html_file)
    tier_plan = plan_tiers(tiers or TierOptions())
    loaded = None if tokenizer is None else _load(tokenizer)
    with console.status(f"reading {path}"):
        trace = read_trace(
            path, format=format, encode=_encode(loaded) if loaded else None, limit=limit
        )
    options = _options(trace, pool_tokens, page_size, eviction_policy, concurrency)
    if options.pages * page_size < trace.longest:
        raise ValueError(
            f"pool must have at least {trace.longest:,} tokens, for the request of "
            f"{path}:{trace.longest_line}, got {pool_tokens:,}"
        )
    plan = encode_plan(trace, options, unlimited=pool_tokens is None)
    console.print(Text(trace.path.name, "bold"), soft_wrap=True)
    console.print(Text(describe(plan)))
    console.print()
    replayed = replay(console, trace, options, tier_plan)
    others = {}
    if compare and replayed.evicted_tokens and tier_plan is None:
        others = compared(console, trace, options)
    report = encode_replay(plan, replayed, token_text(loaded), others)
    report["tier_sizes"] = None
    if tier_plan is not None:
        measured = sizes_measured(console, trace, options, tier_plan)
        report["tier_sizes"] = encode_tier_sizes(tier_plan, measured, options.pool_tokens)
    console.print(render_totals(report, full=True))
    if json_file is not None:
        write(json_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        console.print(Text(f"JSON: {json_file}"), soft_wrap=True)
    if html_file is not None:
        from coppice.frontend.replay.page import render_page  # takes a while to import

        write(html_file, render_page(report))
        console.print(Text(f"page: {html_file}"), soft_wrap=True)


def replay(
    console: Console, trace: Trace, options: ReplayOptions, tiers: TierPlan | None = None
) -> ReplayReport:
    """Replays the whole trace, with a progress bar if the console is a terminal.

    With the first size of each of the `tiers`.

    Raises ValueError if the pool's records do not fit into memory, MalformedTrace if the trace has
    changed since it was checked.
    """
    machine = _machine(options, tiers, () if tiers is None else tiers.first)
    _run(console, machine, trace, "replaying")
    return machine.report()


def sizes_measured(
    console: Console, trace: Trace, options: ReplayOptions, plan: TierPlan
) -> list[Measured]:
    """What the same requests hit with each combination of tiers, from no tier on."""
    found = []
    for tiers in plan.combinations():
        machine = _machine(options, plan, tiers, account=False)
        names = " and ".join(
            f"{each.name} {'unlimited' if each.tokens is None else f'{each.tokens:,}'}"
            for each in tiers
        )
        _run(console, machine, trace, f"the same with {names or 'no tier'}")
        seconds = plan.rates.compute is not None and plan.rates.token_bytes is not None
        kept: dict[str, int] = {}
        saved = 0.0
        if machine.tiers is not None:
            kept, saved = machine.tiers.kept_tokens(), machine.tiers.told.saved_seconds
        found.append(Measured(tiers, machine.hit_rate, kept, saved if seconds else None))
    return found


def compared(console: Console, trace: Trace, options: ReplayOptions) -> dict[str, float]:
    """The hit rates of the other eviction policies on the same requests, by name."""
    rates = {}
    for policy in POLICY_NAMES:
        if policy != options.eviction_policy:
            machine = _machine(replace(options, eviction_policy=policy), account=False)
            _run(console, machine, trace, f"the same with {policy}")
            rates[policy] = machine.hit_rate
    return rates


def _machine(
    options: ReplayOptions,
    plan: TierPlan | None = None,
    tiers: Sequence[TierSize] = (),
    *,
    account: bool = True,
) -> Replay:
    try:
        return Replay(options, tiers, None if plan is None else plan.rates, account=account)
    except MemoryError:
        raise ValueError(
            f"pool: the records of {options.pages:,} pages do not fit into memory"
        ) from None


def _run(console: Console, machine: Replay, trace: Trace, name: str) -> None:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=34),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(name, total=trace.count)
        for finished in machine.run(trace.requests(), trace.count):
            bar.update(task, completed=finished)


def _options(
    trace: Trace, pool_tokens: int | None, page_size: int, eviction_policy: str, concurrency: int
) -> ReplayOptions:
    if pool_tokens is not None:
        return ReplayOptions(pool_tokens, page_size, eviction_policy, concurrency)
    # A request needs at most its tokens, the rest of its last page, and a copy of a shared page.
    everything = trace.prompt_tokens + trace.output_tokens + 2 * page_size * trace.count
    return ReplayOptions(
        everything, page_size, eviction_policy, concurrency, max(1, everything // 16)
    )


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


def load_encoder(tokenizer: str | None) -> Encode | None:
    """What a trace's texts are encoded with; None without a tokenizer."""
    return None if tokenizer is None else _encode(_load(tokenizer))


def check_files(trace: Path | None, json_file: Path | None, html_file: Path | None) -> None:
    """Raises ValueError if a report can't be written, or would be written over another file."""
    for name, file in (("json", json_file), ("html", html_file)):
        if file is not None:
            _check_writable(name, file, trace)
    if json_file is not None and html_file is not None and _same(json_file, html_file):
        raise ValueError(f"html must not be the file of json, got {str(html_file)!r}")


def _check_writable(name: str, file: Path, trace: Path | None) -> None:
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"{name} must be a file in a directory that exists, got {str(file)!r}")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ValueError(f"{name} must be a file that may be written, got {str(file)!r}")
    if trace is not None and _same(file, trace):
        raise ValueError(f"{name} must not be the trace itself, got {str(file)!r}")


def _same(one: Path, other: Path) -> bool:
    """Whether both paths name one file, which need not exist."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def write(file: Path, text: str) -> None:
    """Writes a report. Raises ValueError if that fails."""
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written: {error.strerror}") from error
