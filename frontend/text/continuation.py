"""The text of one continuation of a request: the engine's tokens in, pieces of text out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from coppice.frontend.text.detokenizer import IncrementalDecoder
from coppice.frontend.text.outputs import CompletionOutput, Logprob, TextDelta, joined
from coppice.frontend.text.stop_strings import StopStrings
from coppice.frontend.text.tokens import TokenTexts
from coppice.runtime.requests.request import BestLine, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams


@dataclass(slots=True)
class Continuation:
    """One continuation of a request, complete or not yet.

    Attributes:
        shown: whether a piece of it was handed out.
        kept: tokens that wait to be decoded.
        held: text that waits to be handed out.
        cached_tokens: tokens of the prompt whose KV was reused; 0 before the first output.
        drafted, accepted: tokens of its drafts so far, and those that its text went on with.
        cached_by_tier: those from each tier; None without tiers.
        completion: the result, once it has ended.
    """

    index: int
    params: SamplingParams
    decoder: IncrementalDecoder
    stops: StopStrings
    shown: bool = False
    kept: list[int] = field(default_factory=list)
    held: TextDelta | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_by_tier: dict[str, int] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    completion: CompletionOutput | None = None

    def release(self, request_id: str) -> TextDelta | None:
        """The delta of all that waits; None if nothing does."""
        held, self.held = self.held, None
        if not self.kept:
            return held
        tokens, self.kept = self.kept, []
        self.token_ids += tokens
        self.stops.push(self.decoder.push(tokens))
        delta = TextDelta(
            request_id,
            self.stops.take(),
            tuple(tokens),
            None,
            index=self.index,
            cached_tokens=self.cached_tokens,
            cached_by_tier=self.cached_by_tier,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
        return delta if held is None else joined((held, delta))

    def advance(self, step: StepOutput, texts: TokenTexts) -> tuple[TextDelta, bool]:
        """The delta of an output of the engine, and of all that waited before it.

        The second value is whether a stop string ended the text: the engine does not know it yet.
        """
        new = [*self.kept, *step.new_token_ids]
        self.kept.clear()
        self.cached_tokens, self.cached_by_tier = step.cached_tokens, step.cached_by_tier
        before, self.drafted, self.accepted = self.accepted, step.drafted, step.accepted
        logprobs = [] if step.logprobs is None else list(texts.logprobs(step.logprobs, new))
        silent = is_silent(step, self.params)
        if not logprobs and not self.params.stop_strings:
            self.token_ids += new
            self.stops.push(self.decoder.push(new[:-1] if silent else new))
            offsets = []
        else:
            count = len(new)
            offsets = self._push_singly(new, logprobs, silent, texts)
            # A step's last token was not drafted; drafted ones after the text's end are not its.
            self.accepted -= min(max(count - len(new) - 1, 0), step.accepted - before)
        self.logprobs += logprobs
        self.text_offsets += offsets
        finish_reason, stop_reason = step.finish_reason, _stop_reason(step)
        if finish_reason is not None and self.stops.matched is None:
            armed = len(self.token_ids) > self.params.min_tokens
            self.stops.push(self.decoder.flush(), armed=armed)
        stopped = self.stops.matched is not None and finish_reason is None
        if self.stops.matched is not None:
            finish_reason, stop_reason = "stop", self.stops.matched
        text = self.stops.take(final=finish_reason is not None)
        if finish_reason is not None:
            self.completion = self._completed(finish_reason, stop_reason, step)
        delta = TextDelta(
            step.request_id,
            text,
            tuple(new),
            None,
            tuple(logprobs),
            tuple(offsets),
            self.index,
            self.completion,
            cached_tokens=step.cached_tokens,
            cached_by_tier=step.cached_by_tier,
            drafted_tokens=step.drafted,
            accepted_tokens=self.accepted,
        )
        if self.held is not None:
            delta, self.held = joined((self.held, delta)), None
        return delta, stopped

    def _push_singly(
        self, new: list[int], logprobs: list[dict[int, Logprob]], silent: bool, texts: TokenTexts
    ) -> list[int]:
        """Decodes tokens one by one; returns the characters of the text before each of them.

        A stop string cuts `new` and `logprobs` after the token that completes it.
        """
        offsets: list[int] = []
        for position, token in enumerate(new):
            self.token_ids.append(token)
            if logprobs:
                offsets.append(self.stops.length)  # for a part of a character: where that begins
            if silent and position == len(new) - 1:
                break
            piece = self.decoder.push((token,))
            if logprobs and (own := texts.text(token)) and piece.endswith(own):
                offsets[-1] += len(piece) - len(own)
            self.stops.push(piece, armed=len(self.token_ids) > self.params.min_tokens)
            if self.stops.matched is not None:
                del new[position + 1 :], logprobs[position + 1 :]
                break
        return offsets

    def _completed(
        self, finish_reason: str, stop_reason: int | str | None, step: StepOutput
    ) -> CompletionOutput:
        made = CompletionOutput(
            self.index, self.stops.text, tuple(self.token_ids), finish_reason, stop_reason
        )
        if self.params.logprobs is not None:
            made = replace(
                made,
                cumulative_logprob=sum(self._chosen(), 0.0),
                logprobs=self.logprobs,
                text_offsets=tuple(self.text_offsets),
            )
        if step.cumulative_logprob is not None:
            made = replace(made, cumulative_logprob=step.cumulative_logprob, score=step.score)
        return made

    def _chosen(self) -> list[float]:
        """The logprobs of its own tokens."""
        places = zip(self.token_ids, self.logprobs, strict=True)
        return [place[token].logprob for token, place in places]

    @property
    def mean_logprob(self) -> float:
        """Mean of its tokens' logprobs; minus infinity if it failed or has no token."""
        if self.completion is None or self.completion.finish_reason == "error":
            return -math.inf
        return sum(self._chosen()) / len(self.token_ids) if self.token_ids else -math.inf


def is_silent(ended: StepOutput | BestLine | CompletionOutput, params: SamplingParams) -> bool:
    """Whether the last token only marks the end of the text, and is no part of it."""
    return (
        ended.finish_reason == "stop"
        and not isinstance(ended.stop_reason, str)
        and not params.include_stop_str_in_output
    )


def _stop_reason(step: StepOutput) -> int | str | None:
    return step.error if step.finish_reason == "error" else step.stop_reason
