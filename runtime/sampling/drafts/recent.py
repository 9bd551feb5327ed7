"""What followed on a text's last token where it stood alone before, in the same text."""

from __future__ import annotations

from array import array

import numpy as np

WINDOW = 4096
"""Tokens that are searched, from the last one backwards."""

PLACES = 3
"""The latest places of the last token that are compared."""

DEEP = 4
"""Tokens that are taken from the latest place; of others one is."""

_ALONE = 0.3  # how often what followed last follows again
_SECOND = 0.15  # the same of what followed before that
_LATER = 0.6  # of a token of a path, once the one before it was accepted


def recent(tokens: array[int], most: int) -> list[tuple[int, int, int, float]]:
    """What followed on the latest places of the last token; at most `most` tokens.

    One equal token says little, but costs a row of a step that is often nearly free. It is looked
    for in the text itself only: there is no index of single tokens, and what others say on the
    same one is as good as random. O(WINDOW), a few microseconds.

    Args:
        tokens: a text, as int32.
        most: tokens.

    Returns:
        For each token its id, the index of the one before it (-1: the last of the text), a number
        that is the same for tokens as likely, and the first guess of how likely it is. Parents
        stand before their children.
    """
    window = np.frombuffer(tokens[-WINDOW:], dtype=np.int32)
    places = np.flatnonzero(window[:-1] == window[-1:])[-PLACES:]
    nexts = [int(token) for token in window[places + 1][::-1]]
    made: list[tuple[int, int, int, float]] = []
    for number, token in enumerate(nexts):
        if token in nexts[:number]:  # a later place has it
            continue
        # How many places agree, of how many, and whether a later one has something else.
        agree = (min(number, 1) * PLACES + nexts.count(token) - 1) * PLACES + len(nexts) - 1
        made.append((token, -1, agree * DEEP, _ALONE if not made else _SECOND))
        if number == 0:
            last = int(places[-1])
            following = window[last + 2 : last + 1 + DEEP]
            for depth, later in enumerate(following, 1):
                made.append((int(later), depth - 1, agree * DEEP + depth, _LATER))
    return made[: max(most, 0)]
