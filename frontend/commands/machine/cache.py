"""`coppice cache`: looks at the folder of a disk cache, while a server has it or none does."""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.options import Subparsers

if TYPE_CHECKING:
    from rich.console import Console


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice cache`."""
    parser = commands.add_parser(
        "cache",
        help="look at the folder of a disk cache: list, count, verify and tidy it",
        description="Looks at the folder of --disk-cache, whether or not a server has it.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=type(parser)
    )
    kinds: dict[str, tuple[str, Callable[[argparse.Namespace], int]]] = {
        "ls": ("list prefixes, those used most first", _ls),
        "stat": ("count pages, tokens, bytes and hits", _stat),
        "verify": ("read every page and say which are damaged; status 1 if any is", _verify),
        "gc": ("remove what is of no use any more; no server may have the folder", _gc),
    }
    for name, (text, run) in kinds.items():
        action = actions.add_parser(
            name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False
        )
        action.add_argument("folder", metavar="DIR", help="the folder of --disk-cache")
        if name == "ls":
            action.add_argument(
                "--limit",
                type=int,
                default=20,
                metavar="N",
                help="most prefixes that are listed (default: %(default)s)",
            )
        if name == "gc":
            action.add_argument(
                "--max-size",
                metavar="SIZE",
                help="remove the oldest pages, too, until the rest takes no more, such as 50GiB",
            )
            action.add_argument(
                "--verify", action="store_true", help="read every page, and remove damaged ones"
            )
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(action_run=run, run=_run)
        add_foreign_options(action)
    add_foreign_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Runs an action; returns its exit status. Raises ValueError for a wrong argument."""
    from coppice.runtime.tiers.store import TierFailed

    try:
        status: int = arguments.action_run(arguments)
    except TierFailed as error:
        print(f"coppice cache: {error}", file=sys.stderr)
        return 1
    except (OSError, sqlite3.Error) as error:
        print(f"coppice cache: {arguments.folder!r} can't be read: {error}", file=sys.stderr)
        return 1
    return status


def _ls(arguments: argparse.Namespace) -> int:
    from coppice.runtime.tiers.disk.contents import prefixes

    if arguments.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {arguments.limit}")
    found, count = prefixes(Path(arguments.folder), arguments.limit)
    if arguments.json:
        return _print_json({"prefixes": [asdict(each) for each in found], "count": count})
    from rich.table import Table

    from coppice.runtime.tiers.sizes import size_text

    table = Table(box=None, pad_edge=False)
    for title in ("hits", "tokens", "of them here", "size", "followed by", "used"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("begins with tokens", no_wrap=True)
    for each in found:
        table.add_row(
            f"{each.hits:,}",
            f"{each.length:,}",
            f"{each.tokens:,}",
            size_text(each.size),
            f"{each.next:,}",
            "never" if each.used is None else _ago(time.time() - each.used),
            ("… " if each.after else "") + " ".join(map(str, each.starts)),
        )
    console = _console()
    console.print(table)
    if count > len(found):
        console.print(f"{len(found)} of {count:,} prefixes; --limit N shows more")
    return 0


def _stat(arguments: argparse.Namespace) -> int:
    from coppice.runtime.tiers.disk.contents import totals

    found = totals(Path(arguments.folder))
    if arguments.json:
        return _print_json(asdict(found) | {"models": [each._asdict() for each in found.models]})
    from coppice.runtime.tiers.sizes import size_text

    lines = [
        f"format {found.version}, "
        + (f"in use by process {found.owner}" if found.owner else "in use by no server"),
        f"{_several(found.pages, 'page')} with {found.tokens:,} tokens: {size_text(found.size)}, "
        f"{found.hits:,} hits",
        f"{_several(found.segments, 'segment')}: {size_text(found.segment_size)}, "
        f"{found.empty_segments:,} of them without pages",
        f"index: {size_text(found.index_size)}",
    ]
    if len(found.models) > 1:
        lines += [
            f"- pages of {size_text(each.size)}: {each.pages:,} with {each.tokens:,} tokens, "
            f"{each.hits:,} hits"
            for each in found.models
        ]
    lines += [
        f"left by an older version: {name}, {size_text(size)}; gc removes it"
        for name, size in found.older.items()
    ]
    _console().print("\n".join(lines), soft_wrap=True)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from coppice.runtime.tiers.disk.contents import damages

    pages, wrong = 0, []
    for each in damages(Path(arguments.folder)):
        pages += 1
        if each is not None:
            wrong.append(each)
    if arguments.json:
        _print_json({"pages": pages, "damaged": [asdict(each) for each in wrong]})
        return 1 if wrong else 0
    console = _console()
    for each in wrong:
        why = "the file is missing" if each.missing else "damaged"
        console.print(f"{each.file} at {each.offset:,}: {each.tokens} tokens, {why}")
    console.print(f"{pages:,} pages, {len(wrong):,} damaged")
    if wrong:
        console.print("A server computes them again; `coppice cache gc DIR --verify` removes them")
    return 1 if wrong else 0


def _gc(arguments: argparse.Namespace) -> int:
    from coppice.runtime.tiers.disk.tidying import tidy
    from coppice.runtime.tiers.sizes import parse_size, size_text

    size = arguments.max_size
    most = None if size is None else parse_size("--max-size", size)
    done = tidy(Path(arguments.folder), most, verify=arguments.verify)
    if arguments.json:
        return _print_json(asdict(done))
    _console().print(
        f"removed {_several(done.pages, 'page')}, {done.damaged:,} damaged ones, "
        f"{_several(done.segments, 'segment')} and {_several(done.older, 'folder')} of older "
        f"versions; freed {size_text(done.freed)}",
        soft_wrap=True,
    )
    return 0


def _several(count: int, what: str) -> str:
    """A number of things."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def _print_json(value: dict[str, Any]) -> int:
    print(json.dumps(value, indent=1))
    return 0


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _ago(seconds: float) -> str:
    """A time before now, in the largest unit of which there are two."""
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{max(0, seconds):.0f} s ago"
