"""What an API writes for the results of a request: the interface that handler and stream use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic_core import to_json

from coppice.frontend.api.cached import cached_details, summed
from coppice.frontend.http.json_answers import CHARACTERS, in_parts
from coppice.frontend.text.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta

_VALUES_OF_CHOICE = 16  # beside its text and logprobs
_VALUES_OF_LOGPROB = 6  # its token, text, number and bytes


class Answers(ABC):
    """The answers to one request, whole or as the events of a stream.

    Attributes:
        last: bytes that end each stream, after its last event.
    """

    last: bytes = b""

    @property
    def frames_text(self) -> bool:
        """Whether from now on a choice's events for plain text differ in nothing but the text."""
        return False

    async def begin(self) -> None:  # noqa: B027 (most have nothing to do)
        """Whatever is to be done once the request is in the engine's queue, before any answer."""

    async def finish(self) -> None:  # noqa: B027
        """Whatever is to be done after the last token, before the end of the answer is written."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def opening(self) -> Iterable[dict[str, Any]]:
        """The events that are sent before there is any text."""

    @abstractmethod
    def delta(self, place: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """The events for one delta of the prompt at `place`."""

    @abstractmethod
    def ending(self, outputs: Sequence[RequestOutput]) -> Iterable[dict[str, Any]]:
        """The events after the last delta."""

    @abstractmethod
    def failure(self, message: str, kind: str) -> Iterable[dict[str, Any]]:
        """The events for an error after the stream has begun; `kind` as the OpenAI API names it."""

    def values(self, outputs: Sequence[RequestOutput]) -> int:
        """About how many JSON values `whole` has, and at most: it decides where that is made."""
        return sum(map(values_of, outputs))

    def delta_values(self, delta: TextDelta) -> int:
        """About how many JSON values the events for a delta have, likewise."""
        values = _VALUES_OF_LOGPROB * sum(map(len, delta.logprobs)) if delta.logprobs else 0
        return values + values_of_places(delta.prompt_logprobs)

    def ending_values(self, outputs: Sequence[RequestOutput]) -> int:
        """About how many JSON values the events of `ending` have, likewise."""
        return 0

    def encoded(self, event: dict[str, Any], *, large: bool = False) -> bytes:
        """The bytes of an event, as a server-sent event; a `large` one is encoded in parts."""
        return b"data: %b\n\n" % (in_parts if large else to_json)(event)


class Counts(NamedTuple):
    """A request's size in tokens.

    Attributes:
        prompt: of its prompts; a prompt counts once for any number of results.
        cached: of those, the ones whose KV was reused.
        generated: of all sequences, those that `best_of` left out included.
        by_tier: of the cached ones, those in the pool and those from each tier beyond it; None
            without tiers.
    """

    prompt: int
    cached: int
    generated: int
    by_tier: dict[str, int] | None = None

    def cached_details(self) -> dict[str, Any]:
        """The cached tokens as all usages have them; by tier in a field of our own."""
        return cached_details(self.cached, self.by_tier)

    def for_log(self) -> dict[str, int]:
        """The fields of the request's log line."""
        return {
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "completion_tokens": self.generated,
        }


def counts(outputs: Sequence[RequestOutput]) -> Counts:
    """The size of a request with these results."""
    return Counts(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.cached_tokens for output in outputs),
        sum(map(generated, outputs)),
        summed(output.cached_by_tier for output in outputs),
    )


def values_of(output: RequestOutput) -> int:
    """About how many JSON values texts and logprobs of a result are, and at most."""
    values = 0
    for made in output.outputs:
        values += _VALUES_OF_CHOICE + len(made.text) // CHARACTERS
        if made.logprobs:
            values += _VALUES_OF_LOGPROB * sum(map(len, made.logprobs))
    if output.prompt_logprobs is not None:  # each choice may repeat them, as an echo and apart
        values += 2 * len(output.outputs) * values_of_places(output.prompt_logprobs)
    return values


def values_of_places(places: Sequence[Mapping[int, Logprob] | None] | None) -> int:
    """About how many JSON values the logprobs of a prompt are, and at most."""
    if places is None:
        return 0
    return _VALUES_OF_LOGPROB * sum(len(place) for place in places if place is not None)


def generated(output: RequestOutput) -> int:
    """The tokens generated for one prompt."""
    return sum(len(each.token_ids) for each in output.outputs) + output.left_out_tokens


def without_text(output: RequestOutput) -> RequestOutput:
    """The result without the one token of a request for only its prompt (`max_tokens` 0)."""
    made = [
        CompletionOutput(each.index, "", (), "length", None, text_offsets=(), logprobs=[])
        for each in output.outputs
    ]
    return replace(output, outputs=made, left_out_tokens=0)
