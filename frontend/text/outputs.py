"""What a request gives back, whole or piece by piece, under the field names that vLLM uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one place of a text.

    Attributes:
        logprob: log-probability by the model's logits, before temperature, penalties and filters.
        rank: 1 plus the number of tokens that are more probable there.
        decoded_token: its text; U+FFFD where it is part of a character.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: number of the continuation within its request, from 0.
        text: the generated text, cut before a stop string unless its inclusion was asked for.
        token_ids: every generated token, the one that ended the text included.
        finish_reason: "stop" (end-of-text token, stop token or stop string), "length" (max_tokens
            or the model's length), "abort" (cancelled) or "error" (a step failed).
        stop_reason: the stop string, or the id of the stop token, that ended the text; None where
            the model's own end-of-text token or a length did. For "error", the error's message.
        cumulative_logprob: sum of the generated tokens' logprobs, if they were asked for; of a beam
            search always, as the search counts it.
        logprobs: for each generated token its own logprob, then those of the most probable tokens,
            by token id; None if they were not asked for.
        text_offsets: characters of the text before each token, a stop string that was cut off
            included; None like `logprobs`.
        score: for a beam search: the cumulative logprob over the number of tokens to the power of
            the length penalty.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    text_offsets: tuple[int, ...] | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with what was generated for it.

    Attributes:
        request_id: the engine's name of the request.
        prompt: the prompt as text; None if it was given as token ids.
        prompt_token_ids: the prompt as the model saw it.
        outputs: the `n` continuations, in the order of their indices.
        finished: whether the request has ended.
        cached_tokens: prompt tokens whose KV was reused instead of computed.
        cached_by_tier: of these, those that were in the "pool", the KV cache itself, and those
            that came from each tier beyond it; None without tiers.
        prompt_logprobs: for each prompt token its logprob given those before it, and those of the
            most probable tokens, by token id; None for the first token and for those before
            `prompt_logprobs_start`; None altogether if they were not asked for.
        left_out_tokens: generated tokens of the sequences that `best_of` left out.
        drafted_tokens: tokens that were drafted for all sequences (see `speculation`).
        accepted_tokens: of them, those that the texts went on with.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    left_out_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_by_tier: dict[str, int] | None = None


@dataclass(slots=True)  # not frozen: made for each piece of each stream
class TextDelta:
    """What a step, or several in a row, added to one continuation of a request.

    Attributes:
        text: new text that cannot become part of a stop string any more.
        index: number of the continuation within its request, from 0.
        completion: the continuation, once it has ended.
        output: the request's result, once all its continuations have ended.
        logprobs, text_offsets: of the new tokens, as in `CompletionOutput`; empty if they were not
            asked for.
        best_so_far: of a beam search: its best sequence after the step, as a whole; after the next
            step it may be another one.
        cached_tokens, cached_by_tier: as in `RequestOutput`.
        drafted_tokens, accepted_tokens: of the continuation so far, as in `RequestOutput`.
        prompt_logprobs: as in `RequestOutput`; with the request's first delta only.
    """

    request_id: str
    text: str
    new_token_ids: tuple[int, ...]
    output: RequestOutput | None
    logprobs: tuple[dict[int, Logprob], ...] = ()
    text_offsets: tuple[int, ...] = ()
    index: int = 0
    completion: CompletionOutput | None = None
    best_so_far: CompletionOutput | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cached_by_tier: dict[str, int] | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing but text of a continuation that has not ended."""
        return self.completion is None and self.best_so_far is None and not self.logprobs


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """One delta for several of one continuation, in their order. O(their text and tokens)."""
    last = deltas[-1]
    if len(deltas) > 1:
        last.text = "".join([delta.text for delta in deltas])
        last.new_token_ids = tuple([token for delta in deltas for token in delta.new_token_ids])
        last.logprobs = tuple([place for delta in deltas for place in delta.logprobs])
        last.text_offsets = tuple([offset for delta in deltas for offset in delta.text_offsets])
        shown = (delta.best_so_far for delta in reversed(deltas))
        last.best_so_far = next(filter(None, shown), None)
        last.prompt_logprobs = deltas[0].prompt_logprobs
    return last


class GenerationError(RuntimeError):
    """Some requests of a call failed inside a step; the others ran to their end.

    Attributes:
        outputs: all outputs of the call, in the order of its prompts; those that failed have the
            finish reason "error" and the message as stop reason.
    """

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self.outputs = outputs
        failed = [
            f"prompt {index}: {completion.stop_reason}"
            for index, output in enumerate(outputs)
            for completion in output.outputs
            if completion.finish_reason == "error"
        ]
        named = "; ".join(failed[:3]) + ("; ..." if len(failed) > 3 else "")
        super().__init__(f"{len(failed)} of {len(outputs)} requests failed: {named}")
