"""Reads keys while a live screen is shown, if standard input is a terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Wait: TypeAlias = Callable[[float], list[str]]
"""Waits for a number of seconds, or until keys are pressed; returns their names."""

_ONE = re.compile(rb"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])|.", re.DOTALL)
_NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up",
    b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down", b"\n": "down",
    b"\x1b[5~": "page up", b"b": "page up",
    b"\x1b[6~": "page down", b" ": "page down",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"g": "home",
    b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"G": "end",
    b"q": "quit", b"Q": "quit",
}  # fmt: skip


def names(typed: bytes) -> list[str]:
    """The keys in the bytes that a terminal sent, named by what they do; others are left out.

    >>> names(b"j\\x1b[6~xq")
    ['down', 'page down', 'quit']
    """
    return [_NAMES[key] for key in _ONE.findall(typed) if key in _NAMES]


@contextmanager
def pressed() -> Iterator[Wait | None]:
    """Switches the terminal to send each key at once, without showing it; None if there is none."""
    try:
        import termios
        import tty

        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (ImportError, OSError, ValueError, termios.error):
        yield None
        return
    ended = False

    def wait(seconds: float) -> list[str]:
        nonlocal ended
        if ended:
            time.sleep(seconds)
            return []
        ready, _, _ = select.select([fd], [], [], seconds)
        typed = os.read(fd, 256) if ready else b""
        ended = bool(ready) and not typed
        return names(typed)

    try:
        tty.setcbreak(fd)
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
