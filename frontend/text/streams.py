"""The texts of all running requests: the engine's token ids in, pieces of text out.

Stop strings are found here, since the engine knows no text. One thread hands in the engine's
outputs; requests may be added and dropped from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from coppice.frontend.text.continuation import Continuation, is_silent
from coppice.frontend.text.detokenizer import IncrementalDecoder
from coppice.frontend.text.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta
from coppice.frontend.text.stop_strings import StopStrings
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.frontend.text.tokens import TokenTexts
from coppice.runtime.requests.request import BestLine, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams


@dataclass(slots=True)
class _Running:
    """A request and its continuations.

    Attributes:
        in_pieces: whether its text is wanted as it comes, not only at its end.
        keeps: whether tokens may wait to be decoded: no stop string can end the text in them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    continuations: list[Continuation]
    in_pieces: bool
    keeps: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class Texts:
    """What each running request has generated so far, as text.

    Attributes:
        token_texts: what the tokenizer's tokens spell, one by one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_texts = TokenTexts(tokenizer)
        self._tokenizer = tokenizer
        self._running: dict[str, _Running] = {}
        self._waiting: dict[tuple[str, int], tuple[_Running, Continuation]] = {}

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

        Unless it is wanted `in_pieces`, there is one delta at its end, with the `output`.
        """
        ids = tuple(prompt_token_ids)
        continuations = self._continuations(ids, params)
        self._running[request_id] = _Running(
            request_id, prompt, ids, params, continuations, in_pieces, not params.stop_strings
        )

    def _continuations(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> list[Continuation]:
        """All continuations of a request, none of which has begun."""
        decoder = self._decoder(prompt_token_ids, params)
        return [
            Continuation(
                index,
                params,
                decoder.copy(),
                StopStrings(params.stop_strings, include=params.include_stop_str_in_output),
            )
            for index in range(params.num_sequences)
        ]

    def _decoder(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> IncrementalDecoder:
        """For a text that begins after the prompt."""
        decode = partial(self._tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        exact = params.structured_outputs is not None
        return IncrementalDecoder(
            decode, self._tokenizer.text_before(prompt_token_ids, exact=exact)
        )

    def again(self, request_id: str) -> bool:
        """Begins a request anew, if nobody has seen a piece of it; else returns False.

        Also False if it is dropped meanwhile.
        """
        running = self._running.get(request_id)
        if running is None or running.in_pieces:
            return False
        # In place: an entry that was added here could be one that another thread has just dropped,
        # and nobody would drop it again.
        running.continuations = self._continuations(running.prompt_token_ids, running.params)
        running.prompt_logprobs = None
        return request_id in self._running

    def drop(self, request_id: str) -> bool:
        """Forgets a request; False if it is unknown or has ended."""
        return self._running.pop(request_id, None) is not None

    def keep(
        self,
        request_id: str,
        index: int,
        token_ids: Sequence[int],
        drafted: int,
        accepted: int,
        *,
        patient: bool,
    ) -> bool:
        """Takes new tokens of a continuation that has not ended; False if they can't wait.

        They become part of its next delta, and cost next to nothing until then. They can't wait
        where each may end the text, or where the next delta is wanted at once: see `advance` for
        `patient`.
        """
        running = self._running.get(request_id)
        if running is None:
            return True  # nobody wants them
        continuation = running.continuations[index]
        if not running.in_pieces:
            if not running.keeps:
                return False
        elif not (patient and continuation.shown and running.keeps):
            return False
        elif not continuation.kept:
            self._waiting[request_id, index] = running, continuation
        continuation.kept += token_ids
        continuation.drafted, continuation.accepted = drafted, accepted
        return True

    def advance(self, step: StepOutput, *, patient: bool = False) -> tuple[TextDelta | None, bool]:
        """The delta of an output of the engine, and whether a stop string ended its continuation.

        If so, the engine does not know it yet: abort the continuation there. The delta is None if
        the continuation has ended here already: what the engine generated since then is dropped.
        With `patient` it is also None for what may wait until `release` asks for it: everything but
        the beginning and the end of a continuation.
        """
        running = self._running.get(step.request_id)
        if running is None or running.continuations[step.index].completion is not None:
            return None, False
        continuation = running.continuations[step.index]
        if step.best_so_far is not None:
            if not running.in_pieces:
                return None, False
            delta, stopped = self._best_so_far(running, step, step.best_so_far), False
        else:
            delta, stopped = self._advance(running, step)
        if not running.in_pieces:
            return delta if delta.output is not None else None, stopped
        if patient and continuation.shown and step.finish_reason is None and not stopped:
            continuation.held = delta
            self._waiting[step.request_id, step.index] = running, continuation
            return None, False
        continuation.shown |= bool(delta.text or delta.logprobs or delta.best_so_far)
        return delta, stopped

    @property
    def waiting(self) -> list[tuple[str, int]]:
        """The continuations, by request and index, of which something waits."""
        return list(self._waiting)

    def release(self, request_id: str, index: int) -> TextDelta | None:
        """What waits of a continuation; None if nothing does any more."""
        running, continuation = self._waiting.pop((request_id, index))
        if continuation.completion is not None or self._running.get(request_id) is not running:
            return None
        return continuation.release(request_id)

    def _advance(self, running: _Running, step: StepOutput) -> tuple[TextDelta, bool]:
        if step.num_results is not None:
            del running.continuations[step.num_results :]  # the search has found no more
        if step.prompt_logprobs is not None:
            ids = running.prompt_token_ids
            first = max(1, running.params.prompt_logprobs_start)
            places = self.token_texts.logprobs(step.prompt_logprobs[first:], ids[first:])
            running.prompt_logprobs = [*[None] * first, *places]
        delta, stopped = running.continuations[step.index].advance(step, self.token_texts)
        if step.prompt_logprobs is not None:
            delta.prompt_logprobs = running.prompt_logprobs
        ended = delta.completion is not None
        if ended and all(each.completion is not None for each in running.continuations):
            self._running.pop(running.request_id, None)  # it may have been dropped meanwhile
            delta.output = _output(running, step)
        return delta, stopped

    def _best_so_far(self, running: _Running, step: StepOutput, best: BestLine) -> TextDelta:
        """The delta that shows a beam search's best sequence, with the text that it would have."""
        params, ids = running.params, list(best.token_ids)
        stopped = best.stop_reason if isinstance(best.stop_reason, str) else None
        if is_silent(best, params):
            del ids[-1]
        decoder = self._decoder(running.prompt_token_ids, params)
        if stopped is not None:  # it is complete in the last token, for the first time that counts
            stops = StopStrings([stopped], include=params.include_stop_str_in_output)
            stops.push(decoder.push(ids[:-1]), armed=False)
            stops.push(decoder.push(ids[-1:]))
            text = stops.text
        else:
            text = decoder.push(ids)  # without bytes that may yet become a character
            if best.finish_reason is not None:
                text += decoder.flush()
        made = CompletionOutput(
            0,
            text,
            best.token_ids,
            best.finish_reason,
            best.stop_reason,
            cumulative_logprob=best.cumulative_logprob,
            score=best.score,
        )
        return TextDelta(
            running.request_id,
            "",
            (),
            None,
            best_so_far=made,
            cached_tokens=step.cached_tokens,
            cached_by_tier=step.cached_by_tier,
        )


def _output(running: _Running, step: StepOutput) -> RequestOutput:
    """The result of a request whose continuations have all ended, the last of them with `step`."""
    ended, returned = running.continuations, running.params.n
    if running.params.chooses:
        ended = sorted(ended, key=lambda each: each.mean_logprob, reverse=True)
    completions = [each.completion for each in ended if each.completion is not None]
    return RequestOutput(
        running.request_id,
        running.prompt,
        running.prompt_token_ids,
        [replace(each, index=index) for index, each in enumerate(completions[:returned])],
        True,
        step.cached_tokens,
        running.prompt_logprobs,
        sum(len(each.token_ids) for each in completions[returned:]),
        sum(each.drafted for each in ended),
        sum(each.accepted for each in ended),
        step.cached_by_tier,
    )
