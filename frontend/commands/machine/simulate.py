"""`coppice simulate`: what static, continuous and paged batching make of the same requests."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.options import Subparsers
from coppice.runtime.config import EngineConfig
from coppice.runtime.planning.steps import CPU_TOKENS


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice simulate`."""
    parser = commands.add_parser(
        "simulate",
        help="compare static, continuous, chunked and prefix-cached batching, without a model",
        description="Serves the same requests in four ways on a model of a machine, and compares "
        "throughput, latencies, and use of the memory. Chunked and prefix are this engine's own "
        "scheduler and tree.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    defaults = {option.name: option for option in fields(EngineConfig)}
    group = parser.add_argument_group("requests")
    group.add_argument(
        "trace", type=Path, nargs="?", metavar="TRACE", help="a trace, as `coppice replay` reads it"
    )
    group.add_argument("--requests", type=int, metavar="N", help="instead of a trace: how many")
    group.add_argument(
        "--lengths",
        metavar="LIST",
        help="their tokens as PROMPT:OUTPUT, each a number or a range such as 100-400; several, "
        "separated by commas, are taken in turn",
    )
    group.add_argument(
        "--shared", type=int, metavar="N", help="tokens with which all prompts begin (default: 0)"
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="X",
        help="requests a second, at random times (default: the trace's times, else all at once)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of random lengths and times (default: 0)"
    )
    group.add_argument(
        "--format", default="auto", metavar="NAME", help="of the trace: auto, mooncake or jsonl"
    )
    group.add_argument("--tokenizer", metavar="MODEL", help="model whose tokenizer reads texts")
    group.add_argument("--limit", type=int, metavar="N", help="read only the first N requests")
    group = parser.add_argument_group("machine")
    group.add_argument("--machine", type=Path, metavar="FILE", help="as `coppice bench` wrote it")
    group.add_argument(
        "--step-ms", type=float, metavar="X", help="milliseconds of a step (default: 10)"
    )
    group.add_argument(
        "--prefill-rate",
        type=float,
        metavar="X",
        help="prompt tokens a second, beside that; may be inf (default: 20000)",
    )
    group.add_argument(
        "--row-ms",
        type=float,
        metavar="X",
        help="milliseconds that a decoding sequence adds to a step (default: 0.05)",
    )
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--pool",
        type=int,
        default=100_000,
        metavar="TOKENS",
        help="room for the KV of requests (default: 100000)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="most requests that run at once (default: 64)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens that a place reserves where there are no pages (default: those of the longest "
        "request)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=CPU_TOKENS,
        metavar="N",
        help=f"most tokens in one step (default: {CPU_TOKENS})",
    )
    for name in ("page_size", "eviction_policy"):
        option = defaults[name]
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=type(option.default),
            default=option.default,
            metavar="N" if isinstance(option.default, int) else "NAME",
            help=f"{option.metadata['help']} (default: {option.default})",
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the result as a page that opens offline"
    )
    add_foreign_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises ValueError for a wrong argument."""
    from rich.console import Console

    from coppice.frontend.simulate import machine
    from coppice.frontend.simulate import run as simulation
    from coppice.runtime.offline.stages import StageOptions

    options = StageOptions(
        pool_tokens=arguments.pool,
        page_size=arguments.page_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        eviction_policy=arguments.eviction_policy,
    )
    parts = (arguments.step_ms, arguments.prefill_rate, arguments.row_ms)
    if arguments.machine is None:
        model = machine.given(*parts)
    elif any(part is not None for part in parts):
        raise ValueError("machine has all times: step-ms, prefill-rate and row-ms go without it")
    else:
        model = machine.read_machine(arguments.machine)
    source, arrivals = simulation.requests_of(
        arguments.trace,
        requests=arguments.requests,
        lengths=arguments.lengths,
        shared=arguments.shared,
        rate=arguments.rate,
        seed=arguments.seed,
        format=arguments.format,
        tokenizer=arguments.tokenizer,
        limit=arguments.limit,
    )
    simulation.run(
        Console(highlight=False),
        source,
        arrivals,
        model,
        options,
        trace=arguments.trace,
        json_file=arguments.json,
        html_file=arguments.html,
    )
    return 0
