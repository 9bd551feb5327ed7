"""The schemas of the OpenAI API's answers, for the description of the routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from coppice.frontend.api.cached import CachedByTier
from coppice.frontend.strict import Body


class PromptTokensDetails(Body):
    """The prompt's tokens whose KV was reused instead of computed."""

    cached_tokens: int = Field(ge=0)
    cached_tokens_by_tier: CachedByTier | None = None


class CompletionTokensDetails(Body):
    """The generated tokens that are reasoning, without its marks, and what became of drafts.

    Drafts are the request's `prediction` and what the engine expects by itself.
    """

    reasoning_tokens: int | None = Field(default=None, ge=0)
    accepted_prediction_tokens: int | None = Field(default=None, ge=0)
    rejected_prediction_tokens: int | None = Field(default=None, ge=0)


class Usage(Body):
    """Token counts over all choices of a request."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobs(Body):
    """Lists with one entry per token; the first token of an echoed prompt has no logprob."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Body):
    """One token at one place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionChoice(Body):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionAnswer(Body):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(Body):
    """A token with its logprob."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(TokenLogprob):
    """The token that was chosen at one place, and the most probable ones there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Body):
    """The logprobs of the answer's tokens."""

    content: list[ChosenToken]
    refusal: None


class MadeFunction(Body):
    """A function that the model calls, its arguments as JSON text."""

    name: str
    arguments: str


class MadeCall(Body):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: MadeFunction


class AnswerMessage(Body):
    """The model's answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MadeCall] | None = None


class ChatChoice(Body):
    """One of the `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatAnswer(Body):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(Body):
    """The model that is served, under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the folder or hub id that it was loaded from
    parent: None
    max_model_len: int
    model_impl: Literal["coppice", "transformers"]  # whose code computes it
    default_sampling_params: dict[str, float]  # of generation_config.json, as far as in force


class ModelList(Body):
    """One model, once under each of its names."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Body):
    """A text as tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Body):
    """Tokens as a text."""

    prompt: str


def either(answer: type[Body]) -> dict[int, dict[str, Any]]:
    """`answers` of a route whose answer is one object or, if asked for, a stream."""
    events = {"description": "Events `data: {...}`; the last is `data: [DONE]`."}
    return {200: {"application/json": answer.model_json_schema(), "text/event-stream": events}}
