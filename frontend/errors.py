"""The errors that all parts of the frontend raise and catch; HTTP turns them into answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class BadRequest(ValueError):
    """A request that is refused; `body` is the API's error object."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        """`param`: name of the parameter at fault; `code`, `kind`: as the API names the error;
        `retry_after`: seconds after which the same request may be accepted."""
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.body = error_body(message, kind=kind, param=param, code=code)


class RequestFailed(RuntimeError):
    """A request ended because a step failed."""


class EngineStopped(RequestFailed):
    """The engine takes no requests at present, or ended before this one did."""


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The API's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_value(error: ValueError, body: Mapping[str, Any]) -> BadRequest:
    """The BadRequest for an error of the engine, whose message begins with the parameter's name."""
    if isinstance(error, BadRequest):
        return error
    name = str(error).split(" ", 1)[0].rstrip(":")
    first = name.split("[", 1)[0].split(".", 1)[0]
    return BadRequest(str(error), param=name if first in body else None)
