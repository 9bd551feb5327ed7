"""Which processors of logits an engine in another process can be sent."""

from __future__ import annotations

import operator
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.client.sendable import check_sendable
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.frontend.client.test_engine import text_of


class Processor:
    def __call__(self, ids: Any, logits: Any) -> Any:
        return logits


def test_what_can_be_imported_can_be_sent() -> None:
    check_sendable([operator.add, Processor(), Processor])


@pytest.mark.parametrize("bad", [lambda ids, logits: logits, SimpleNamespace(run=lambda: 0)])
def test_what_can_not_is_refused_by_its_number(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"logits_processors\[1\] must be a function of a module"):
        check_sendable([operator.add, bad])


@pytest.mark.parametrize("kind", ["function", "object"])
def test_an_interactive_session_has_no_file(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    class Own(Processor):
        pass

    def own(ids: Any, logits: Any) -> Any:
        return logits

    main = SimpleNamespace(Own=Own, own=own)
    monkeypatch.setitem(sys.modules, "__main__", main)  # type: ignore[arg-type]
    for each in (Own, own):
        each.__module__, each.__qualname__ = "__main__", each.__name__
    given = [own] if kind == "function" else [Own()]
    with pytest.raises(ValueError, match=r"logits_processors\[0\] must be of a file"):
        check_sendable(given)
    main.__file__ = "script.py"
    check_sendable(given)


async def test_others_go_on(text_engine: Any, engine_client: Any) -> None:
    engine: EngineClient = engine_client(text_engine)
    await engine.start()
    try:
        with pytest.raises(ValueError, match="logits_processors"):
            await text_of(
                engine, "The key", SamplingParams(logits_processors=[lambda ids, logits: logits])
            )
        assert await text_of(engine, "The key")
        assert engine.running == 0
    finally:
        await engine.stop()
