"""Learns what a pass of the draft model takes."""

from __future__ import annotations

_KEPT = 0.98  # of the weight of earlier passes with each new one
_ROW = 0.05  # a row's share of a pass with one row, before others were seen
_SURE = 4.0  # passes that this first share counts as
_STRANGE = 3.0  # times as long as expected: more is not believed
_FEW = 5  # passes after which there is something to expect


class PassCosts:
    """Seconds of a pass as a line: a fixed part, and one for each row.

    Passes are weighted by the inverse of their rows, so that short ones, of which most are, are
    told well, and long ones, which compute a prompt, still give the slope.
    """

    def __init__(self, share: float) -> None:
        """`share` of a plain step's time is what a pass is supposed to take before any was seen."""
        self._share = share
        self._seen = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from a pass; the first one may have compiled something, and does not count."""
        self._seen += 1
        if self._seen == 1:
            return
        if self._seen > _FEW:
            fixed, row = self.line(seconds)
            seconds = min(seconds, _STRANGE * (fixed + row * rows))
        weight = 1.0 / rows
        for name, value in (
            ("_weight", weight),
            ("_x", weight * rows),
            ("_y", weight * seconds),
            ("_xx", weight * rows * rows),
            ("_xy", weight * rows * seconds),
        ):
            setattr(self, name, _KEPT * getattr(self, name) + value)

    def line(self, step: float) -> tuple[float, float]:
        """The fixed part and that of a row; `step` is the time of a plain step."""
        if not self._weight:
            one = self._share * step
            return one * (1 - _ROW), one * _ROW
        rows, seconds = self._x / self._weight, self._y / self._weight
        spread = self._xx - self._weight * rows * rows
        together = self._xy - self._weight * rows * seconds
        first = _ROW * seconds / (1 - _ROW + _ROW * rows)
        row = max((together + _SURE * first) / (spread + _SURE), 0.0)
        row = min(row, seconds / rows)
        return seconds - row * rows, row
