"""Learns what a request takes of a replica's time besides the tokens of its prompt."""

from __future__ import annotations

_KEPT = 0.99  # of what older answers count, with each new one
_FEW = 8  # answers before which nothing is said
_STRANGE = 10.0  # times as long as expected: more is not believed
_LEAST_SPREAD = 1e-6  # of expected times over their mean, squared: less has no slope
_SLOPES = 0.3, 3.0  # the least and the most that a second of tokens takes


class RequestOverhead:
    """A line through the seconds that answers took, by those of their tokens (least squares).

    The step with which a prompt is finished has sequences that decode and a fixed part, whatever
    the prompt misses. Where requests are finished together the first one's time has it and the
    others' have not, so it is the mean over requests that is learned.
    """

    def __init__(self) -> None:
        self._answers = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._line = 0.0, 1.0

    @property
    def seconds(self) -> float:
        """Of a request that misses nothing; 0 before a few answers."""
        return self._line[0] if self._answers >= _FEW else 0.0

    def learn(self, tokens: float, taken: float) -> None:
        """Notes that a request took `taken` seconds, its tokens `tokens` of them at the rate."""
        if self.seconds:
            fixed, slope = self._line
            taken = min(taken, _STRANGE * (fixed + slope * tokens))
        self._answers += 1
        self._weight = _KEPT * self._weight + 1
        self._x = _KEPT * self._x + tokens
        self._y = _KEPT * self._y + taken
        self._xx = _KEPT * self._xx + tokens * tokens
        self._xy = _KEPT * self._xy + tokens * taken
        x, y = self._x / self._weight, self._y / self._weight
        spread, slope = self._xx / self._weight - x * x, 1.0
        if spread > _LEAST_SPREAD * x * x:
            slope = (self._xy / self._weight - x * y) / spread
            slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
        self._line = max(y - slope * x, 0.0), slope
