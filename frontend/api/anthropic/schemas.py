"""The schemas of Anthropic's answers, for the description of the routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from coppice.frontend.api.cached import CachedByTier
from coppice.frontend.strict import Body


class CacheCreation(Body):
    """Tokens that were computed and are kept, by the time for which they are."""

    ephemeral_5m_input_tokens: int = Field(ge=0)
    ephemeral_1h_input_tokens: int = Field(ge=0)


class ThinkingTokens(Body):
    """The tokens of the output that are thinking."""

    thinking_tokens: int = Field(ge=0)


class MessageUsage(Body):
    """Token counts; the three of the input sum to the prompt's length."""

    input_tokens: int = Field(ge=0)
    cache_creation_input_tokens: int = Field(ge=0)
    cache_read_input_tokens: int = Field(ge=0)
    cache_read_input_tokens_by_tier: CachedByTier | None = None
    cache_creation: CacheCreation
    output_tokens: int = Field(ge=0)
    output_tokens_details: ThinkingTokens | None = None
    service_tier: Literal["standard"]


class MessageAnswer(Body):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(Body):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int = Field(ge=0)
