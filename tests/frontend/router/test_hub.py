"""Replicas behind a hub: routing, reports of all, and replicas that come, drain and die."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.errors import EngineStopped, RequestFailed
from coppice.frontend.router import flights, members
from coppice.frontend.router.client import ReplicasClient
from coppice.frontend.router.gather import PIN_SECONDS
from coppice.frontend.router.hub import Hub
from coppice.frontend.text.engine import TextEngine
from coppice.runtime.process.sockets import connect
from coppice.runtime.report.snapshot import CacheReport, EngineStats
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.request import QueueFull, Unfinished
from coppice.runtime.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
TEXTS = [f"{word} is the key of the house, and the mat lies at the door." * 3 for word in "abcd"]


async def text_of(
    client: EngineClient, prompt: str, params: SamplingParams = GREEDY, **more: Any
) -> str:
    ids = client.tokenizer.encode(prompt)
    async with await client.submit([(prompt, ids)], params, **more) as deltas:
        (output,) = await deltas.outputs()
    return output.outputs[0].text


@pytest.fixture
async def alone(engine_client: Any, text_engine: TextEngine) -> AsyncIterator[EngineClient]:
    """One engine, to compare with."""
    client = engine_client(text_engine)
    await client.start()
    yield client
    await client.stop()


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_texts_equal_those_of_one_engine(cluster: Any, alone: EngineClient) -> None:
    client, replicas = await cluster(2)
    found = await asyncio.gather(*(text_of(client, text) for text in TEXTS * 2))
    assert found == [await text_of(alone, text) for text in TEXTS] * 2
    several = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    ids = client.tokenizer.encode(TEXTS[0])
    async with await client.submit([(None, ids)], several) as deltas:
        (output,) = await deltas.outputs()
    assert len(output.outputs) == 3
    beams = BeamSearchParams(beam_width=3, max_tokens=5)
    async with await client.submit([(None, ids)], beams.sampling, beam=beams) as deltas:
        (output,) = await deltas.outputs()
    assert len(output.outputs) >= 1
    await until(lambda: not client.hub._flights)
    assert sum(each.engine.counters.requests for each in replicas) == 10
    for each in replicas:
        assert each.engine.counters.requests > 0, "both got some"
        each.engine.check()


async def test_a_prefix_goes_where_it_is_and_the_report_is_of_all(cluster: Any) -> None:
    client, replicas = await cluster(2)
    for _ in range(4):
        for text in TEXTS[:2]:
            await text_of(client, text)
    stats: EngineStats = await client.ask("stats")
    assert stats.requests == 8
    assert stats.hit_tokens > 0.6 * stats.prompt_tokens
    report: CacheReport = await client.ask("cache_report", tree=True)
    assert [each.name for each in report.replicas] == ["r0", "r1"]
    for name in ("requests", "prompt_tokens", "hit_tokens", "generated_tokens"):
        parts = [getattr(each, name) for each in report.replicas]
        assert getattr(report, name) == sum(parts)
    assert report.pages_total == sum(each.engine.num_pages for each in replicas)
    counts = report.accounts.overall.since_start
    assert sum(counts.causes.values()) == counts.computed_tokens
    assert counts.prompt_tokens == report.prompt_tokens


async def test_what_another_replica_holds_is_a_cause_of_its_own(cluster: Any) -> None:
    client, replicas = await cluster(2)
    await text_of(client, TEXTS[0])
    await asyncio.sleep(0.1)  # until the router has been told
    (first,) = [n for n, each in enumerate(replicas) if each.engine.counters.requests]
    replicas[first].slow = 0.2
    slow = asyncio.create_task(text_of(client, TEXTS[0] + TEXTS[1] * 3))
    client.hub.router.measured(first, 1.0)  # a token a second: nobody would wait for that
    client.hub.router.measured(1 - first, 10_000.0)
    await asyncio.sleep(0.05)
    await text_of(client, TEXTS[0])
    replicas[first].slow = 0.0
    await slow
    report: CacheReport = await client.ask("cache_report")
    counts = report.accounts.overall.since_start
    assert counts.other_replica == report.replicas[1 - first].other_replica > 0
    assert sum(counts.causes.values()) == counts.computed_tokens


async def test_a_dead_replica_loses_nothing_that_was_not_shown(
    cluster: Any, alone: EngineClient
) -> None:
    client, replicas = await cluster(2)
    for each in replicas:
        each.slow = 0.02
    whole = [
        asyncio.create_task(text_of(client, text, LONG, in_pieces=False)) for text in TEXTS * 3
    ]
    streams = [asyncio.create_task(text_of(client, text, LONG)) for text in TEXTS[:2]]
    await until(lambda: all(each.engine.counters.requests for each in replicas))
    await asyncio.sleep(0.3)
    replicas[0].end()
    replicas[1].slow = 0.0
    found = await asyncio.gather(*whole)
    assert found == [await text_of(alone, text, LONG) for text in TEXTS] * 3
    ended = await asyncio.gather(*streams, return_exceptions=True)
    for stream, text in zip(ended, TEXTS, strict=False):
        if isinstance(stream, EngineStopped):
            assert "replica r0 ended" in str(stream)
        else:
            assert stream == await text_of(alone, text, LONG)
    assert client.hub.names == ["r1"]
    assert client.alive
    stats: EngineStats = await client.ask("stats")
    assert [each.name for each in stats.replicas] == ["r1"]
    replicas[1].engine.check()


async def test_a_request_is_sent_to_another_replica_once(cluster: Any) -> None:
    client, replicas = await cluster(3)
    for each in replicas:
        each.slow = 0.5
    waits = asyncio.create_task(text_of(client, TEXTS[0], LONG, in_pieces=False))
    ended = []
    for _ in range(2):
        await until(lambda: any(each.engine.num_unfinished for each in replicas))
        ended.append(next(each for each in replicas if each.engine.num_unfinished))
        replicas.remove(ended[-1])
        await asyncio.to_thread(ended[-1].end)
    with pytest.raises(EngineStopped, match=r"replica r[0-2] ended"):
        await waits
    assert not client.hub._flights
    (left,) = replicas
    assert not left.engine.counters.requests, "nobody sends it a third time"
    left.slow = 0.0
    assert await text_of(client, TEXTS[0]), "what could kill two may kill all; others are served"


async def test_without_replicas_requests_wait_and_new_ones_are_refused(
    cluster: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "GRACE", 0.5)
    client, (only,) = await cluster(1)
    only.slow = 0.5
    waits = asyncio.create_task(text_of(client, TEXTS[0]))
    await until(lambda: only.engine.num_unfinished == 1)
    only.end()
    await until(lambda: not client.alive)
    assert "no replica takes requests" in str(client.trouble)
    with pytest.raises(EngineStopped, match="no replica takes requests"):
        await text_of(client, TEXTS[1])
    another = replica()
    await asyncio.to_thread(client.hub.join, "new", "127.0.0.1", another.door)
    assert len(await waits) > 0
    assert client.alive
    monkeypatch.setattr(flights, "PATIENCE", 0.2)
    another.slow = 0.5
    waits = asyncio.create_task(text_of(client, TEXTS[2]))
    await until(lambda: another.engine.num_unfinished == 1)
    another.end()
    with pytest.raises(EngineStopped, match="no replica took requests for 0 s"):
        await waits


async def test_a_replica_drains(cluster: Any) -> None:
    client, replicas = await cluster(2)
    for each in replicas:
        each.slow = 0.02
    running = [asyncio.create_task(text_of(client, text, LONG)) for text in TEXTS]
    await until(lambda: all(each.engine.num_unfinished for each in replicas))
    emptied: list[str] = []
    client.hub.drain("r0", lambda: emptied.append("r0"))
    await text_of(client, TEXTS[0])
    before = replicas[0].engine.counters.requests
    assert not emptied
    for each in replicas:
        each.slow = 0.0
    await asyncio.gather(*running)
    await until(lambda: emptied == ["r0"])
    for text in TEXTS:
        await text_of(client, text)
    assert replicas[0].engine.counters.requests == before, "it gets no new ones"


async def test_pins_adapters_and_sleep_reach_those_that_join_later(
    cluster: Any, replica: Any
) -> None:
    client, _ = await cluster(1)
    ids = client.tokenizer.encode(TEXTS[0])
    await client.ask("put_pin", "handbook", ids)
    await client.ask("put_pin", "other", ids[:10])
    assert await client.ask("unpin", "other")
    assert not await client.ask("unpin", "other")
    later = replica()
    await asyncio.to_thread(client.hub.join, "later", "127.0.0.1", later.door)
    pins = await client.ask("list_pins")
    assert [(pin.name, pin.num_tokens) for pin in pins] == [("handbook", len(ids))]
    assert [pin.name for pin in later.engine.pins] == ["handbook"]
    await client.ask("sleep", 1)
    assert await client.ask("is_sleeping")
    with pytest.raises(ValueError, match="sleeps"):
        await text_of(client, TEXTS[0])
    await client.ask("wake_up")
    await client.ask("reset_cache")
    assert not len(later.engine.pins)
    with pytest.raises(ValueError, match=r"method must be one of add_.*, check, got 'step'"):
        await client.ask("step")
    peek = await client.ask("peek", ids)
    assert peek.cached_tokens == 0


async def test_a_pin_that_has_ended_does_not_come_back(cluster: Any, replica: Any) -> None:
    client, _ = await cluster(1)
    await client.ask("put_pin", "p", client.tokenizer.encode(TEXTS[0]), ttl=0.3)
    await asyncio.sleep(0.4)
    later = replica()
    await asyncio.to_thread(client.hub.join, "later", "127.0.0.1", later.door)
    assert await client.ask("list_pins") == ()


async def test_a_reset_while_a_request_runs_changes_nothing(cluster: Any) -> None:
    client, replicas = await cluster(2)
    await client.ask("put_pin", "p", client.tokenizer.encode(TEXTS[0]))
    await text_of(client, TEXTS[0])
    for each in replicas:
        each.slow = 0.02
    running = asyncio.create_task(text_of(client, TEXTS[1], LONG))
    await until(lambda: any(each.engine.num_unfinished for each in replicas))
    cached = [each.engine.tree.cached_tokens for each in replicas]
    with pytest.raises(Unfinished, match="reset_cache: refused while 1 requests are unfinished"):
        await client.ask("reset_cache")
    await client.ask("list_pins")
    for each, before in zip(replicas, cached, strict=True):
        each.slow = 0.0
        assert each.engine.tree.cached_tokens >= before
        assert [pin.name for pin in each.engine.pins] == ["p"]
    await running
    await client.ask("reset_cache")
    assert not any(each.engine.tree.cached_tokens for each in replicas)


async def test_what_one_replica_refuses_no_other_does(cluster: Any) -> None:
    client, replicas = await cluster(2)
    ids = client.tokenizer.encode(TEXTS[0])
    await client.ask("put_pin", "kept", ids)
    other = ReplicasClient(Hub(), client.tokenizer)  # as the next ingress, while an update runs
    await asyncio.to_thread(other.hub.join, "r0", "127.0.0.1", replicas[0].door)
    await other.start()
    replicas[0].slow = 0.02
    running = asyncio.create_task(text_of(other, TEXTS[0], LONG))
    await until(lambda: replicas[0].engine.num_unfinished == 1)
    with pytest.raises(Unfinished, match="sleep: refused while 1 requests are unfinished"):
        await client.ask("sleep", 1)
    await until(lambda: not any(each.engine.asleep for each in replicas))
    with pytest.raises(Unfinished, match="reset_cache: refused"):
        await client.ask("reset_cache")
    await client.ask("list_pins")  # answered after what undoes it
    assert [[pin.name for pin in each.engine.pins] for each in replicas] == [["kept"]] * 2
    replicas[0].slow = 0.0
    await running
    await other.stop()
    replicas[0].engine.pin("handbook", ids[:5])
    with pytest.raises(ValueError, match="there is a pin named 'handbook' already"):
        await client.ask("put_pin", "handbook", ids)
    await until(lambda: [pin.name for pin in replicas[1].engine.pins] == ["kept"])


async def test_refusals_and_aborts(cluster: Any) -> None:
    client, replicas = await cluster(2, max_queued_requests=1, max_num_seqs=1)
    for each in replicas:
        each.slow = 0.05
    with pytest.raises(ValueError, match="token ids must be"):
        async with await client.submit([(None, [10**6])], GREEDY):
            pass
    ids = client.tokenizer.encode(TEXTS[0])
    taken = []
    with pytest.raises(QueueFull):  # noqa: PT012
        for _ in range(9):
            taken.append(await client.submit([(None, ids)], LONG))
    assert len(taken) >= 4, "both queues are used before a request is refused"
    for deltas in taken:
        deltas.close()
    for each in replicas:
        each.slow = 0.0
    await until(lambda: not any(each.engine.num_unfinished for each in replicas))
    assert not client.hub._flights
    assert client.running == 0


async def test_pins_do_not_wait_for_a_replica_that_hangs(cluster: Any) -> None:
    client, replicas = await cluster(2)
    for each in replicas:
        each.slow = 8.0
    running = asyncio.create_task(text_of(client, TEXTS[0], SamplingParams(max_tokens=1)))
    await until(lambda: any(each.engine.num_unfinished for each in replicas))
    (busy,) = (each for each in replicas if each.engine.num_unfinished)
    ids = client.tokenizer.encode(TEXTS[0])
    begun = time.monotonic()
    await client.ask("put_pin", "p", ids)
    assert time.monotonic() - begun >= PIN_SECONDS
    assert not running.done()
    begun = time.monotonic()
    await client.ask("put_pin", "q", ids[:5])
    assert await client.ask("unpin", "q")
    assert time.monotonic() - begun < PIN_SECONDS
    await running
    assert [pin.name for pin in await client.ask("list_pins")] == ["p"]
    assert [pin.name for pin in busy.engine.pins] == ["p"], "it has done what it was asked"


async def test_a_search_whose_step_fails_ends(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (only,) = await cluster(1)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    ids, search = client.tokenizer.encode(TEXTS[0]), BeamSearchParams(3, max_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(only.engine.runner, "run", broken)
        async with (
            asyncio.timeout(20),
            await client.submit([(None, ids)], search.sampling, beam=search) as deltas,
        ):
            with pytest.raises(RequestFailed, match="the step failed: RuntimeError: broken"):
                await deltas.outputs()
    assert not client.hub._flights


async def test_replicas_with_other_pages_are_reported_and_end(cluster: Any, replica: Any) -> None:
    """As in an update that changes the size of pages and the eviction policy."""
    client, (old,) = await cluster(1, page_size=16)
    new = replica(page_size=32, eviction_policy="lfu")
    await asyncio.to_thread(client.hub.join, "new", "127.0.0.1", new.door)
    await asyncio.gather(*(text_of(client, text) for text in TEXTS))
    report: CacheReport = await client.ask("cache_report")
    pages = old.engine.num_pages + 2 * new.engine.num_pages
    assert (report.page_size, report.pages_total) == (16, pages)
    assert report.eviction_policy == "lfu and lru"
    before: EngineStats = await client.ask("stats")
    await asyncio.to_thread(old.end)
    await until(lambda: client.hub.names == ["new"])
    after: EngineStats = await client.ask("stats")
    assert (after.page_size, after.pages_total) == (32, new.engine.num_pages)
    assert after.counts == before.counts
    assert (await client.ask("cache_report")).requests == len(TEXTS)
    third = replica()
    await asyncio.to_thread(client.hub.join, "third", "127.0.0.1", third.door)
    await asyncio.to_thread(new.end)
    await until(lambda: client.hub.names == ["third"])
    assert (await client.ask("stats")).counts == before.counts
    assert await text_of(client, TEXTS[0])


async def test_those_that_took_the_place_of_a_dead_one_are_counted(
    cluster: Any, replica: Any
) -> None:
    client, (first,) = await cluster(1)
    assert client.restarts == 0
    await asyncio.to_thread(first.end)
    await until(lambda: client.hub.names == [])
    for name in ("second", "third"):
        await asyncio.to_thread(client.hub.join, name, "127.0.0.1", replica().door)
        assert client.restarts == 1, "a further one replaces none"
    client.hub.drain("second")
    client.hub.leave("second", "it was drained")
    await asyncio.to_thread(client.hub.join, "fourth", "127.0.0.1", replica().door)
    assert client.restarts == 1


def test_a_request_without_a_replica_waits_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else wakes the thread of the hub."""
    monkeypatch.setattr(flights, "PATIENCE", 0.1)
    hub = Hub()
    _, answers = hub.channels()
    time.sleep(0.2)  # until its thread waits
    hub.take((1, "add_request", ("r", array("i", [1, 2]), GREEDY), {}))
    deadline = time.monotonic() + 5
    while not answers.wait(0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ((number, failed, error),) = answers.receive()
    assert (number, failed, type(error)) == (1, True, EngineStopped)
    hub.kill()


async def test_answers_overtake_outputs(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the outputs; questions are answered, and requests are taken."""
    client, _ = await cluster(2)
    go_on, advance = threading.Event(), client._advance

    def late(*args: Any) -> None:
        assert go_on.wait(60)
        advance(*args)

    monkeypatch.setattr(client, "_advance", late)
    tasks = [asyncio.create_task(text_of(client, text, LONG)) for text in TEXTS]
    await asyncio.sleep(0.05)
    while await client.ask("has_unfinished"):
        await asyncio.sleep(0.01)
    assert (await client.ask("stats")).requests == 4
    go_on.set()
    assert all(await asyncio.gather(*tasks))


async def test_an_ingress_that_is_gone_leaves_nothing_running(cluster: Any) -> None:
    client, replicas = await cluster(2)
    for each in replicas:
        each.slow = 0.05
    tasks = [asyncio.create_task(text_of(client, text, LONG)) for text in TEXTS]
    await until(lambda: sum(each.engine.num_unfinished for each in replicas) == 4)
    await client.stop()
    for task in tasks:
        with pytest.raises(EngineStopped):
            await task
    await until(lambda: not any(each.engine.num_unfinished for each in replicas))


def fine_tuned(checkpoint: Path, folder: Path) -> Path:
    """Another model of the same config, tokenizer and names and shapes of weights."""
    shutil.copytree(checkpoint, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 0.01}, file, {"format": "pt"})
    return folder


async def test_who_may_join(cluster: Any, replica: Any, checkpoint: Path, tmp_path: Path) -> None:
    client, (first,) = await cluster(1)
    with pytest.raises(ValueError, match="name must be new, got 'r0'"):
        client.hub.join("r0", "127.0.0.1", first.door)
    other = replica(max_model_len=100)
    with pytest.raises(ValueError, match="max_model_len is 100, theirs is 512"):
        client.hub.join("other", "127.0.0.1", other.door)
    tuned = replica(fine_tuned(checkpoint, tmp_path / "tuned"))
    with pytest.raises(ValueError, match="same model as the others: its weights_digest is "):
        client.hub.join("tuned", "127.0.0.1", tuned.door)
    moved = replica(Path(shutil.copytree(checkpoint, tmp_path / "elsewhere")))
    client.hub.join("moved", "127.0.0.1", moved.door)  # the same model, at another place
    client.hub.drain("moved")
    with pytest.raises(OSError, match="refuses the key"):
        connect(("127.0.0.1", first.door.port), b"wrong")
    with pytest.raises(ConnectionRefusedError):
        connect(("127.0.0.1", 1), b"wrong", 1.0)
    assert client.hub.names == ["r0"]
    assert len(await text_of(client, TEXTS[0])) > 0
