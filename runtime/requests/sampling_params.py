"""What a user may ask of the sampling of one request, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

MAX_STOP_STRINGS = 16
MAX_N = 1024
MAX_BIAS = 100.0
MAX_PREDICTED = 65_536
"""Tokens of a prediction that are looked at: it takes the engine's time."""
_MOST = 2**31 - 1

BOUNDS: dict[str, tuple[int, int] | tuple[float, float]] = {
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, _MOST),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 1e6),
    "logprobs": (-1, _MOST),
    "prompt_logprobs": (-1, _MOST),
    "prompt_logprobs_start": (0, _MOST),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, _MOST),
    "min_tokens": (0, _MOST),
    "thinking_token_budget": (0, _MOST),
}
"""Least and greatest value of each number in `SamplingParams`: integers, or any numbers."""

# These may be None.
_OPTIONAL = (
    "best_of", "logprobs", "prompt_logprobs", "seed", "max_tokens", "thinking_token_budget",
)  # fmt: skip
# Logits divided by less than this may overflow float32, and the choice is certain by then.
GREEDY_BELOW = 1e-5

LogitsProcessor = Callable[..., Any]
"""`(generated, logits) -> logits` or `(prompt, generated, logits) -> logits`.

`prompt` and `generated` are lists of token ids, `logits` is the float32 row [vocabulary] of the
token to be chosen, which the function may change in place; it returns a row of that shape.
"""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The tokens around a model's reasoning; `inside`: the text begins after the first of them.

    Where no token begins it, since the text always begins with it, `begin` is that of the end.
    """

    begin: int
    end: int
    inside: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends; the names are vLLM's.

    Raises ValueError with the name, the value and what is allowed.
    """

    n: int = 1
    """Sequences per request: all share the prompt, and each is sampled independently."""
    best_of: int | None = None
    """Sequences to sample, of which the `n` with the highest logprob per token are returned."""
    temperature: float = 1.0
    """Logits are divided by it; 0, or less than 1e-5, takes the most probable token (greedy)."""
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability; in (0, 1]."""
    top_k: int = 0
    """Only this many of the most probable tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Only tokens at least this fraction as probable as the most probable one; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated before; from -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that a token was generated; from -2 to 2."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt and output are divided by it if positive, else multiplied.

    Above 0, and 1 changes nothing. Keskar et al. 2019, CTRL, section 4.1."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these token ids; each from -100 to 100. Kept as a dict."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these token ids may be generated; kept as a tuple."""
    bad_words: Sequence[str] | None = None
    """Words that must not be generated: a token that would complete one is forbidden.

    Each counts with and without a space before it; kept as a tuple. The engine itself has
    no tokenizer, and takes `bad_words_token_ids`."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Token sequences that must not be completed; kept as a tuple of tuples."""
    logits_processors: Sequence[LogitsProcessor] | None = None
    """Functions that change the logits, before anything else does; kept as a tuple."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the text must have; tokens that would leave it are forbidden."""
    prediction: str | None = None
    """A text that much of the output is expected to be, such as a file before a small change: where
    it holds, several tokens a step are verified instead of one. It changes no token. The engine
    itself has no tokenizer, and takes `prediction_token_ids`."""
    prediction_token_ids: Sequence[int] | None = None
    """The same as token ids; the first 65,536 are kept, as a tuple."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning before the answer; then its end mark follows. None: no bound."""
    thinking_marks: ThinkingMarks | None = None
    """The marks of the reasoning, which the engine, without a tokenizer, must be given."""
    logprobs: int | None = None
    """Log-probabilities to return for each generated token: its own, and those of this many most
    probable ones; -1: all. Of the model's logits, before temperature, penalties and filters."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first, given the tokens before it."""
    prompt_logprobs_start: int = 0
    """Only for the prompt's tokens from this place on; those before it need not be computed."""
    seed: int | None = None
    """Makes a request repeatable, in any batch; None: the engine draws a seed."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the model's length. A text that reaches the end of the
    context ends there, also with finish reason ``length``.
    """
    min_tokens: int = 0
    """Fewest tokens before an end-of-sequence token, stop token or stop string may end it."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; kept as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the sequence; kept as a tuple."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                (check_integer if isinstance(low, int) else check_number)(name, value, low, high)
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n, {self.n}, got {self.best_of}")
        if self.top_p == 0:
            raise ValueError("top_p must be above 0 and at most 1, got 0")
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty must be above 0, got 0")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ValueError(
                f"prompt_logprobs_start must be 0 without prompt_logprobs, "
                f"got {self.prompt_logprobs_start}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.prediction, str | None):
            raise ValueError(f"prediction must be a text or None, got {shown(self.prediction)}")
        self._check_structured_outputs()
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        for name, kept in (
            ("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)),
            ("logit_bias", _logit_bias(self.logit_bias)),
            ("allowed_token_ids", _allowed_token_ids(self.allowed_token_ids)),
            ("prediction_token_ids", _predicted(self.prediction_token_ids)),
            ("bad_words", _bad_words(self.bad_words)),
            ("bad_words_token_ids", _bad_words_token_ids(self.bad_words_token_ids)),
            ("logits_processors", _logits_processors(self.logits_processors)),
        ):
            object.__setattr__(self, name, kept)
        if self.allowed_token_ids is not None:
            forbidden = {word[0] for word in self.bad_words_token_ids or () if len(word) == 1}
            forbidden.update(self.stop_ids if self.min_tokens else ())
            if forbidden.issuperset(self.allowed_token_ids):
                raise ValueError(
                    f"allowed_token_ids must leave a token that neither bad_words nor min_tokens "
                    f"forbids, got {shown(self.allowed_token_ids)}"
                )

    def _check_structured_outputs(self) -> None:
        form = self.structured_outputs
        if form is None:
            return
        if not isinstance(form, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs must be a StructuredOutputsParams, got {shown(form)}"
            )
        # The form determines where the text ends.
        if self.ignore_eos:
            raise ValueError("ignore_eos must be False with structured_outputs, got True")
        if self.min_tokens:
            raise ValueError(f"min_tokens must be 0 with structured_outputs, got {self.min_tokens}")

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError if a parameter names a token outside a vocabulary of `size` tokens."""
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("stop_token_ids", self.stop_ids),
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("prediction_token_ids", self.prediction_token_ids or ()),
            ("thinking_marks", self._marks()),
            ("bad_words_token_ids", (t for word in self.bad_words_token_ids or () for t in word)),
        )
        for name, tokens in named:
            for token in tokens:
                if token >= size:
                    raise ValueError(f"{name} must be from 0 to {size - 1}, got {token}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > size:
                raise ValueError(
                    f"{name} must be at most {size}, the size of the vocabulary, or -1 for all, "
                    f"got {getattr(self, name)}"
                )

    def _marks(self) -> tuple[int, ...]:
        marks = self.thinking_marks
        return () if marks is None else (marks.begin, marks.end)

    @property
    def chooses(self) -> bool:
        """Whether more sequences are sampled than are returned."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def num_sequences(self) -> int:
        """Sequences that are sampled."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids


def check_integer(name: str, value: Any, low: float, high: float) -> None:
    """Raises ValueError if `value` is no integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        allowed = f"the integer {low}" if low == high else f"an integer from {low} to {high}"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises ValueError if `value` is no number from `low` to `high`."""
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


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)) or not all(map(_is_token, ids)):
        raise ValueError(f"{name} must be a list of token ids (0 or above), got {shown(ids)}")
    return tuple(ids)


def _predicted(ids: Any) -> tuple[int, ...]:
    kept = ids[:MAX_PREDICTED] if isinstance(ids, (list, tuple)) else ids
    return _token_ids("prediction_token_ids", kept)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _allowed_token_ids(ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    allowed = _token_ids("allowed_token_ids", ids)
    if not allowed:
        raise ValueError("allowed_token_ids must have at least one token id, got none")
    return allowed


def _logit_bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping) or not all(map(_is_token, bias)):
        raise ValueError(
            f"logit_bias must be a mapping from token ids to numbers, got {shown(bias)}"
        )
    for token, value in bias.items():
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not abs(value) <= MAX_BIAS:  # a NaN fails the comparison too
            raise ValueError(
                f"logit_bias must have numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                f"got {value!r} for token {token}"
            )
    return dict(bias)


def _bad_words(words: Any) -> tuple[str, ...]:
    if words is None:
        return ()
    if not isinstance(words, (list, tuple)) or not all(
        isinstance(word, str) and word.strip() for word in words
    ):
        raise ValueError(
            f"bad_words must be a list of strings that are more than spaces, got {shown(words)}"
        )
    return tuple(words)


def _bad_words_token_ids(words: Any) -> tuple[tuple[int, ...], ...]:
    if words is None:
        return ()
    if not isinstance(words, (list, tuple)) or not all(
        isinstance(word, (list, tuple)) and word and all(map(_is_token, word)) for word in words
    ):
        raise ValueError(
            f"bad_words_token_ids must be a list of lists of token ids (0 or above), none of them "
            f"empty, got {shown(words)}"
        )
    return tuple(tuple(word) for word in words)


def _logits_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    if processors is None:
        return ()
    if not isinstance(processors, (list, tuple)) or not all(map(callable, processors)):
        raise ValueError(f"logits_processors must be a list of functions, got {shown(processors)}")
    return tuple(processors)
