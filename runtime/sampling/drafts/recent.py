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

_ALONE = 0.2  # how often what followed last follows again
_SECOND = 0.1  # the same of what followed before that
_LATER = 0.6  # of a token of a path, once the one before it was accepted


def recent(tokens: array[int], most: int) -> list[tuple[int, int, int, float]]:
    """What followed on the latest places of the last token; at most `most` tokens.

    One equal token says little, but a row of a step is often nearly free. It is looked for in the
    text itself only, which needs no index of single tokens. O(WINDOW).

    Args:
        tokens: a text, as int32.
        most: tokens.

    Returns:
        For each token its id, the index of the one before it (-1: the last of the text), a number
        that is the same for tokens as likely, and the first guess of how likely it is. Parents
        stand before their children.
    """
    begin = max(len(tokens) - WINDOW, 0)
    window = np.frombuffer(tokens[begin:], dtype=np.int32)
    equal = window[:-1] == window[-1:]
    after = [begin + 1 + place for place in equal.nonzero()[0][-PLACES:].tolist()]
    nexts = [tokens[place] for place in reversed(after)]
    made: list[tuple[int, int, int, float]] = []
    for number, token in enumerate(nexts):
        if token in nexts[:number]:  # a later place has it
            continue
        # How many places agree, of how many, and whether a later one has something else.
        agree = (min(number, 1) * PLACES + nexts.count(token) - 1) * PLACES + len(nexts) - 1
        made.append((token, -1, agree * DEEP, _ALONE if not made else _SECOND))
        if number == 0:
            following = tokens[after[-1] + 1 : after[-1] + DEEP]
            for depth, later in enumerate(following, 1):
                made.append((later, depth - 1, agree * DEEP + depth, _LATER))
    return made[: max(most, 0)]
