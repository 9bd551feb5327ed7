"""The calls to an engine that another process may make, each by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report, make_stats, pin_state
from coppice.runtime.report.snapshot import PinState
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.schedule.load import LoadMeter


class EngineService:
    """An engine and the calls to it that may come through a channel.

    Arguments and results are plain data that can be pickled. Calls come between two steps.

    Attributes:
        engine: the engine that answers.
        calls: what may be called, by its name.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: Mapping[str, Callable[..., Any]] = {
            "add_request": engine.add_request,
            "add_beam_search": engine.add_beam_search,
            "add_pooling": engine.add_pooling,
            "abort": engine.abort,
            "has_unfinished": engine.has_unfinished,
            "peek": engine.peek,
            "put_pin": self.put_pin,
            "list_pins": self.list_pins,
            "unpin": engine.unpin,
            "load_lora": engine.adapters.load,
            "unload_lora": engine.adapters.unload,
            "list_loras": engine.adapters.listed,
            "reset_cache": engine.reset_cache,
            "stats": partial(make_stats, engine),
            "sleep": engine.sleep,
            "wake_up": engine.wake_up,
            "is_sleeping": lambda: engine.asleep,
            "cache_report": partial(make_report, engine),
            "load": LoadMeter(engine.scheduler, engine.counters).measure,
            "check": engine.check,
        }

    def call(self, method: str, args: Seq[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls one of `calls`.

        Raises ValueError for a name that is not among them, and what the method raises.
        """
        function = self.calls.get(method)
        if function is None:
            raise ValueError(f"method must be one of {', '.join(self.calls)}, got {method!r}")
        try:
            return function(*args, **kwargs)
        finally:
            self.engine.events.flush()

    def put_pin(
        self,
        name: str,
        token_ids: Seq[int],
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        ttl: float | None = None,
        lora_request: LoRARequest | None = None,
        prompt_token_ids: Seq[int] | None = None,
    ) -> PinState:
        """Pins a prefix as `Engine.pin` does; returns the pin as it is now.

        Raises as `Engine.pin`; ValueError also for token ids that the vocabulary does not have.
        """
        self.engine.intake.check_tokens("prompt_token_ids", token_ids)
        pin = self.engine.pin(
            name,
            token_ids,
            cache_salt=cache_salt,
            tenant=tenant,
            ttl=ttl,
            lora_request=lora_request,
            prompt_token_ids=prompt_token_ids,
        )
        return pin_state(pin, self.engine.pins.clock())

    def list_pins(self) -> tuple[PinState, ...]:
        """All pins that have not expired."""
        pins = self.engine.pins
        pins.refresh()
        return tuple(pin_state(pin, pins.clock()) for pin in pins)
