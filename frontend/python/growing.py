"""A request's output while it grows: what there is so far, after each piece."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.frontend.text.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta


class _Continuation:
    """The pieces of one continuation so far."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: list[dict[int, Logprob]] = []
        self.ended: CompletionOutput | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.new_token_ids
        self.logprobs += delta.logprobs
        self.ended = delta.completion or self.ended

    def output(self, index: int) -> CompletionOutput:
        logprobs = list(self.logprobs) or None
        return self.ended or CompletionOutput(
            index, self.text, self.token_ids, None, logprobs=logprobs
        )


class GrowingOutput:
    """The output of one request of `count` continuations, to which pieces are added."""

    def __init__(self, prompt: str | None, prompt_token_ids: Sequence[int], count: int) -> None:
        self._prompt, self._ids = prompt, tuple(prompt_token_ids)
        self._continuations = [_Continuation() for _ in range(count)]

    def add(self, delta: TextDelta) -> RequestOutput:
        """The output with this piece; `finished` with the last one."""
        if delta.output is not None:
            return delta.output
        self._continuations[delta.index].add(delta)
        return RequestOutput(
            delta.request_id,
            self._prompt,
            self._ids,
            [each.output(index) for index, each in enumerate(self._continuations)],
            False,
            delta.cached_tokens,
            cached_by_tier=delta.cached_by_tier,
        )
