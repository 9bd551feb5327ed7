"""Learns what the rows of drafts add to the time of a step."""

from __future__ import annotations

import numpy as np

# Numbers of drafted tokens whose steps are told apart; others count as the nearest of these.
_GRID = np.array((0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512))
_STEPS = 3  # of the grid that are tried beyond what was seen
_LEAST = 0.1  # weight of a new step beside all earlier ones of its kind
_OFTEN = 8  # steps after which what is known well is computed anew
_KEPT = 0.998  # of the weight of what was seen when something else is seen
_STRANGE = 2.0  # times as long as expected: more is not believed
_SEEN = 1e-3  # weight below which a measurement is forgotten
_DOUBT = 0.1  # steps that the guess of an easy row counts as, beside those that were measured
_EASE = 0.25  # of a token's share of a step: what a row is supposed to add before it is seen


class _Row:
    """Seconds of the steps with about as many tokens, by drafted ones."""

    __slots__ = ("changes", "curve", "seconds", "warm", "weights")

    def __init__(self) -> None:
        self.changes = 0  # of `seconds` since `curve` was made
        self.seconds = np.zeros(len(_GRID))
        self.weights = np.zeros(len(_GRID))
        self.warm = np.zeros(len(_GRID), dtype=bool)
        self.curve: np.ndarray | None = None


class StepCosts:
    """Seconds of a step by its tokens and the drafted ones beside them.

    What was not seen is guessed to be cheap, so that it is tried once and then known; a measurement
    loses its weight when it is not repeated, so that one that was disturbed does not last.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def observe(self, tokens: int, drafted: int, seconds: float) -> None:
        """Learns from a step of `tokens` and `drafted` ones beside them."""
        row = self._rows.setdefault(_alike(tokens), _Row())
        cell = int(np.abs(_GRID - drafted).argmin())
        if not row.warm[cell]:  # it may have compiled something
            row.warm[cell] = True
            return
        weight, before = row.weights[cell], row.seconds[cell]
        if weight < _SEEN:
            row.seconds[cell] = seconds
        else:
            if weight > 2:
                seconds = min(seconds, _STRANGE * before)
            change = (seconds - before) * max(_LEAST, 1 / (weight + 1))
            # All steps take longer as contexts grow: what others took moves along.
            row.seconds *= 1 + 0.5 * change / before
            row.seconds[cell] = before + change
        row.weights *= _KEPT
        row.weights[cell] = weight + 1
        np.minimum(row.weights, 1 / _LEAST, out=row.weights)
        row.changes += 1
        if weight < 2 or row.changes >= _OFTEN:
            row.curve, row.changes = None, 0

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
        seen = np.flatnonzero(row.weights > _SEEN)
        known = _rising(row.seconds[seen], row.weights[seen])
        slope = _EASE * known[0] / max(tokens, 4)
        points: list[float] = []
        at = 0
        for cell in range(len(_GRID)):
            guess = points[-1] + slope * (_GRID[cell] - _GRID[cell - 1]) if points else known[0]
            if at < len(seen) and seen[at] == cell:
                weight = row.weights[cell]
                mixed = (weight * known[at] + _DOUBT * min(guess, known[at])) / (weight + _DOUBT)
                guess = max(points[-1], mixed) if points else mixed
                at += 1
            points.append(guess)
        end = _GRID[min(seen[-1] + _STEPS, len(_GRID) - 1)]
        return np.interp(np.arange(end + 1), _GRID, points)


def _rising(seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
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
    return np.repeat([pool[0] / pool[1] for pool in pools], [pool[2] for pool in pools])


def _alike(tokens: int) -> int:
    """The same number for batches whose steps take about as long."""
    step = 1 << max(0, tokens.bit_length() - 3)
    return tokens // step * step
