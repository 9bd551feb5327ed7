"""`coppice demo`: the same work with the cache on and off."""

from __future__ import annotations

import argparse

from coppice.frontend.commands.options import Subparsers


def add_to(commands: Subparsers) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "demo",
        help="many questions over one shared document, with the cache on and off",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """`coppice demo`."""
    from rich.console import Console

    from coppice.frontend.demo import run as demo

    demo.run(Console())
    return 0
