"""`coppice demo`: the same questions with the cache on and off."""

from __future__ import annotations

import argparse

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.options import Subparsers


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice demo`."""
    parser = commands.add_parser(
        "demo",
        help="ask many questions about one shared document, with the cache on and off",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_foreign_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    from rich.console import Console

    from coppice.frontend.demo import run as demo

    demo.run(Console())
    return 0
