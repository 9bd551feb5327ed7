"""The schemas of what the routes below /v1/responses return, for the description of the routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from coppice.frontend.api.cached import CachedByTier
from coppice.frontend.strict import Body


class InputTokensDetails(Body):
    """The input's tokens whose KV was reused, and those that were computed and are now cached."""

    cached_tokens: int = Field(ge=0)
    cached_tokens_by_tier: CachedByTier | None = None
    cache_write_tokens: int = Field(ge=0)


class OutputTokensDetails(Body):
    """The tokens of the output that are reasoning."""

    reasoning_tokens: int = Field(ge=0)


class ResponseUsage(Body):
    """The size of a response in tokens."""

    input_tokens: int = Field(ge=0)
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(ge=0)
    output_tokens_details: OutputTokensDetails
    total_tokens: int = Field(ge=0)


class ResponseAnswer(Body):
    """A response; the fields that are not named here repeat the request."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
    previous_response_id: str | None
    incomplete_details: dict[str, str] | None


class DeletedResponse(Body):
    """A response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Body):
    """A part of the items that a response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Body):
    """The size of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int = Field(ge=0)
