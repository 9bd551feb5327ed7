"""What steps cost, learned as they run, so that prefills don't stall those who decode."""

from __future__ import annotations

_RECENT = 0.2  # weight of the newest measurement in the moving averages
LEAST_PREFILL = 16  # tokens a step may always prefill, so that prompts go on whatever they cost


class StepTimes:
    """How many prompt tokens fit beside decodes if a step may take `stretch` times a decoding one.

    Keeps moving averages of the time of steps that only decode, and of what each token of a prefill
    adds to one. Until a prefill ran beside decodes, a token of one that ran alone stands for that;
    until either was seen there is no limit.
    """

    def __init__(self, stretch: float) -> None:
        """Raises ValueError if `stretch` is not above 1."""
        if not stretch > 1:
            raise ValueError(f"stretch must be more than 1, got {stretch}")
        self._stretch = stretch
        self._decode_seconds: float | None = None
        self._prefill_seconds: float | None = None  # a token, beside decodes
        self._alone_seconds: float | None = None  # a token, without

    def observe(self, decodes: int, prefill_tokens: int, seconds: float) -> None:
        """A step with so many decoding sequences and prompt tokens took so long."""
        if not prefill_tokens:
            self._decode_seconds = _moved(self._decode_seconds, seconds)
        elif decodes and self._decode_seconds is not None:
            added = max(0.0, seconds - self._decode_seconds) / prefill_tokens
            self._prefill_seconds = _moved(self._prefill_seconds, added)
        elif not decodes:
            self._alone_seconds = _moved(self._alone_seconds, seconds / prefill_tokens)

    def prefill_tokens(self) -> int | None:
        """Most prompt tokens of a step with decodes; None: as many as there are."""
        each = self._alone_seconds if self._prefill_seconds is None else self._prefill_seconds
        if self._decode_seconds is None or not each:
            return None
        return max(LEAST_PREFILL, int((self._stretch - 1) * self._decode_seconds / each))


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _RECENT * (value - average)
