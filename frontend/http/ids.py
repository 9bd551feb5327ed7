"""Ids of requests and answers: unique, and no secret."""

from __future__ import annotations

import random


def fresh_id() -> str:
    """32 hexadecimal digits.

    Not from the system's randomness, as those of `uuid` are: that hands the interpreter to another
    thread meanwhile, and a busy one returns it milliseconds later.
    """
    return f"{random.getrandbits(128):032x}"
