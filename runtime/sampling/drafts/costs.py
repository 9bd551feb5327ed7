"""Learns what the rows of drafts add to the time of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

# Numbers of drafted tokens whose steps are told apart; others count as the nearest of these. There
# are few, so lists take less time than arrays.
_GRID = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_STEPS = 4  # of the grid that are tried beyond what was seen
_LEAST = 0.1  # weight of a new step beside all earlier ones of its kind
_ANEW = 0.3  # the same of a step without drafts, after many with them
_SETTLED = 4  # steps of a kind from which its time moves the times of others along
_OFTEN = 8  # steps after which what is known well is computed anew
_KEPT = 0.995  # of the weight of what was seen when something else is seen
_STRANGE = 2.0  # times as long as expected: more is not believed
_SEEN = 1e-3  # weight below which a measurement is forgotten
_EVERY = 4  # of so many steps without drafts that are known well one is looked at
_DOUBT = 0.1  # steps that the guess of an easy row counts as, beside those that were measured
_EASE = 0.25  # of a token's share of a step: what a row is supposed to add before it is seen
_MANY = 16  # tokens from which a row costs enough that steps of more tokens are asked first
_MANY_DRAFTED = 8  # steps with drafts after which one without tells more than those before it
_LATELY = 1000  # steps for which the time of those with more tokens is believed


class _Row:
    """Seconds of the steps with about as many tokens, by drafted ones."""

    __slots__ = ("changes", "curve", "drafting", "last", "plain", "seconds", "warm", "weights")

    def __init__(self) -> None:
        self.changes = 0  # of `seconds` since `curve` was made
        self.drafting = 0  # steps with drafts since one without
        self.last = 0  # number of the last step
        self.plain = 0  # steps without drafts since one was looked at
        self.seconds = [0.0] * len(_GRID)
        self.weights = [0.0] * len(_GRID)
        self.warm = [False] * len(_GRID)
        self.curve: np.ndarray | None = None


class StepCosts:
    """Seconds of a step by its tokens and the drafted ones beside them.

    A step has read all weights through the caches, so what comes after it takes many times as long
    as in a loop: what can be left out is.

    What was not seen is guessed to be cheap, so that it is tried once and then known; a measurement
    loses its weight when it is not repeated, so that one that was disturbed does not last. Where
    steps were timed at the start, these times are the guess for the first steps.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._steps = 0
        self._expected: np.ndarray | None = None  # times of steps of 1, 2, ... rows over the first
        self._compiled = False

    def expect(self, seconds: Seq[tuple[int, float]]) -> None:
        """Takes over the seconds of one sequence's steps by drafted tokens, ascending from 0.

        All code that steps need was compiled before.
        """
        self._compiled = True
        if len(seconds) > 1:
            drafted, times = zip(*seconds, strict=True)
            # Other work only adds time, so a step took no longer than any with more tokens.
            rising = np.minimum.accumulate(times[::-1])[::-1]
            self._expected = np.interp(np.arange(drafted[-1] + 1), drafted, rising) / rising[0]

    def observe(self, tokens: int, drafted: int, seconds: float) -> None:
        """Learns from a step of `tokens` and `drafted` ones beside them."""
        row = self._rows.get(_alike(tokens))
        if row is None:
            row = self._rows[_alike(tokens)] = _Row()
        self._steps += 1
        row.last = self._steps
        least = _LEAST
        if drafted:
            row.drafting += 1
        else:
            least = _ANEW if row.drafting >= _MANY_DRAFTED else _LEAST
            row.drafting = 0
        if not drafted and row.weights[0] >= 1 / _LEAST:
            row.plain += 1
            if row.plain < _EVERY:
                return
            row.plain = 0
        cell = _CELLS[min(drafted, _GRID[-1])]
        if not row.warm[cell] and not self._compiled:  # it may have compiled something
            row.warm[cell] = True
            return
        weight, before = row.weights[cell], row.seconds[cell]
        if weight < _SEEN:
            row.seconds[cell] = seconds
        else:
            if weight > 2:
                seconds = min(seconds, _STRANGE * before)
            change = (seconds - before) * max(least, 1 / (weight + 1))
            # All steps take longer as contexts grow: what others took moves along. What is hardly
            # known does not move them: kinds that seemed to be fast are tried more often, so their
            # times mostly rise at first.
            if weight >= _SETTLED:
                factor = 1 + 0.5 * change / before
                row.seconds = [each * factor for each in row.seconds]
            row.seconds[cell] = before + change
        row.weights = [each * _KEPT for each in row.weights]
        row.weights[cell] = min(weight + 1, 1 / _LEAST)
        row.changes += 1
        if weight < 2 or row.changes >= _OFTEN:
            row.curve, row.changes = None, 0

    def drafting(self, tokens: int) -> int:
        """How many steps of so many tokens had drafts since the last one that had none."""
        row = self._rows.get(_alike(tokens))
        return 0 if row is None else row.drafting

    def curve(self, tokens: int) -> np.ndarray | None:
        """Seconds of a step of `tokens` and 0, 1, 2, ... drafted ones; None: not known yet.

        The array ends a little after the most that was seen, so that what is too much is found
        out in small steps. It is not to be changed.
        """
        row = self._rows.get(_alike(tokens))
        if row is None or row.weights[0] < _SEEN:
            return None
        if row.curve is None:
            row.curve = self._curve(row, tokens)
        return row.curve

    def _curve(self, row: _Row, tokens: int) -> np.ndarray:
        seen = [cell for cell, weight in enumerate(row.weights) if weight > _SEEN]
        known = _rising([row.seconds[cell] for cell in seen], [row.weights[cell] for cell in seen])
        slope = _EASE * known[0] / max(tokens, 4)
        expected = self._expected_beside(tokens) * known[0]
        points: list[float] = []
        at = 0
        for cell, drafted in enumerate(_GRID):
            guess = known[0]
            if points and drafted < len(expected):
                guess = points[-1] + float(expected[drafted] - expected[_GRID[cell - 1]])
            elif points:
                guess = points[-1] + slope * (drafted - _GRID[cell - 1])
            if tokens >= _MANY:
                guess = max(guess, self._plain(row, tokens + drafted))
            if at < len(seen):
                guess = min(guess, known[at])  # more tokens took no longer
                if seen[at] == cell:
                    weight = row.weights[cell]
                    mixed = (weight * known[at] + _DOUBT * guess) / (weight + _DOUBT)
                    guess = max(points[-1], mixed) if points else mixed
                    at += 1
            points.append(guess)
        end = _GRID[min(seen[-1] + _STEPS, len(_GRID) - 1)]
        end = max(end, max((each for each in _GRID if each < len(expected)), default=0))
        return np.interp(np.arange(end + 1), _GRID, points)

    def _expected_beside(self, tokens: int) -> np.ndarray:
        """Expected times of steps of `tokens` and 0, 1, 2, ... drafted ones over the first of them.

        A drafted token takes about as long as that of another sequence. Empty if nothing is known;
        what was measured at the start is not believed for long.
        """
        if self._expected is None or self._steps >= _LATELY:
            return np.empty(0)
        here = self._expected[tokens - 1 :]
        return here / here[0] if len(here) > 1 else np.empty(0)

    def _plain(self, beside: _Row, tokens: int) -> float:
        """Seconds of a step of so many tokens, if another row than that has seen one lately; or 0.

        A drafted token takes about as long as another one. A time that is not measured again may
        have been disturbed, and is not believed for long.
        """
        row = self._rows.get(_alike(tokens))
        if row is None or row is beside or row.weights[0] <= _SEEN:
            return 0.0
        return row.seconds[0] if self._steps - row.last < _LATELY else 0.0


def _rising(seconds: Seq[float], weights: Seq[float]) -> list[float]:
    """The nearest values that never fall: those out of order become their mean. O(values).

    More tokens do not take less time, so where fewer took longer the times were disturbed, and
    are better known together (isotonic regression, by pooling adjacent violators).
    """
    pools: list[tuple[float, float, int]] = []  # seconds by weight, weight, values
    for value, weight in zip(seconds, weights, strict=True):
        pool = (value * weight, weight, 1)
        while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    return [pool[0] / pool[1] for pool in pools for _ in range(pool[2])]


# The place in the grid of each number of drafted tokens up to its last; of two as near the first.
_CELLS = bytes(
    min(range(len(_GRID)), key=lambda cell: abs(_GRID[cell] - drafted))
    for drafted in range(_GRID[-1] + 1)
)


def _alike(tokens: int) -> int:
    """The same number for batches whose steps take about as long."""
    step = 1 << max(0, tokens.bit_length() - 3)
    return tokens // step * step
