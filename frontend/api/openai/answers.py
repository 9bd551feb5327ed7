"""The answers of the OpenAI API: whole objects, and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from coppice.frontend.api.answers import (
    Answers,
    Counts,
    counts,
    generated,
    without_text,
)
from coppice.frontend.api.cached import summed
from coppice.frontend.api.openai.logprobs import (
    Place,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from coppice.frontend.api.prepare import Prepared
from coppice.frontend.api.request import TextRequest
from coppice.frontend.chat.dialect import Reading
from coppice.frontend.chat.pieces import CallBegins, Piece, Reader, ReasoningPiece, TextPiece
from coppice.frontend.errors import error_body
from coppice.frontend.http.ids import fresh_id
from coppice.frontend.http.json_answers import CHARACTERS
from coppice.frontend.text.outputs import CompletionOutput, RequestOutput, TextDelta
from coppice.frontend.text.tokens import TokenTexts

Places = Sequence[Place] | None


class Completion(Answers):
    """The answers of /v1/completions to one request."""

    last = b"data: [DONE]\n\n"
    object_whole = "text_completion"
    object_chunk = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        model: str,
        asked: TextRequest,
        prepared: Prepared,
        texts: TokenTexts,
    ) -> None:
        self._asked = asked
        self._params = prepared.params
        self._echoes = prepared.echoes
        self._texts = texts
        self._reading = prepared.reading
        self._id = f"{self.prefix}-{fresh_id()}"
        self._model = model
        self._created = int(time.time())
        self._choices = len(prepared.prompts) * prepared.params.n
        self._prompts = [ids for _, ids in prepared.prompts]
        self._so_far = UsageSoFar(self._prompts)
        # An echo with logprobs is sent with the first text, since only then they are known.
        self._late_echoes = bool(self._echoes) and self._params.logprobs is not None
        self._prompt_logprobs: dict[int, Sequence[Place | None]] = {}  # of each prompt
        self._begun: set[int] = set()  # choices whose late echo is sent

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(place * self._params.n + number, output, each)
            for place, output in enumerate(outputs)
            for number, each in enumerate(output.outputs)
        ]
        return self._object(self.object_whole, choices) | {"usage": usage(outputs, self._reading)}

    def values(self, outputs: Sequence[RequestOutput]) -> int:
        values = super().values(outputs)
        if self._echoes:
            texts = sum(len(echo.text) // CHARACTERS for echo in self._echoes)
            values += self._params.n * texts
        if self._asked.return_token_ids:
            for output in outputs:
                values += len(output.outputs) * len(output.prompt_token_ids)
                values += sum(len(made.token_ids) for made in output.outputs)
        return values

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(self._choices):
            chunks = [] if self._late_echoes else self._first(index)
            if self._asked.return_token_ids:
                chunks = chunks or [self._empty(index)]
                self._add_prompt_ids(chunks[0], self._prompts[index // self._params.n])
            yield from self._with_usage(chunks)

    def delta(self, place: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        if self._asked.nothing_new:
            delta = _without_text(delta)
        if self._asked.continuous_usage:
            self._so_far.add(place, delta)
        index = place * self._params.n + delta.index
        echoed: list[dict[str, Any]] = []
        if self._late_echoes and index not in self._begun:
            self._begun.add(index)
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs[place] = delta.prompt_logprobs
            echoed = self._first(index)
        chunks = self._chunks(index, delta)
        if self._asked.return_token_ids and delta.new_token_ids:
            chunks = chunks or [self._empty(index)]
            chunks[0]["choices"][0]["token_ids"] = list(delta.new_token_ids)
        return self._with_usage(echoed + chunks)

    def ending(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        if not self._asked.include_usage:
            return []
        if self._asked.nothing_new:
            outputs = [without_text(output) for output in outputs]
        return [self._object(self.object_chunk, []) | {"usage": usage(outputs, self._reading)}]

    def failure(self, message: str, kind: str) -> list[dict[str, Any]]:
        return [error_body(message, kind=kind)]

    @property
    def frames_text(self) -> bool:
        asked = self._asked
        special = asked.continuous_usage or asked.return_token_ids or asked.nothing_new
        return not (special or self._late_echoes)

    def _with_usage(self, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._asked.include_usage:
            for chunk in chunks:
                chunk["usage"] = self._so_far.now() if self._asked.continuous_usage else None
        return chunks

    def _first(self, index: int) -> list[dict[str, Any]]:
        """The chunks of a choice that are sent before there is any text."""
        if not self._echoes:
            return []
        echo = self._echoes[index // self._params.n]
        choice = {"index": index, "text": echo.text, "logprobs": None, **_ending(None)}
        places = self._prompt_logprobs.get(index // self._params.n)
        if places is not None:
            choice["logprobs"] = echoed_logprobs(places, echo, completion_logprobs((), ()))
        return [self._object(self.object_chunk, [choice])]

    def _empty(self, index: int) -> dict[str, Any]:
        """A chunk of a choice without text."""
        choice = {"index": index, "text": "", "logprobs": None, **_ending(None)}
        return self._object(self.object_chunk, [choice])

    def _add_prompt_ids(self, chunk: dict[str, Any], ids: Sequence[int]) -> None:
        """Puts the token ids of the prompt into a choice's first chunk, where vLLM has them."""
        chunk["choices"][0]["prompt_token_ids"] = list(ids)

    def _chunks(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """The chunks that are sent for one delta."""
        if delta.best_so_far is not None and delta.completion is None:
            choice = {"index": index, "text": "", "logprobs": None, **_ending(None)}
            return [self._object(self.object_chunk, [choice | _best_so_far(delta.best_so_far)])]
        if not delta.text and not delta.logprobs and delta.completion is None:
            return []
        offsets: Sequence[int] = delta.text_offsets
        if self._echoes:
            before = len(self._echoes[index // self._params.n].text)
            offsets = [before + offset for offset in offsets]
        logprobs = self._logprobs(delta.logprobs, offsets)
        choice = {"index": index, "text": delta.text, "logprobs": logprobs}
        return [self._object(self.object_chunk, [choice | _ending(delta.completion)])]

    def _choice(self, index: int, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        text, logprobs = made.text, self._logprobs(made.logprobs, made.text_offsets)
        if self._echoes:
            echo = self._echoes[index // self._params.n]
            text = echo.text + text
            if self._params.logprobs is not None and output.prompt_logprobs is not None:
                logprobs = logprobs or completion_logprobs((), ())
                logprobs = echoed_logprobs(output.prompt_logprobs, echo, logprobs)
        choice = {"index": index, "text": text, "logprobs": logprobs, **_ending(made)}
        if self._asked.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice | self._ids(made) | self._prompt(output)

    def _ids(self, made: CompletionOutput) -> dict[str, Any]:
        """vLLM's field with the token ids of the text, if they were asked for."""
        return {"token_ids": list(made.token_ids)} if self._asked.return_token_ids else {}

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        """vLLM's field with the logprobs of the prompt, if they were asked for."""
        places = output.prompt_logprobs
        if places is None or not self._asked.prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(places)}

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._readers: dict[int, Reader] = {}  # of each choice of a stream

    @property
    def frames_text(self) -> bool:
        return super().frames_text and self._reading is None

    def _first(self, index: int) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)]

    def _empty(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {}, None)

    def _add_prompt_ids(self, chunk: dict[str, Any], ids: Sequence[int]) -> None:
        chunk["prompt_token_ids"] = list(ids)

    def _chunks(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        if delta.best_so_far is not None and delta.completion is None:
            chunk = self._chunk(index, {}, None)
            chunk["choices"][0] |= _best_so_far(delta.best_so_far)
            return [chunk]
        written = self._deltas(index, delta) if delta.text or delta.completion is not None else []
        if delta.logprobs and not written:
            written = [{"content": ""}]
        made = [self._chunk(index, each, None) for each in written]
        if delta.logprobs:
            made[0]["choices"][0]["logprobs"] = self._logprobs(delta.logprobs, None)
        if delta.completion is not None:
            made.append(self._chunk(index, {}, delta.completion))
            if index in self._readers:
                _called(made[-1]["choices"][0], self._readers[index].calls)
        return made

    def _deltas(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """The `delta` objects of the API for one delta of the engine."""
        if self._reading is None:
            return [{"content": delta.text}] if delta.text else []
        if index not in self._readers:
            self._readers[index] = self._reading.reader()
        reader = self._readers[index]
        pieces = reader.push(delta.text)
        if delta.completion is not None:
            pieces += reader.end()
        return [_piece(piece) for piece in self._wanted(pieces)]

    def _wanted(self, pieces: list[Piece]) -> list[Piece]:
        if self._asked.include_reasoning:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, ReasoningPiece)]

    def _chunk(
        self, index: int, delta: dict[str, Any], completion: CompletionOutput | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, **_ending(completion)}
        return self._object(self.object_chunk, [choice])

    def _choice(self, index: int, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": made.text, "refusal": None}
        calls: list[dict[str, Any]] = []
        if self._reading is not None:
            pieces = self._wanted(self._reading.reader().whole(made.text))
            reasoning, text, calls = _read(pieces)
            message["content"] = text or (None if calls or reasoning else "")
            if reasoning:
                message |= _reasoning(reasoning)
            if calls:
                message["tool_calls"] = calls
        logprobs = self._logprobs(made.logprobs, None)
        choice = {"index": index, "message": message, "logprobs": logprobs, **_ending(made)}
        _called(choice, len(calls))
        return choice | self._ids(made)

    def _logprobs(self, places: Places, offsets: Sequence[int] | None) -> dict[str, Any] | None:
        return chat_logprobs(places, self._params.logprobs or 0, self._texts) if places else None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        answer = super().whole(outputs) | self._prompt(outputs[0])
        if self._asked.return_token_ids:
            answer["prompt_token_ids"] = list(outputs[0].prompt_token_ids)
        return answer


class UsageSoFar:
    """Token counts of a stream so far, over all choices; at its end they equal `usage`.

    Args:
        prompts: token ids of each prompt.
    """

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        self._prompt = sum(map(len, prompts))
        self._completion: dict[int, int] = {}  # tokens generated after each prompt
        self._cached: dict[int, tuple[int, dict[str, int] | None]] = {}
        self._drafts: dict[tuple[int, int], tuple[int, int]] = {}  # of each choice
        self._ended: set[int] = set()  # places whose prompt's tokens are all counted

    def add(self, place: int, delta: TextDelta) -> None:
        """Adds a delta of the prompt at `place`."""
        self._cached[place] = delta.cached_tokens, delta.cached_by_tier
        self._drafts[place, delta.index] = delta.drafted_tokens, delta.accepted_tokens
        if delta.output is not None:
            self._ended.add(place)
            self._completion[place] = generated(delta.output)
        elif place not in self._ended:  # else it is a choice's whose text left after the last one
            before = self._completion.get(place, 0)
            self._completion[place] = before + len(delta.new_token_ids)

    def now(self) -> dict[str, Any]:
        """The counts; cached tokens are known from the first piece of text on."""
        cached = sum(tokens for tokens, _ in self._cached.values())
        by_tier = summed(each for _, each in self._cached.values())
        counted = _usage(Counts(self._prompt, cached, sum(self._completion.values()), by_tier))
        drafted = sum(each for each, _ in self._drafts.values())
        accepted = sum(each for _, each in self._drafts.values())
        if details := _draft_details(drafted, accepted):
            counted["completion_tokens_details"] = details
        return counted


def usage(outputs: Sequence[RequestOutput], reading: Reading | None = None) -> dict[str, Any]:
    """Token counts over all choices of a request; a prompt counts once for any `n`.

    The sequences that `best_of` left out were generated too, and count. With a `reading` there are
    those of the reasoning, if they can be counted exactly.
    """
    counted = _usage(counts(outputs))
    reasoning = None if reading is None else reading.reasoning_tokens(outputs)
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    details |= _draft_details(
        sum(output.drafted_tokens for output in outputs),
        sum(output.accepted_tokens for output in outputs),
    )
    if details:
        counted["completion_tokens_details"] = details
    return counted


def _draft_details(drafted: int, accepted: int) -> dict[str, int]:
    """What became of drafts, as OpenAI names it; empty if there were none."""
    if not drafted:
        return {}
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
    }


def _usage(size: Counts) -> dict[str, Any]:
    return {
        "prompt_tokens": size.prompt,
        "completion_tokens": size.generated,
        "total_tokens": size.prompt + size.generated,
        "prompt_tokens_details": size.cached_details(),
    }


def _ending(completion: CompletionOutput | None) -> dict[str, Any]:
    if completion is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def _without_text(delta: TextDelta) -> TextDelta:
    """The delta of a request for only its prompt (`max_tokens` 0), without its one token."""
    output = None if delta.output is None else without_text(delta.output)
    return replace(delta, text="", new_token_ids=(), logprobs=(), text_offsets=(), output=output)


def _best_so_far(best: CompletionOutput) -> dict[str, Any]:
    """An extension of the API: a beam search's best sequence so far, as a whole.

    Each chunk of this kind replaces the one before. Clients that do not know the field see an empty
    piece of text. The results come at the end, each as a whole.
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


def _called(choice: dict[str, Any], calls: int) -> None:
    """Sets the finish reason "tool_calls" if the model ended a text that has calls."""
    if calls and choice["finish_reason"] == "stop":
        choice["finish_reason"] = "tool_calls"


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under the name that most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _piece(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, TextPiece):
        return {"content": piece.text}
    if isinstance(piece, ReasoningPiece):
        return _reasoning(piece.text)
    if isinstance(piece, CallBegins):
        call = {"index": piece.index, **_call(piece.name, "")}
    else:
        call = {"index": piece.index, "function": {"arguments": piece.text}}
    return {"tool_calls": [call]}


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{fresh_id()[:24]}", "type": "function", "function": function}


def _read(pieces: Sequence[Piece]) -> tuple[str, str, list[dict[str, Any]]]:
    """The reasoning, the text around the calls, and the calls."""
    reasoning, text, calls = [], [], []
    for piece in pieces:
        if isinstance(piece, ReasoningPiece):
            reasoning.append(piece.text)
        elif isinstance(piece, TextPiece):
            text.append(piece.text)
        elif isinstance(piece, CallBegins):
            calls.append(_call(piece.name, ""))
        else:
            calls[piece.index]["function"]["arguments"] += piece.text
    return "".join(reasoning), "".join(text), calls
