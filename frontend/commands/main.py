"""The command `coppice`: reads the arguments and runs the command that they name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from coppice import __version__
from coppice.frontend.commands import chat, demo, generate, replay, report, serve
from coppice.frontend.commands.machine import bench, cache, models, plan, simulate
from coppice.frontend.commands.parser import CommandParser
from coppice.frontend.errors import EngineStopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 for a failure, 2 for a wrong argument."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # characters that the encoding lacks become "?"
            stream.reconfigure(errors="replace")
    parsed = build_parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except ValueError as error:
        print(f"coppice {parsed.command}: error: {error}", file=sys.stderr)
        return 2
    except EngineStopped as error:  # killed while it loaded the model, for want of memory perhaps
        print(f"coppice {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stderr.close()
        return 141
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="coppice",
        description="An LLM engine in which a radix tree owns the KV cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    everyday = (generate, chat, serve, report, cache)
    for command in (*everyday, demo, replay, simulate, bench, plan, models):
        command.add_to(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version, and whether the tree is compiled, which only this has to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from coppice.runtime.startup.build import tree_state

        print(f"coppice {__version__}, {tree_state()}")
        parser.exit()
