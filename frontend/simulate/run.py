"""The work of `coppice simulate`: reads or makes requests, simulates, prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coppice.frontend.replay.run import check_files, load_encoder, write
from coppice.frontend.replay.trace import read_trace
from coppice.frontend.report.words import Report
from coppice.frontend.simulate import load, words
from coppice.frontend.simulate.encode import MEANINGS, encode_simulation
from coppice.runtime.offline.machine import Machine
from coppice.runtime.offline.simulation import Arrival
from coppice.runtime.offline.stages import STAGES, StageOptions, check, simulate


def requests_of(
    trace: Path | None,
    *,
    requests: int | None,
    lengths: str | None,
    shared: int | None,
    rate: float | None,
    seed: int,
    format: str,
    tokenizer: str | None,
    limit: int | None,
) -> tuple[str, list[Arrival]]:
    """A name for the requests, and the requests. The arguments are the command's options.

    Raises ValueError if both a trace and lengths are given or neither is, or one is wrong.
    """
    if trace is None:
        if requests is None or lengths is None:
            raise ValueError("trace: none given; give one, or --requests N with --lengths")
        for name, value in (("tokenizer", tokenizer), ("limit", limit)):
            if value is not None:
                raise ValueError(f"{name} is for a trace, and none is given, got {value!r}")
        arrivals = load.made(requests, load.read_lengths(lengths), shared=shared or 0, seed=seed)
        source = f"{requests:,} requests of {lengths} tokens"
        source += f", {shared:,} of them shared" if shared else ""
    else:
        given = (("requests", requests), ("lengths", lengths), ("shared", shared))
        for name, made in given:
            if made is not None:
                raise ValueError(f"{name} makes requests, but a trace is given, too, got {made!r}")
        encode = load_encoder(tokenizer)
        found = read_trace(trace, format=format, encode=encode, limit=limit)
        arrivals, source = load.of_trace(found), trace.name
    if rate is not None:
        arrivals = load.at_rate(arrivals, rate, seed)
    return source, arrivals


def run(
    console: Console,
    source: str,
    arrivals: list[Arrival],
    machine: Machine,
    options: StageOptions,
    *,
    trace: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Simulates all stages, prints the table and writes the files.

    `trace` is the file of the requests, which is never written over. Raises ValueError before the
    simulation if a request does not fit, or a file can't be written.
    """
    check_files(trace, json_file, html_file)
    reserved = check(arrivals, options)
    stages = []
    for name in STAGES:
        with console.status(f"simulating: {name}"):
            stages.append(simulate(name, arrivals, machine, options))
    report = encode_simulation(source, arrivals, options, reserved, machine, stages)
    show(console, report)
    if json_file is not None:
        write(json_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        console.print(Text(f"JSON: {json_file}"), soft_wrap=True)
    if html_file is not None:
        from coppice.frontend.simulate.page import render_page  # takes a while to import

        write(html_file, render_page(report))
        console.print(Text(f"page: {html_file}"), soft_wrap=True)


def show(console: Console, report: Report) -> None:
    """Prints the simulation as a table of at most 80 columns."""
    console.print(Text(report["requests"]["source"], "bold"), soft_wrap=True)
    console.print(Text(words.describe(report)))
    console.print(Text(words.machine_words(report), "dim"))
    console.print()
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for stage in report["stages"]:
        table.add_column(stage["name"], justify="right", no_wrap=True)
    for name, values, _ in words.rows(report):
        table.add_row(name, *values)
    console.print(table)
    console.print()
    for name, meaning in MEANINGS.items():
        console.print(Text.assemble((f"{name:<11}", "bold"), (meaning, "dim")))
