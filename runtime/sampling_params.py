"""What a user may ask of the sampling of one request, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends; the names are vLLM's.

    Raises ValueError with the name, the value and what is allowed.
    """

    n: int = 1
    """Sequences per request; only 1 so far."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most probable token (greedy)."""
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability; in (0, 1]."""
    top_k: int = 0
    """Only so many of the most probable tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Only tokens at least this fraction as probable as the most probable one; in [0, 1]."""
    seed: int | None = None
    """Makes a request repeatable, whatever else is in the batch; None: the engine draws one."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the model's length."""
    min_tokens: int = 0
    """Fewest tokens before an end-of-sequence token, stop token or stop string may end it."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; kept as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the sequence; kept as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p must be above 0 and at most 1, got 0")
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        allowed = f"the integer {low}" if low == high else f"an integer from {low} to {high}"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # a NaN fails the comparison too
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(
        isinstance(string, str) and string for string in strings
    ):
        raise ValueError(
            f"stop must be a string or a list of strings that are not empty, got {stop!r}"
        )
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    return tuple(strings)


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)) or not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids
    ):
        raise ValueError(f"stop_token_ids must be a list of token ids (0 or above), got {ids!r}")
    return tuple(ids)
