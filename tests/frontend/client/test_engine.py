"""The engine in its own process: requests, refusals, its death and its restart."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from coppice.frontend.client import lifecycle
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.client.process import EngineProcess
from coppice.frontend.errors import EngineStopped
from coppice.frontend.text.beam_stops import WatchStopStrings
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.config import EngineConfig
from coppice.runtime.process.channel import Channel
from coppice.runtime.process.messages import Ready
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.pooling_recipe import Recipe
from coppice.runtime.requests.request import DeviceLost, QueueFull, StepOutput
from coppice.runtime.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Drafts of what is drawn so freely are not accepted: each token takes a step.
ENDLESS = SamplingParams(temperature=2, max_tokens=480, ignore_eos=True)


def config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint), kv_cache_tokens=4096, max_num_seqs=8, max_queued_requests=4
    )


@pytest.fixture
async def engine(
    checkpoint: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineClient]:
    monkeypatch.setattr(lifecycle, "FIRST_PAUSE", 0.05)
    watch = WatchStopStrings(str(checkpoint))
    launch = partial(EngineProcess, config(checkpoint), watch_lines=watch)
    engine = EngineClient(launch, tokenizer)
    await engine.start()
    yield engine
    await engine.stop()


async def text_of(engine: EngineClient, prompt: str, params: SamplingParams = GREEDY) -> str:
    ids = engine.tokenizer.encode(prompt)
    async with await engine.submit([(prompt, ids)], params) as deltas:
        (output,) = await deltas.outputs()
    return output.outputs[0].text


async def test_it_answers_refuses_dies_and_comes_back(
    engine: EngineClient, checkpoint: Path, text_engine: TextEngine
) -> None:
    assert engine.ready is not None
    assert engine.ready.max_model_len == 512
    prompt = "The quick brown fox"
    ids = engine.tokenizer.encode(prompt)
    text_engine.add("alone", prompt, ids, GREEDY)
    alone = []
    while text_engine.has_unfinished():
        alone += text_engine.step()
    expected = alone[-1].output.outputs[0].text  # type: ignore[union-attr]
    assert await text_of(engine, prompt) == expected

    # A stop string ends the text here and the sequence there.
    stop = expected[3:5]
    stopped = await text_of(
        engine, prompt, SamplingParams(temperature=0, max_tokens=400, stop=stop)
    )
    assert stopped == expected[: expected.index(stop)]

    # A beam search knows there where its lines end.
    search = BeamSearchParams(4, max_tokens=30, n=1, stop=stop, bad_words=["fox"], logprobs=1)
    async with await engine.submit([(prompt, ids)], search.sampling, beam=search) as deltas:
        (output,) = await deltas.outputs()
    (found,) = output.outputs
    assert found.score is not None and found.logprobs is not None
    assert found.stop_reason == stop or found.finish_reason == "length"
    assert stop not in found.text

    # All prompts of a submission or none.
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        await engine.submit([(None, ids), (None, [])], GREEDY)
    with pytest.raises(QueueFull, match="max_queued_requests 4"):
        await engine.submit([(None, ids)] * 5, GREEDY)
    with pytest.raises(ValueError, match=r"method must be one of add_request, .*, got '_end'"):
        await engine.ask("_end", None)

    # Leaving early aborts.
    async with await engine.submit([(None, ids)], ENDLESS) as deltas:
        await anext(deltas)
        assert engine.running == 1
    for _ in range(400):
        if not await engine.ask("has_unfinished"):
            break
        await asyncio.sleep(0.005)
    report = await engine.ask("cache_report")
    assert (report.pages_held, engine.running) == (0, 0)

    # It is killed while it works: running requests fail with the reason, and another engine answers
    # as before.
    process = engine._engine
    assert isinstance(process, EngineProcess)
    assert process.pid is not None
    async with await engine.submit([(None, ids)], ENDLESS) as deltas:
        await anext(deltas)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineStopped, match="died: it was killed by SIGKILL"):
            await deltas.outputs()
    assert not engine.alive
    with pytest.raises(EngineStopped, match="takes no requests now: the engine died"):
        await engine.ask("cache_report")
    for _ in range(2000):
        if engine.alive:
            break
        await asyncio.sleep(0.05)
    assert engine.restarts == 1
    assert await text_of(engine, prompt) == expected
    report = await engine.ask("cache_report")
    assert report.requests == 1


@pytest.mark.slow
async def test_an_engine_that_hangs_is_replaced(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """It is stopped as by a debugger: reports and new requests fail soon, then all it ran."""
    engine = EngineClient(partial(EngineProcess, config(checkpoint)), tokenizer, timeout=3.0)
    await engine.start()
    process: Any = engine._engine
    for _ in range(8):
        assert engine.alive
        await asyncio.sleep(engine._watchdog.interval if engine._watchdog else 0)
    async with await engine.submit([(None, [7, 8, 9])], ENDLESS) as deltas:
        await anext(deltas)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineStopped, match="hangs: it has not answered for"):
            await engine.ask("cache_report")
        assert not engine.alive
        with pytest.raises(EngineStopped, match="takes no requests now: the engine hangs"):
            await engine.ask("stats")
        os.kill(process.pid, signal.SIGCONT)
        for _ in range(400):
            if engine.alive:
                break
            await asyncio.sleep(0.05)
        assert await engine.ask("stats")
    async with await engine.submit([(None, [7, 8, 9])], ENDLESS) as deltas:
        await anext(deltas)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineStopped, match=r"died: the engine hangs: .*, so it was killed"):
            await deltas.outputs()
    for _ in range(2000):
        if engine.alive:
            break
        await asyncio.sleep(0.05)
    assert engine.restarts == 1
    assert await text_of(engine, "The quick brown fox")
    await engine.stop()


async def test_answers_overtake_outputs(
    text_engine: TextEngine,
    engine_client: Callable[[TextEngine], EngineClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reads the outputs, more than a pipe holds; questions are answered."""
    engine = engine_client(text_engine)
    await engine.start()
    go_on, advance, advanced = threading.Event(), engine._advance, 0

    def late(*args: Any) -> None:
        nonlocal advanced
        assert go_on.wait(60)
        advanced += 1
        advance(*args)

    monkeypatch.setattr(engine, "_advance", late)
    params = SamplingParams(max_tokens=400, ignore_eos=True, n=2, logprobs=20)
    many = [(None, [number, 8, 9]) for number in range(4)]
    async with await engine.submit(many, params) as deltas:
        while await engine.ask("has_unfinished"):
            await asyncio.sleep(0.01)
        report = await engine.ask("cache_report")
        assert (report.requests, advanced) == (4, 0)
        # Another request is taken, too.
        other = await engine.submit([(None, [5])], GREEDY)
        assert advanced == 0
        go_on.set()
        outputs = await deltas.outputs()
        assert [len(each.token_ids) for output in outputs for each in output.outputs] == [400] * 8
        assert len(await other.outputs()) == 1
    await engine.stop()


async def test_a_model_that_cannot_be_loaded(checkpoint: Path, tokenizer: Tokenizer) -> None:
    impossible = EngineConfig(model=str(checkpoint), max_model_len=4096)
    engine = EngineClient(partial(EngineProcess, impossible), tokenizer)
    with pytest.raises(ValueError, match="max_model_len must be at most 512"):
        await engine.start()
    await engine.stop()


def test_every_thread_that_waits_for_the_process_gets_its_end(checkpoint: Path) -> None:
    """Of several threads that wait, the system gives its exit status to one only."""
    impossible = EngineConfig(model=str(checkpoint), max_model_len=4096)
    process = EngineProcess(impossible)
    assert process.wait(0.0) is None
    with ThreadPoolExecutor(8) as threads:
        ends = set(threads.map(process.wait, [60.0] * 8))
    assert ends == {"it ended with status 0"}
    process.connection.close()


@pytest.mark.parametrize(
    "error",
    [
        LookupError("lost my keys"),
        DeviceLost("the device has failed: CUDA error: an illegal memory access"),
    ],
)
async def test_after_an_error_of_the_engine_itself_another_is_started(
    text_engine: TextEngine,
    engine_client: Callable[[TextEngine], EngineClient],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """The state of the engine cannot be trusted then: all that wait get the reason."""
    monkeypatch.setattr(lifecycle, "FIRST_PAUSE", 0.01)
    engine = engine_client(text_engine)
    await engine.start()
    step = text_engine.engine.step

    def broken() -> None:
        monkeypatch.setattr(text_engine.engine, "step", step)
        raise error

    monkeypatch.setattr(text_engine.engine, "step", broken)
    with pytest.raises(EngineStopped, match=f"engine died: .*{error.args[0]}"):
        await text_of(engine, "The key")
    for _ in range(400):
        if engine.alive:
            break
        await asyncio.sleep(0.01)
    assert engine.restarts == 1
    assert await text_of(engine, "The key")
    await engine.stop()


async def test_a_text_that_cannot_be_made_fails_alone(
    text_engine: TextEngine,
    engine_client: Callable[[TextEngine], EngineClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_client(text_engine)
    await engine.start()
    advance = engine.texts.advance

    def broken(output: StepOutput, *, patient: bool) -> object:
        if output.request_id == "request-0":
            raise LookupError("no such letter")
        return advance(output, patient=patient)

    monkeypatch.setattr(engine.texts, "advance", broken)
    bad, good = await asyncio.gather(
        text_of(engine, "The key"), text_of(engine, "The fox"), return_exceptions=True
    )
    assert "no such letter" in str(bad)
    assert isinstance(good, str)
    report = await engine.ask("cache_report")
    assert report.pages_held == 0
    await engine.stop()


async def test_what_comes_faster_than_it_is_read_is_joined(
    text_engine: TextEngine, engine_client: Callable[[TextEngine], EngineClient]
) -> None:
    engine = engine_client(text_engine)
    await engine.start()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=2, logprobs=1)
    ids = engine.tokenizer.encode("The key")
    async with await engine.submit([(None, ids)] * 2, params) as deltas:
        while await engine.ask("has_unfinished"):
            await asyncio.sleep(0.01)
        while engine.texts._running:  # the answer overtakes the outputs
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        pieces = [(place, delta) async for place, delta in deltas]
    assert len(pieces) == 4
    for place, delta in pieces:
        assert place in (0, 1)
        assert delta.completion is not None
        assert delta.text == delta.completion.text
        assert delta.new_token_ids == delta.completion.token_ids
        assert list(delta.logprobs) == delta.completion.logprobs
        assert delta.text_offsets == delta.completion.text_offsets
    await engine.stop()


class Launched:
    """An engine that says one thing when it has loaded, and ends when it is told to."""

    def __init__(self, word: object) -> None:
        self._ours, self._theirs = Pipe()
        self._answers, self._their_answers = Pipe()
        self.over = threading.Event()
        self._theirs.send([word])

    def channels(self) -> tuple[Channel, Channel]:
        return Channel(self._ours), Channel(self._answers)

    def silent(self) -> None:
        """Its connections end, and its process is there still."""
        self._theirs.close()
        self._their_answers.close()

    def wait(self, timeout: float | None = None) -> str | None:
        return "it ended" if self.over.wait(timeout) else None

    def kill(self) -> None:
        self.silent()
        self.over.set()


async def test_the_next_engine_waits_until_one_that_failed_to_load_has_ended(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its late end would be taken for that of the next one."""
    monkeypatch.setattr(lifecycle, "FIRST_PAUSE", 0.01)
    ready = Ready("", 100, 320, Recipe(True, "no vectors", "no scores"))
    first, failed, third = made = [Launched(ready), Launched(OSError("no room")), Launched(ready)]
    launched: list[Launched] = []

    def launch() -> Launched:
        launched.append(made[len(launched)])
        return launched[-1]

    engine = EngineClient(launch, tokenizer)
    await engine.start()
    first.kill()
    while len(launched) < 2:
        await asyncio.sleep(0.005)
    failed.silent()
    await asyncio.sleep(0.2)
    assert launched == [first, failed], "it still ends"
    failed.over.set()
    while not engine.alive:
        await asyncio.sleep(0.005)
    assert launched == made
    await asyncio.sleep(0.05)
    assert engine.alive and engine.restarts == 2
    third.kill()
    await engine.stop()
