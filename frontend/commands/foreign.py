"""The command line's answers to options of vLLM and SGLang (see `python/foreign_options.py`)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

from coppice.frontend.python.foreign_options import (
    FOREIGN,
    SHORT,
    Foreign,
    Granted,
    Missing,
    Renamed,
    Reversed,
)


def flag(name: str) -> str:
    """The command line's form of an option's name."""
    return "--" + name.replace("_", "-")


def flags_of(name: str) -> list[str]:
    """The flags of one of our options: its own first, then those of other servers."""
    others = [
        other for other, each in FOREIGN.items() if isinstance(each, Renamed) and each.ours == name
    ]
    short = [each for each, other in SHORT.items() if other == name]
    return [flag(name), *map(flag, others), *short]


def add_foreign_options(parser: argparse.ArgumentParser) -> None:
    """Adds those that are none of the parser's own; its help does not show them. Call it last."""
    own = {action.dest for action in parser._actions}
    known = set(parser._option_string_actions)
    short = {name: [each for each in SHORT if SHORT[each] == name] for name in SHORT.values()}
    for name, foreign in FOREIGN.items():
        flags = [each for each in (flag(name), *short.get(name, ())) if each not in known]
        if flags:
            _add(parser, flags, foreign, own)


def _add(
    parser: argparse.ArgumentParser, flags: list[str], foreign: Foreign, own: set[str]
) -> None:
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    match foreign:
        case Renamed(ours):  # its flag is one of our option's, where the command has that
            say = f"it is {flag(ours)}" + (" of coppice serve" if ours not in own else "")
            parser.add_argument(*flags, nargs="?", action=_answering(_refused(say)), **hidden)
        case Reversed(ours) if ours in own:
            parser.add_argument(*flags, dest=ours, action="store_false", **hidden)
        case Granted(why, values):
            nargs = 0 if foreign.is_switch else None

            def granted(value: Any, why: str = why, values: tuple[str, ...] = values) -> str | None:
                if value in ([], *values):
                    return None
                return f"must be {' or '.join(values)} here, got {value!r}: {why}"

            parser.add_argument(*flags, nargs=nargs, action=_answering(granted, why), **hidden)
        case Missing(instead):
            parser.add_argument(*flags, nargs="?", action=_answering(_refused(instead)), **hidden)


def _refused(instead: str) -> Callable[[Any], str]:
    return lambda value: f"is not an option here: {instead}"


def _answering(refusal: Callable[[Any], str | None], note: str = "") -> type[argparse.Action]:
    """An action that refuses the value with a text, or goes on with a note on standard error."""

    class Answering(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            text = refusal(values)
            if text is not None:
                parser.error(f"{option} {with_flags(text, parser)}")
            print(f"{parser.prog}: {option}: {with_flags(note, parser)}", file=sys.stderr)

    return Answering


def with_flags(text: str, parser: argparse.ArgumentParser) -> str:
    """The text with the names of options as the command line writes them."""
    dests = {action.dest for action in parser._actions if flag(action.dest) in
             parser._option_string_actions}  # fmt: skip
    return re.sub(
        r"\b[a-z]+(?:_[a-z]+)+\b",
        lambda found: flag(found[0]) if found[0] in dests else found[0],
        text,
    )
