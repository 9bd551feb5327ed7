"""The form that a request's text must have, with the name of the field that asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.frontend.errors import BadRequest
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams
from coppice.runtime.sampling.grammar_source import check


@dataclass(frozen=True, slots=True)
class Form:
    """The form that a text must have, and the field of the request that asks for it."""

    params: StructuredOutputsParams
    field: str

    def check(self, tenant: str | None = None) -> tuple[str, ...]:
        """The keywords of its schema that the text need not follow; asked for by this tenant.

        Raises BadRequest, with the field, if the form can't be followed. May take seconds.
        """
        try:
            return check(self.params, tenant)
        except ValueError as error:
            raise named(error, self.field) from error


def named(error: ValueError, field: str) -> BadRequest:
    """The error about `json`, for example, as one about the field of the request."""
    name, _, rest = str(error).partition(" ")
    if field == "structured_outputs" and name != field:
        field = f"{field}.{name}"
    return BadRequest(f"{field} {rest}", param=field)
