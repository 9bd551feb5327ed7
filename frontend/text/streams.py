"""The texts of running requests: the engine's token ids in, pieces of text out.

Stop strings are found here, since the engine knows no text. One thread hands in the engine's
outputs; requests may be added and dropped from another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from coppice.frontend.text.detokenizer import IncrementalDecoder
from coppice.frontend.text.outputs import CompletionOutput, Logprob, RequestOutput
from coppice.frontend.text.stop_strings import StopStrings
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.frontend.text.tokens import TokenTexts
from coppice.runtime.requests.request import BestLine, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.beam_search import BeamSearchParams

Params = TypeVar("Params", SamplingParams, BeamSearchParams)


@dataclass(slots=True)  # not frozen, for speed: see StepOutput
class TextDelta:
    """What a step did to one continuation of a request.

    Attributes:
        text: new text that no stop string can take back any more.
        index: which continuation of the request it is.
        completion: the continuation, once it has ended.
        output: the whole result, once all continuations have ended.
        logprobs, text_offsets: of the new tokens, as in `CompletionOutput`; empty if they were not
            asked for.
        best_so_far: of a beam search: its best line as it is after the step, as a whole, which the
            next one may take back.
        cached_tokens: prompt tokens of the request whose KV was reused.
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

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to it but text, of a continuation that goes on."""
        return self.completion is None and self.best_so_far is None and not self.logprobs

    def follow(self, earlier: TextDelta) -> None:
        """Takes in what the same continuation did before."""
        self.text = earlier.text + self.text
        self.new_token_ids = earlier.new_token_ids + self.new_token_ids
        self.logprobs = earlier.logprobs + self.logprobs
        self.text_offsets = earlier.text_offsets + self.text_offsets
        self.best_so_far = self.best_so_far or earlier.best_so_far


@dataclass(slots=True)
class _Line:
    """One continuation's text as far as it has come."""

    index: int
    decoder: IncrementalDecoder
    stops: StopStrings
    shown: bool = False  # whether any of it was handed out
    kept: list[int] = field(default_factory=list)  # tokens that wait to be made text of
    held: TextDelta | None = None  # text that waits to be handed out
    cached_tokens: int = 0  # of the prompt, as far as it is known
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    completion: CompletionOutput | None = None  # once it has ended


@dataclass(slots=True)
class _Running:
    """A request and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    lines: list[_Line]
    in_pieces: bool
    keeps: bool  # whether tokens may wait to be made text of: no stop string ends it
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def may_wait(self, line: _Line, patient: bool) -> bool:
        """Whether nobody misses what a line goes on with for a while."""
        return (patient and line.shown) or not self.in_pieces


class Texts:
    """What each running request has said so far.

    Attributes:
        token_texts: what the tokenizer's tokens spell, one by one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_texts = TokenTexts(tokenizer)
        self._tokenizer = tokenizer
        self._running: dict[str, _Running] = {}
        self._waiting: dict[tuple[str, int], tuple[_Running, _Line]] = {}

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        in_pieces: bool = True,
    ) -> None:
        """Begins a request of `params.num_sequences` continuations.

        If nobody wants it `in_pieces`, there is one delta at its end, with the `output`.
        """
        ids = tuple(prompt_token_ids)
        decoder = self._decoder(ids, params)
        lines = [
            _Line(
                index,
                decoder.copy(),
                StopStrings(params.stop_strings, include=params.include_stop_str_in_output),
            )
            for index in range(params.num_sequences)
        ]
        keeps = not params.stop_strings
        self._running[request_id] = _Running(
            request_id, prompt, ids, params, lines, in_pieces, keeps
        )

    def _decoder(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> IncrementalDecoder:
        """At the beginning of a text behind the prompt."""
        decode = partial(self._tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        exact = params.structured_outputs is not None
        return IncrementalDecoder(
            decode, self._tokenizer.text_before(prompt_token_ids, exact=exact)
        )

    def drop(self, request_id: str) -> bool:
        """Forgets a request; False if it is unknown or has ended."""
        return self._running.pop(request_id, None) is not None

    def for_engine(self, params: Params) -> Params:
        """The parameters as the engine takes them: without words, and without a choice to make."""
        if isinstance(params, SamplingParams) and params.chooses:
            top = 0 if params.logprobs is None else params.logprobs
            params = replace(params, n=params.num_sequences, best_of=None, logprobs=top)
        return self._words_as_tokens(params)

    def _words_as_tokens(self, params: Params) -> Params:
        """With `bad_words` as token ids: without and with a space before each."""
        if not params.bad_words:
            return params
        words = list(params.bad_words_token_ids or ())
        for word in params.bad_words:
            for spelt in (word.lstrip(), " " + word.lstrip()):
                try:
                    spelt.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"bad_words must be valid Unicode, got {word!a}") from None
                ids = self._tokenizer.encode_more(spelt)
                if not ids:
                    raise ValueError(f"bad_words must be words that have tokens, got {word!r}")
                words.append(tuple(ids))
        return replace(params, bad_words=None, bad_words_token_ids=words)

    def keep(self, request_id: str, index: int, token_ids: Sequence[int], *, patient: bool) -> bool:
        """Takes new tokens of a line that goes on, if they can wait; False: it did nothing.

        They become part of the line's next delta, and cost next to nothing until then. They can't
        wait where each may end the text, or where the next delta is to be had at once: see
        `advance` for `patient`.
        """
        running = self._running.get(request_id)
        if running is None:
            return True  # nobody wants them
        line = running.lines[index]
        if not running.in_pieces:
            if not running.keeps:
                return False
        elif not (patient and line.shown and running.keeps):
            return False
        elif not line.kept:
            self._waiting[request_id, index] = running, line
        line.kept += token_ids
        return True

    def advance(self, step: StepOutput, *, patient: bool = False) -> tuple[TextDelta | None, bool]:
        """The delta that an output of the engine makes, and whether a stop string ended its line.

        If so, the engine does not know it yet: abort the line there. None if the line has ended
        here already: what the engine made of it since then counts for nothing. With `patient` also
        None for what may wait until it is asked for by `release`: all but the beginning of a line
        and its end.
        """
        running = self._running.get(step.request_id)
        if running is None or running.lines[step.index].completion is not None:
            return None, False
        if step.best_so_far is not None and not running.in_pieces:
            return None, False
        line = running.lines[step.index]
        waits = step.finish_reason is None and running.may_wait(line, patient)
        delta, stopped = self._made(running, line, step)
        if not running.in_pieces:
            return delta if delta.output is not None else None, stopped
        if waits and not stopped:
            line.held = delta
            self._waiting[step.request_id, step.index] = running, line
            return None, False
        line.shown = line.shown or bool(delta.text or delta.logprobs or delta.best_so_far)
        return delta, stopped

    @property
    def waiting(self) -> list[tuple[str, int]]:
        """The lines, by request and index, of which something waits."""
        return list(self._waiting)

    def release(self, request_id: str, index: int) -> TextDelta | None:
        """What waits of a line; None if nothing does any more."""
        running, line = self._waiting.pop((request_id, index))
        if line.completion is not None or self._running.get(request_id) is not running:
            return None
        held, line.held = line.held, None
        if not line.kept:
            return held
        tokens, line.kept = line.kept, []
        line.token_ids += tokens
        line.stops.push(line.decoder.push(tokens))
        text, cached = line.stops.take(), line.cached_tokens
        delta = TextDelta(request_id, text, tuple(tokens), None, index=index, cached_tokens=cached)
        if held is not None:
            delta.follow(held)
        return delta

    def _made(self, running: _Running, line: _Line, step: StepOutput) -> tuple[TextDelta, bool]:
        """The delta of an output and of all that waited of its line."""
        if line.kept:
            step.new_token_ids = (*line.kept, *step.new_token_ids)
            line.kept.clear()
        line.cached_tokens = step.cached_tokens
        delta, stopped = self._advance(running, step)
        if line.held is not None:
            delta.follow(line.held)
            line.held = None
        return delta, stopped

    def _advance(self, running: _Running, step: StepOutput) -> tuple[TextDelta, bool]:
        if step.best_so_far is not None:
            best = self._best_so_far(running, step.best_so_far)
            cached = step.cached_tokens
            delta = TextDelta(
                running.request_id, "", (), None, best_so_far=best, cached_tokens=cached
            )
            return delta, False
        if step.num_results is not None:
            del running.lines[step.num_results :]  # the search has found no more
        params, line = running.params, running.lines[step.index]
        stops = line.stops
        new = list(step.new_token_ids)
        if step.prompt_logprobs is not None:
            ids = running.prompt_token_ids
            first = max(1, params.prompt_logprobs_start)
            places = self.token_texts.logprobs(step.prompt_logprobs[first:], ids[first:])
            running.prompt_logprobs = [*[None] * first, *places]
        logprobs, offsets = [], []
        if step.logprobs is not None:
            logprobs = list(self.token_texts.logprobs(step.logprobs, new))
        # The token that ended the text is part of the result, but not of the text.
        silent = _is_silent(step, params)
        if not logprobs and not params.stop_strings:  # where each begins does not matter
            line.token_ids += new
            stops.push(line.decoder.push(new[:-1] if silent else new))
        else:
            for position, token in enumerate(new):
                line.token_ids.append(token)
                if logprobs:
                    offsets.append(
                        len(stops.text)
                    )  # where it begins, or what was held back before it
                if silent and position == len(new) - 1:
                    break
                piece = line.decoder.push((token,))
                if logprobs and (own := self.token_texts.text(token)) and piece.endswith(own):
                    offsets[-1] += len(piece) - len(own)
                stops.push(piece, armed=len(line.token_ids) > params.min_tokens)
                if stops.matched is not None:
                    del new[position + 1 :], logprobs[position + 1 :]
                    break
        line.logprobs += logprobs
        line.text_offsets += offsets
        finish_reason, stop_reason = step.finish_reason, _stop_reason(step)
        if finish_reason is not None and stops.matched is None:
            armed = len(line.token_ids) > params.min_tokens
            stops.push(line.decoder.flush(), armed=armed)
        stopped = stops.matched is not None and finish_reason is None
        if stops.matched is not None:
            finish_reason, stop_reason = "stop", stops.matched
        text = stops.take(final=finish_reason is not None)
        output = None
        if finish_reason is not None:
            line.completion = _completion(line, params, finish_reason, stop_reason)
            if step.cumulative_logprob is not None:
                line.completion = replace(
                    line.completion,
                    cumulative_logprob=step.cumulative_logprob,
                    score=step.score,
                )
            if all(each.completion is not None for each in running.lines):
                self._running.pop(running.request_id, None)  # it may have been dropped meanwhile
                output = _output(running, step.cached_tokens)
        delta = TextDelta(
            running.request_id,
            text,
            tuple(new),
            output,
            tuple(logprobs),
            tuple(offsets),
            line.index,
            line.completion,
            cached_tokens=step.cached_tokens,
        )
        return delta, stopped

    def _best_so_far(self, running: _Running, best: BestLine) -> CompletionOutput:
        """The best line of a beam search, with the text that it would have."""
        params, ids = running.params, list(best.token_ids)
        stopped = best.stop_reason if isinstance(best.stop_reason, str) else None
        if _is_silent(best, params):
            del ids[-1]
        decoder = self._decoder(running.prompt_token_ids, params)
        text = decoder.push(ids)  # without what may become a character yet
        if best.finish_reason is not None:
            text += decoder.flush()
        if stopped is not None:
            end = text.rfind(stopped)
            text = text[: end + len(stopped) if params.include_stop_str_in_output else end]
        return CompletionOutput(
            0,
            text,
            best.token_ids,
            best.finish_reason,
            best.stop_reason,
            cumulative_logprob=best.cumulative_logprob,
            score=best.score,
        )


def _is_silent(ended: StepOutput | BestLine, params: SamplingParams) -> bool:
    """Whether the last token only says that the text ends, and is no part of it."""
    return (
        ended.finish_reason == "stop"
        and not isinstance(ended.stop_reason, str)
        and not params.include_stop_str_in_output
    )


def _output(running: _Running, cached_tokens: int) -> RequestOutput:
    """The result of a request whose lines have all ended."""
    lines, returned = running.lines, running.params.n
    if running.params.chooses:
        lines = sorted(lines, key=_mean_logprob, reverse=True)
    completions = [line.completion for line in lines if line.completion is not None]
    return RequestOutput(
        running.request_id,
        running.prompt,
        running.prompt_token_ids,
        [replace(each, index=index) for index, each in enumerate(completions[:returned])],
        True,
        cached_tokens,
        running.prompt_logprobs,
        sum(len(each.token_ids) for each in completions[returned:]),
    )


def _mean_logprob(line: _Line) -> float:
    """Per token; one that failed is worse than any other."""
    if line.completion is None or line.completion.finish_reason == "error" or not line.token_ids:
        return -math.inf
    places = zip(line.token_ids, line.logprobs, strict=True)
    return sum(place[token].logprob for token, place in places) / len(line.token_ids)


def _completion(
    line: _Line, params: SamplingParams, finish_reason: str, stop_reason: int | str | None
) -> CompletionOutput:
    completion = CompletionOutput(
        line.index, line.stops.text, tuple(line.token_ids), finish_reason, stop_reason
    )
    if params.logprobs is None:
        return completion
    places = zip(line.token_ids, line.logprobs, strict=True)
    return replace(
        completion,
        cumulative_logprob=sum((place[token].logprob for token, place in places), 0.0),
        logprobs=line.logprobs,
        text_offsets=tuple(line.text_offsets),
    )


def _stop_reason(step: StepOutput) -> int | str | None:
    return step.error if step.finish_reason == "error" else step.stop_reason
