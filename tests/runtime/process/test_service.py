"""The calls that another process may make to an engine; no other is answered."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.process.service import EngineService
from coppice.runtime.requests.sampling_params import SamplingParams

PROMPT = list(range(40, 77))


@pytest.fixture
def service(tiny_checkpoint: Callable[..., Path]) -> EngineService:
    return EngineService(Engine(EngineConfig(str(tiny_checkpoint("llama")), kv_cache_tokens=1024)))


def test_pins_are_plain_data(service: EngineService) -> None:
    service.call("add_request", ("a", PROMPT, SamplingParams(max_tokens=1)), {})
    while service.call("has_unfinished", (), {}):
        service.engine.step()
    put = service.put_pin("handbook", PROMPT[:20], ttl=60)
    assert (put.num_tokens, put.cached_tokens, put.ttl) == (20, 20, 60)
    assert put.seconds_left == pytest.approx(60, abs=1)
    assert service.put_pin("handbook", PROMPT[:20]).ttl is None, "the same prefix: renewed"
    with pytest.raises(ValueError, match="there is a pin named 'handbook' already"):
        service.put_pin("handbook", PROMPT[:21])
    with pytest.raises(ValueError, match="prompt_token_ids must be integers from 0 to 319"):
        service.put_pin("bad", [1, 320])
    with pytest.raises(ValueError, match="ttl must be more than 0"):
        service.put_pin("handbook", PROMPT[:20], ttl=0)
    (listed,) = service.list_pins()
    assert pickle.loads(pickle.dumps(listed)) == listed
    assert (listed.name, listed.cached_tokens) == ("handbook", 20)


@pytest.mark.parametrize("method", ["step", "call", "tree", "__init__", "_sequences", ""])
def test_what_is_not_listed_cannot_be_called(service: EngineService, method: str) -> None:
    with pytest.raises(ValueError, match=r"method must be one of add_request, .*, check, got"):
        service.call(method, (), {})
