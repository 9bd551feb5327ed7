"""Ids of requests and answers: unique, not secret."""

from __future__ import annotations

import random


def fresh_id() -> str:
    """32 hexadecimal digits.

    Not from the operating system, as `uuid` takes them: that call releases the interpreter, and a
    busy thread returns it milliseconds later.
    """
    return f"{random.getrandbits(128):032x}"
