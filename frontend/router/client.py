"""The client of many replicas: an `EngineClient` whose engine is a hub."""

from __future__ import annotations

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.router.hub import Hub
from coppice.frontend.text.model.generation_config import NO_DEFAULTS, GenerationDefaults
from coppice.frontend.text.tokenizer import Tokenizer


class ReplicasClient(EngineClient):
    """Everything that an `EngineClient` does, with the replicas of a hub.

    Args:
        hub: whose replicas may come before `start`, which waits for the first one, or later.
        tokenizer, defaults, longest_delay, gives_way: as in `EngineClient`.
    """

    def __init__(
        self,
        hub: Hub,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults = NO_DEFAULTS,
        *,
        longest_delay: float = 0.0,
        gives_way: bool = False,
    ) -> None:
        super().__init__(
            lambda: hub, tokenizer, defaults, longest_delay=longest_delay, gives_way=gives_way
        )
        self.hub = hub

    @property
    def trouble(self) -> str | None:
        """Why no replica takes requests at present; None if one does."""
        return super().trouble or self.hub.trouble
