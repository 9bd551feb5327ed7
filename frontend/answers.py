"""What the OpenAI API answers with: whole objects, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from coppice.frontend.openai_logprobs import (
    Place,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from coppice.frontend.outputs import CompletionOutput, RequestOutput
from coppice.frontend.texts import TextDelta
from coppice.frontend.token_texts import TokenTexts
from coppice.runtime.sampling_params import SamplingParams

Places = Sequence[Place] | None


class Completion:
    """The answers of /v1/completions to one request."""

    object_whole = "text_completion"
    object_chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, params: SamplingParams, texts: TokenTexts) -> None:
        self._params = params
        self._texts = texts
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        made = [(output, each) for output in outputs for each in output.outputs]
        choices = [self._choice(index, *pair) for index, pair in enumerate(made)]
        return self._object(self.object_whole, choices) | {"usage": usage(outputs)}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """What is sent before there is any text."""
        return []

    def chunks(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """What is sent for one delta."""
        if delta.best_so_far is not None and delta.completion is None:
            choice = {"index": index, "text": "", "logprobs": None, **_ending(None)}
            return [self._object(self.object_chunk, [choice | _best_so_far(delta.best_so_far)])]
        if not delta.text and not delta.logprobs and delta.completion is None:
            return []
        logprobs = self._logprobs(delta.logprobs, delta.text_offsets)
        choice = {"index": index, "text": delta.text, "logprobs": logprobs}
        return [self._object(self.object_chunk, [choice | _ending(delta.completion)])]

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last chunk, if it was asked for."""
        return self._object(self.object_chunk, []) | {"usage": usage(outputs)}

    def _choice(self, index: int, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        logprobs = self._logprobs(made.logprobs, made.text_offsets)
        choice = {"index": index, "text": made.text, "logprobs": logprobs, **_ending(made)}
        return choice | _prompt(output)

    def _logprobs(self, places: Places, offsets: Sequence[int] | None) -> dict[str, Any] | None:
        return completion_logprobs(places, offsets or ()) if places else None

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class ChatCompletion(Completion):
    """The answers of /v1/chat/completions to one request."""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)]

    def chunks(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        made = []
        if delta.best_so_far is not None and delta.completion is None:
            chunk = self._chunk(index, {}, None)
            chunk["choices"][0] |= _best_so_far(delta.best_so_far)
            return [chunk]
        if delta.text or delta.logprobs:
            made.append(self._chunk(index, {"content": delta.text}, None, delta.logprobs))
        if delta.completion is not None:
            made.append(self._chunk(index, {}, delta.completion))
        return made

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        completion: CompletionOutput | None,
        places: Places = None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(places, None)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **_ending(completion)}
        return self._object(self.object_chunk, [choice])

    def _choice(self, index: int, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": made.text}
        logprobs = self._logprobs(made.logprobs, None)
        return {"index": index, "message": message, "logprobs": logprobs, **_ending(made)}

    def _logprobs(self, places: Places, offsets: Sequence[int] | None) -> dict[str, Any] | None:
        return chat_logprobs(places, self._params.logprobs or 0, self._texts) if places else None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return super().whole(outputs) | _prompt(outputs[0])


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts over all choices of a request; a prompt counts once, whatever its `n`.

    What `best_of` left out was generated too, and counts.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    completion += sum(output.left_out_tokens for output in outputs)
    cached = sum(output.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _ending(completion: CompletionOutput | None) -> dict[str, Any]:
    if completion is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def _best_so_far(best: CompletionOutput) -> dict[str, Any]:
    """A field of our own: the line that leads a beam search, as a whole; the next may differ.

    Clients that do not know it see an empty piece of text. The results come at the end, each as a
    whole in one piece.
    """
    return {
        "best_so_far": {
            "text": best.text,
            "tokens": len(best.token_ids),
            "score": best.score,
            "cumulative_logprob": best.cumulative_logprob,
            "finished": best.finish_reason is not None,
        }
    }


def _prompt(output: RequestOutput) -> dict[str, Any]:
    """vLLM's field with the logprobs of the prompt, if they were asked for."""
    places = output.prompt_logprobs
    return {} if places is None else {"prompt_logprobs": prompt_logprobs(places)}
