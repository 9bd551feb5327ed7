"""`coppice report`: the report of a running server's cache, or a saved one."""

from __future__ import annotations

import argparse
import os
import sys

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.options import Subparsers, check_scheme


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice report`."""
    parser = commands.add_parser(
        "report",
        help="show what a server's cache saves and why tokens miss, live",
        description="Shows the report of a running server, every few seconds until interrupted, "
        "or one that was saved from its /cache/report.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="URL-or-FILE", help="a server, such as http://localhost:8000, or a file"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="time between two updates (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print it once, as if the output were no terminal"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("COPPICE_API_KEY"),
        metavar="KEY",
        help="key for the server (default: the environment variable COPPICE_API_KEY)",
    )
    parser.set_defaults(run=run)
    add_foreign_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises ValueError for a wrong argument."""
    from rich.console import Console

    from coppice.frontend.commands import watch

    check_scheme("URL-or-FILE", arguments.source)
    try:
        watch.run(
            Console(highlight=False),
            arguments.source,
            interval=arguments.interval,
            once=arguments.once,
            api_key=arguments.api_key,
        )
    except watch.ReportUnavailable as error:
        print(f"coppice report: {error}", file=sys.stderr)
        return 1
    return 0
