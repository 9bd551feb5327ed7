"""An engine that sleeps: what it frees, what it keeps, what it refuses meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report, make_stats
from coppice.runtime.requests.request import Unfinished
from coppice.runtime.requests.sampling_params import SamplingParams

PROMPT = list(range(1, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(tiny_checkpoint: Callable[..., Path]) -> Engine:
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")), kv_cache_tokens=512, max_num_seqs=4, page_size=4
    )
    return Engine(config)


def run(engine: Engine, name: str = "a") -> tuple[list[int], int]:
    """The tokens of a request, and how many of its prompt were cached."""
    engine.add_request(name, PROMPT, GREEDY)
    tokens, cached = [], 0
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
            cached = output.cached_tokens
    engine.check()
    return tokens, cached


@pytest.mark.parametrize("level", [1, 2])
def test_it_wakes_up_as_it_was_with_an_empty_cache(engine: Engine, level: int) -> None:
    before, _ = run(engine)
    assert run(engine, "b")[1] > 0
    cache = weakref.ref(engine.runner.kv_cache[0].k)
    weights = weakref.ref(engine.runner.decoder)
    engine.sleep(level)
    engine.sleep(level)  # without effect
    assert engine.asleep
    assert cache() is None, "the KV cache is freed"
    assert (weights() is None) == (level == 2)
    with pytest.raises(ValueError, match="refused while the engine sleeps"):
        engine.add_request("c", PROMPT, GREEDY)
    assert engine.step() == []
    assert make_report(engine).pages_cached == 0
    assert make_stats(engine).requests_running == 0
    engine.wake_up()
    engine.wake_up()
    assert not engine.asleep
    assert run(engine, "c") == (before, 0)
    assert run(engine, "d")[1] > 0


def test_pins_keep_their_prefixes(engine: Engine) -> None:
    run(engine)
    engine.pin("p", PROMPT[:16])
    engine.sleep()
    engine.wake_up()
    (pin,) = engine.pins
    assert (pin.num_tokens, pin.cached_tokens) == (16, 0)
    run(engine, "b")
    assert pin.cached_tokens == 16


def test_what_is_refused(engine: Engine) -> None:
    for level in (0, 3, True, "1"):
        with pytest.raises(ValueError, match="level must be 1 or 2"):
            engine.sleep(level)  # type: ignore[arg-type]
    engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(Unfinished, match="sleep: refused while 1 requests are unfinished"):
        engine.sleep()
    engine.abort("a")
    engine.sleep(2)
    engine.close()


def test_it_sleeps_on_if_the_weights_are_gone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine.sleep(2)
    with monkeypatch.context() as patch:
        gone = replace(engine.runner._implementation, path=tmp_path)
        patch.setattr(engine.runner, "_implementation", gone)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            engine.wake_up()
    assert engine.asleep
    engine.wake_up()
    assert run(engine)[0]
