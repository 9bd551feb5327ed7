"""Learns how long steps take, so that prefills do not stall decodes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

_KEPT = 0.95  # of the weight of each older step when a new one of its kind is seen
LEAST_PREFILL = 16  # tokens a step may always prefill, so that prompts advance at any cost
# A step's time is cut to at most this many times the expected one: that of a machine which was
# suspended meanwhile would keep prompts waiting for dozens of steps.
_STRANGE = 4.0
_FEW = 256  # prompt tokens from which nothing is foretold
# The terms of a step's time, in units by which two steps usually differ by about one, and how
# strongly each coefficient is pulled to 0. The latter decides where noise, or steps that are alike,
# leave several fits open: the cost of a prompt is then attributed to its tokens, not the constant.
_UNITS = np.array([1.0, 16.0, 1.0, 64.0, 64.0 * 4096])
_RIDGE = np.diag([1e-3, 1e-2, 0.1, 1e-2, 1e-2])


class StepTimes:
    """Limits a step's prompt tokens so that it takes `stretch` times as long as its decodes alone.

    A prompt that is computed beside decodes delays each of them, and brings each sequence that
    waits for its first token nearer to it. So where sequences wait, a step may take longer:
    `stretch` times what it would take if all of them decoded, too, since the others will have to
    bear that anyway. Where more wait than decode, it may be longer by that ratio. Without both,
    many would wait and few decode, in small steps that waste most of the machine.

    A sequence that decodes counts with the rows that it usually has: itself and its drafts.

    Fits, by regularised least squares in which older steps count less and less,

        seconds = a + b * rows of decoding sequences + c * (whether prompts go with them)
                  + d * prompt tokens + e * pairs of a prompt token and one that it attends to

    with no coefficient below 0. The constant `c` matters: attributed to the tokens, it would allow
    fewer of them, to each of which more of it is then attributed, until no prompt advances. The
    term `e` matters at the end of a long prompt.
    """

    def __init__(self, stretch: float) -> None:
        """Raises ValueError if `stretch` is not above 1."""
        if not stretch > 1:
            raise ValueError(f"stretch must be more than 1, got {stretch}")
        self._stretch = stretch
        # One sum for steps without prompts, one for those with them: a kind that does not occur for
        # a while is not forgotten.
        self._products = np.zeros((2, 5, 5))
        self._answers = np.zeros((2, 5))
        self._coefficients: np.ndarray | None = None
        self._prompt_tokens = 0  # that were seen
        self._decodes = self._drafted = 0.0  # sequences and drafted tokens, of less and less weight

    def observe(
        self,
        decodes: int,
        prefills: Iterable[tuple[int, int]],
        seconds: float,
        drafted: int = 0,
    ) -> None:
        """Learns from a step of `seconds` with `decodes` decoding sequences and these prefills.

        `drafted` tokens were computed beside the decodes. A prefill is (tokens, context); the
        context is the tokens that were computed before.
        """
        if decodes:
            self._decodes = _KEPT * self._decodes + decodes
            self._drafted = _KEPT * self._drafted + drafted
            decodes += drafted
        tokens = pairs = 0.0
        for count, context in prefills:
            tokens += count
            pairs += count * (context + count / 2)
        parts = np.array([1.0, decodes, float(decodes > 0 < tokens), tokens, pairs])
        row, kind = parts / _UNITS, int(tokens > 0)
        self._prompt_tokens += int(tokens)
        if self._products[kind].any():
            seconds = min(seconds, _STRANGE * float(parts @ self._fit()))
        self._products[kind] = _KEPT * self._products[kind] + np.outer(row, row)
        self._answers[kind] = _KEPT * self._answers[kind] + row * seconds
        self._coefficients = None

    def prefill_tokens(self, decodes: int, context: int = 0, waiting: int = 1) -> int | None:
        """Most prompt tokens of a step with `decodes` decoding sequences; None: no limit is known.

        `context` is the number of tokens before them in their prompt, `waiting` how many sequences
        could begin or go on with their prompts. The tokens get at least half of the time that is
        allowed, even if the constant takes more: less would delay the prompts and hardly shorten
        the step.
        """
        base, per_row, mixed, per_token, per_pair = self._fit()
        per_decode = per_row * (1 + self._drafted / max(self._decodes, 1.0))
        alone = base + per_decode * decodes
        each = per_token + per_pair * context
        if not each or not self._products[0].any():
            return None
        by_ratio = (self._stretch - 1) * alone * max(1.0, waiting / decodes)
        spare = max(by_ratio, self._stretch * (alone + per_decode * waiting) - alone)
        return max(LEAST_PREFILL, math.floor(max(spare - mixed, spare / 2) / each))

    def prefill_seconds(self, tokens: int, context: int) -> float | None:
        """What `tokens` of a prompt add to steps, after `context` others.

        None: too few were seen to say.
        """
        _, _, _, per_token, per_pair = self._fit()
        if self._prompt_tokens < _FEW:
            return None
        return per_token * tokens + per_pair * tokens * (context + tokens / 2)

    def _fit(self) -> list[float]:
        """The coefficients; those that would be negative are left out one after another."""
        if self._coefficients is None:
            products, answers = self._products.sum(0), self._answers.sum(0)
            found = np.linalg.solve(products + _RIDGE, answers)
            kept = np.ones(len(found), dtype=bool)
            while (found < 0).any():
                kept[np.argmin(found)] = False
                some = np.where(np.outer(kept, kept), products, 0.0)
                found = np.linalg.solve(some + _RIDGE, np.where(kept, answers, 0.0))
            self._coefficients = found / _UNITS
        return [float(each) for each in self._coefficients]
