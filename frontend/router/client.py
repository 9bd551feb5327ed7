"""The client of many replicas: an `EngineClient` whose engine is a hub."""

from __future__ import annotations

from typing import Any

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.router.hub import Hub
from coppice.frontend.text.model.generation_config import NO_DEFAULTS, GenerationDefaults
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.process.messages import Ready


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
    def restarts(self) -> int:
        """Replicas that have come in place of others that had ended by themselves."""
        return self.hub.restarts

    @property
    def trouble(self) -> str | None:
        """Why no replica takes requests at present; None if one does."""
        return super().trouble or self.hub.trouble

    def _take_state(self, item: Any) -> None:
        """Takes also what other replicas are, once they have taken the place of all."""
        super()._take_state(item)
        if isinstance(item, Ready):
            self.ready = item
