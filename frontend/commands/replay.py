"""`coppice replay`: what the cache would do for a trace of requests."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.options import Subparsers
from coppice.runtime.config import EngineConfig


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice replay`."""
    parser = commands.add_parser(
        "replay",
        help="show what the cache would do for a trace of requests, without a model",
        description="Replays a trace of requests through the real tree and scheduler, without a "
        "model, and reports what the cache did and why tokens missed.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    defaults = {option.name: option for option in fields(EngineConfig)}
    policy, page_size = defaults["eviction_policy"], defaults["page_size"]
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a file with one request per line: Mooncake's format, or JSON with a prompt of token "
        "ids or text (keys prompt, output or output_tokens, namespace, timestamp in seconds)",
    )
    parser.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help="auto, mooncake or jsonl (default: auto, which decides by the first line)",
    )
    parser.add_argument(
        "--eviction-policy",
        default=policy.default,
        metavar="NAME",
        help=f"{policy.metadata['help']} (default: {policy.default})",
    )
    # Its name in earlier versions.
    parser.add_argument("--policy", dest="eviction_policy", help=argparse.SUPPRESS)
    parser.add_argument(
        "--pool",
        default="1000000",
        metavar="TOKENS",
        help="size of the KV cache in tokens, or unlimited (default: %(default)s)",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        default=page_size.default,
        metavar="N",
        help=f"{page_size.metadata['help']} (default: {page_size.default})",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=1,
        metavar="N",
        help="most requests that run at once, and most that wait (default: 1)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="model whose tokenizer converts texts: a directory, a hub id or `demo`",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="read only the first N requests")
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replay under the other eviction policies, too, and name one that hits more; takes "
        "several times as long (default: on)",
    )
    parser.add_argument(
        "--host-cache",
        metavar="SIZE",
        help="simulate main memory as a tier of this size: tokens, bytes such as 64GiB (with "
        "--model), or unlimited; several sizes, divided by commas, are compared",
    )
    parser.add_argument(
        "--disk-cache",
        nargs="?",
        const="unlimited",
        metavar="SIZE",
        help="the same for a disk; without a size it is unlimited",
    )
    parser.add_argument(
        "--shared-cache",
        nargs="?",
        const="unlimited",
        metavar="SIZE",
        help="the same for a server that replicas share, of which this one sees what it stored",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="model whose KV the tiers keep, for its bytes a token"
    )
    parser.add_argument(
        "--kv-bytes-per-token", type=int, metavar="N", help="bytes of a token's KV, without a model"
    )
    parser.add_argument(
        "--prefill-rate",
        type=float,
        metavar="N",
        help="tokens of prompts that are computed a second, so that tiers are asked only where "
        "loading is faster, and seconds are told",
    )
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="take that rate from a file of coppice bench"
    )
    for tier, rate in (("host", "20GB"), ("disk", "2GB"), ("shared", "1GB")):
        parser.add_argument(
            f"--{tier}-rate",
            metavar="SIZE",
            help=f"bytes that the tier reads a second (default: {rate})",
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as a page that opens offline"
    )
    add_foreign_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises ValueError for a wrong argument."""
    from rich.console import Console

    from coppice.frontend.replay import run as replay
    from coppice.frontend.replay.tiers import TierOptions
    from coppice.frontend.simulate.machine import read_machine

    rate = arguments.prefill_rate
    if arguments.machine is not None:
        if rate is not None:
            raise ValueError("machine must not be given with prefill-rate: it has one")
        token = read_machine(arguments.machine).token
        rate = 1 / token if token else None

    replay.run(
        Console(highlight=False),
        arguments.trace,
        format=arguments.format,
        eviction_policy=arguments.eviction_policy,
        pool=arguments.pool,
        page_size=arguments.page_size,
        concurrency=arguments.concurrency,
        tokenizer=arguments.tokenizer,
        limit=arguments.limit,
        json_file=arguments.json,
        html_file=arguments.html,
        compare=arguments.compare,
        tiers=TierOptions(
            host=arguments.host_cache,
            disk=arguments.disk_cache,
            shared=arguments.shared_cache,
            model=arguments.model,
            token_bytes=arguments.kv_bytes_per_token,
            prefill_rate=rate,
            rates={
                tier: rate
                for tier, rate in (
                    ("host", arguments.host_rate),
                    ("disk", arguments.disk_rate),
                    ("shared", arguments.shared_rate),
                )
                if rate is not None
            },
        ),
    )
    return 0
