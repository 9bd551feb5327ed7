"""The names of the model that is served and of its adapters; requests for others are refused."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.frontend.errors import BadRequest
from coppice.runtime.requests.lora_request import LoRARequest


class ServedModel:
    """The one model of a server, and the adapters that requests may ask for in its place.

    Attributes:
        names: under which requests may ask for it, each once; a request that names none is served.
        root: where it was loaded from: a folder or a hub id.
        adapters: by their names, with that of the model that each belongs to.
    """

    def __init__(self, names: Sequence[str], root: str) -> None:
        self.names = tuple(dict.fromkeys(names))
        self.root = root
        self.adapters: dict[str, tuple[LoRARequest, str]] = {}

    @property
    def name(self) -> str:
        """The first name, by which reports and metrics call it."""
        return self.names[0]

    def check(self, name: str | None) -> None:
        """Raises BadRequest (404) for the name of another model."""
        if name and name not in self.names and name not in self.adapters:
            known = [*self.names, *self.adapters]
            served = f"{', '.join(map(repr, known))} {'is' if len(known) == 1 else 'are'}"
            raise BadRequest(
                f"model {name!r} is not served here; {served}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def adapter(self, name: str | None) -> LoRARequest | None:
        """The adapter of that name; None for the model itself. Raises as `check` does."""
        self.check(name)
        if not name or name in self.names:
            return None
        return self.adapters[name][0]

    def has(self, adapter: LoRARequest) -> bool:
        """Whether this adapter is loaded: not another one of its name."""
        found = self.adapters.get(adapter.lora_name)
        return found is not None and found[0] == adapter

    def as_asked(self, name: str | None) -> str:
        """The name that an answer has: the one that the request gave, else the first."""
        return name or self.name
