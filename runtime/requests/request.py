"""A request, and the sequence of tokens that it extends."""

from __future__ import annotations

from array import array
from collections.abc import Container, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from coppice.radix import Hold, RequestAccount
from coppice.runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # these need torch, which a simulation of the scheduler does without
    from coppice.runtime.requests.logprobs import Logprobs
    from coppice.runtime.requests.prompt_reader import PromptReader


#: Stands for the last token of a sequence while only the device has it.
LATE = -1


class QueueFull(RuntimeError):
    """A request was refused because the queue is full; `limit` names the option that bounds it."""

    limit = ""


BESIDE_PINS = "the part of the KV cache that no pin keeps"


class PromptTooLong(ValueError):
    """A prompt has more tokens than fit beside at least one more.

    Attributes:
        tokens: of the prompt; of the part that was counted, unless it was `counted` to its end.
        longest: tokens, prompt and output together, that a request may have.
        limit: what allows no more.
    """

    tokens = 0
    longest = 0
    limit = "max_model_len"
    counted = True


def too_long(
    name: str,
    tokens: int,
    longest: int,
    limit: str = "max_model_len",
    *,
    counted: bool = True,
    room: bool = True,
) -> PromptTooLong:
    """The error for a prompt that is called `name`; `room`: one more token must fit after it."""
    allowed = f"have at most {longest} tokens ({limit})"
    if room:
        allowed = f"be shorter than {longest} tokens ({limit}), so that there is room for at least "
        allowed += "one more"
    error = PromptTooLong(f"{name} must {allowed}, got {'' if counted else 'more than '}{tokens}")
    error.tokens, error.longest, error.limit, error.counted = tokens, longest, limit, counted
    return error


class Unfinished(RuntimeError):
    """An operation was refused because requests are running or waiting."""


class DeviceLost(RuntimeError):
    """The device has failed for good: every later use of it in this process fails.

    Some errors of CUDA have this effect until the process ends.
    """


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The adapter that a request asks for, and the tokens on which it acts.

    An adapter that acts on all tokens has a namespace of its own. One that is invoked by tokens of
    the prompt acts from position `begin` on: all before that is the base model's, in its namespace.
    There the tree calls the token at `begin` by `mark`, a number that no token of the vocabulary
    has; what follows lies below it, and so belongs to this adapter alone.

    Attributes:
        number: of the adapter in its engine.
        begin: the first position on which it acts.
        mark: what the tree calls the token there; None if it has a namespace of its own.
    """

    number: int
    begin: int = 0
    mark: int | None = None

    def keys(self, tokens: array[int], begin: int = 0) -> bytes:
        """What the tree calls these tokens, from position `begin` of a sequence on: int32 bytes.

        O(tokens).
        """
        if self.mark is None or not begin <= self.begin < begin + len(tokens):
            return tokens.tobytes()
        keys = tokens[:]
        keys[self.begin - begin] = self.mark
        return keys.tobytes()


@dataclass(frozen=True, slots=True)
class Request:
    """What a user sent."""

    request_id: str
    prompt_token_ids: array[int]
    params: SamplingParams
    namespace: Hashable  # requests of different namespaces never share KV
    arrival: int  # serial number
    seed: int  # of its sampling: the user's, or one that the engine drew
    max_length: int  # tokens, prompt included, at which it ends for "length"
    priority: int = 0  # its class under the policy "priority": the least number first
    beam_search: bool = False  # its sequences are the beams of a search
    grammar: Future[Any] | None = None  # that its text follows, once it is compiled
    adapter: AdapterUse | None = None  # None: the base model computes all of it
    held_elsewhere: int = 0  # prompt tokens, from its beginning, that another replica holds

    def keys(self, tokens: array[int], begin: int = 0) -> bytes:
        """What trees call the tokens of a sequence from position `begin` on: int32 bytes.

        These are the tokens, but for the mark of an adapter (see `AdapterUse`). O(tokens).
        """
        return tokens.tobytes() if self.adapter is None else self.adapter.keys(tokens, begin)


class Forkable(Protocol):
    """What the sampler keeps for one sequence, such as its place in a grammar."""

    def forked(self) -> Forkable:
        """The same for a sequence that continues from the same tokens."""
        ...


class Sequence:
    """One line of tokens that is being extended, and the pages that hold its KV.

    `tokens[:computed]` have their KV in the pages of `table`. The others are to be computed: all of
    the prompt at first, the token that was sampled last while decoding, everything after the hit
    when it resumes. So prefill, decode and resumption are one operation: compute the next tokens,
    and sample one when the end of `tokens` is reached.
    """

    __slots__ = ("request", "tokens", "computed", "status", "hold", "table", "cached_tokens",
                 "counted", "admitted", "preempted", "private", "account", "reader",
                 "token_at", "logit_rules", "index", "arrival", "forked",
                 "drafted", "accepted", "cached_by_tier")  # fmt: skip

    def __init__(self, request: Request, index: int = 0, arrival: int | None = None) -> None:
        self.request = request
        self.index = index  # of the sequence within the request
        # Serial number, unique among sequences; forked ones have later numbers.
        self.arrival = request.arrival if arrival is None else arrival
        self.forked = False  # whether its siblings exist already
        self.tokens = array("i", request.prompt_token_ids)
        self.computed = 0
        self.status = Status.WAITING
        self.hold: Hold | None = None  # its lock in the tree, while running
        self.table = array("i")  # its page table, while running
        self.cached_tokens = -1  # hit of its first admission, and what tiers brought; -1 before
        self.cached_by_tier: dict[str, int] | None = None  # see `StepOutput`
        self.counted = False  # whether its request's time in the queue was, at its first chunk
        self.admitted = -1  # serial number of its last admission
        self.preempted = False  # waits to be resumed
        self.account: RequestAccount | None = None  # of its last admission; None without accounts
        self.token_at = 0.0  # when it last got a token, in seconds of a monotonic clock; 0 before
        self.private = False  # its tokens stay out of the tree until it ends
        self.reader: PromptReader | None = None  # of more rows of its prompt than the last
        self.drafted = self.accepted = 0  # tokens of its drafts, and those that it went on with
        self.logit_rules: Forkable | None = None  # the sampler's; made when it is first sampled

    def keys(self, begin: int = 0, end: int | None = None) -> bytes:
        """`Request.keys` of its tokens from position `begin` up to `end`."""
        tokens = self.tokens
        return self.request.keys(tokens if end is None and not begin else tokens[begin:end], begin)

    @property
    def late(self) -> bool:
        """Whether its last token has been sampled, but not read from the device yet."""
        return self.tokens[-1] == LATE

    @property
    def remaining(self) -> int:
        """Tokens whose KV must be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def hit_limit(self) -> int:
        """The most tokens that it may hit: all but the last, whose logits are needed.

        Fewer if rows of earlier tokens are needed, for the prompt's logprobs or a mean.
        """
        last = len(self.tokens) - 1
        return last if self.reader is None else self.reader.limit(last)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    def ending(self, eos_token_ids: Container[int]) -> tuple[str | None, int | None]:
        """(Finish reason, stop reason) if its last, sampled token ends it; else (None, None)."""
        request, tokens = self.request, self.tokens
        params, token = request.params, tokens[-1]
        # This runs for each token, and nearly none of them ends a sequence.
        ends = token in eos_token_ids or (params.stop_token_ids and token in params.stop_ids)
        if ends and self.num_generated >= params.min_tokens:
            if not params.ignore_eos and token in eos_token_ids:
                return "stop", None
            if token in params.stop_ids:
                return "stop", token
        if len(tokens) >= request.max_length:
            return "length", None
        return None, None


@dataclass(frozen=True, slots=True)
class BestLine:
    """The best line of a beam search after a step; the next step may have another one."""

    token_ids: tuple[int, ...]  # all that was generated
    score: float
    cumulative_logprob: float
    finish_reason: str | None  # None: it continues
    stop_reason: int | str | None


# Not frozen: one is made for every token, and frozen ones take four times as long to make.
@dataclass(slots=True)
class StepOutput:
    """What a step did to one request."""

    request_id: str
    index: int  # of the sequence within the request, or of a beam search's result
    new_token_ids: tuple[int, ...]
    finish_reason: str | None  # None: it continues; "stop", "length", "abort" or "error"
    # The user's stop token id that ended it; of a beam search's result also the stop string.
    stop_reason: int | str | None
    error: str | None  # what went wrong, with finish_reason "error"
    num_prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV was reused
    # Of these, how many were in the "pool", and how many came from each tier; None without tiers.
    cached_by_tier: dict[str, int] | None = None
    score: float | None = None  # of a beam search's result
    cumulative_logprob: float | None = None  # of a beam search's result: the sum of its tokens'
    num_results: int | None = None  # of a beam search that ends; all come in one step
    best_so_far: BestLine | None = None  # of a beam search that continues, if asked for
    logprobs: Logprobs | None = None  # of the new tokens, if asked for
    prompt_logprobs: Logprobs | None = None  # of the prompt, with its first new token
    pooled: np.ndarray | None = None  # the vector or score of a request for one, at its end
    drafted: int = 0  # tokens of the sequence's drafts so far
    accepted: int = 0  # of them, those that its text went on with

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        tokens: tuple[int, ...],
        reason: str | None,
        stop: int | str | None = None,
        error: str | None = None,
        logprobs: Logprobs | None = None,
    ) -> StepOutput:
        """The output of `sequence`, to which the new tokens have been appended."""
        request, cached = sequence.request, sequence.cached_tokens
        # Arguments by their places: by name they take half as long again.
        made = cls(
            request.request_id,
            sequence.index,
            tokens,
            reason,
            stop,
            error,
            len(request.prompt_token_ids),
            cached if cached > 0 else 0,
            sequence.cached_by_tier,
        )
        if logprobs is not None:
            made.logprobs = logprobs
        if sequence.drafted:
            made.drafted, made.accepted = sequence.drafted, sequence.accepted
        prompt = sequence.reader
        if prompt is not None and tokens and sequence.num_generated == len(tokens):
            made.prompt_logprobs = prompt.result()
        return made
