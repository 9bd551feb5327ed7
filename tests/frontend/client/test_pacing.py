"""What waits for a round, when rounds are due, and that streams are the same with and without."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from coppice.frontend.api import event_stream
from coppice.frontend.client import engine as client_module
from coppice.frontend.client import lifecycle
from coppice.frontend.client.deltas import Deltas
from coppice.frontend.client.engine import EngineClient
from coppice.frontend.client.pacing import SHARE, Rounds
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.outputs import TextDelta
from coppice.frontend.text.params import for_engine
from coppice.frontend.text.streams import Texts
from coppice.runtime.process.messages import is_short, step_output, step_row
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.frontend.conftest import serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Where is the key?"}]
PROMPT = "The quick brown fox"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_round_is_put_off_by_its_cost() -> None:
    clock = Clock()
    rounds = Rounds(0.1, clock)
    assert rounds.left() is None
    assert not rounds.due
    rounds.came()
    assert rounds.due, "the first of all waits for nothing"
    rounds.begin()
    assert rounds.left() is None
    clock.now += 0.0002
    rounds.end(cost=0.0001)  # one stream
    clock.now += 0.0004
    rounds.came()
    assert not rounds.due
    assert rounds.left() == pytest.approx(0.001), "the next step may come before that"
    clock.now += 0.0007
    rounds.came()
    assert rounds.due
    assert rounds.left() == pytest.approx(0.0003)
    clock.now += 0.0004
    assert rounds.left() == 0


def test_a_round_is_put_off_for_no_longer_than_allowed() -> None:
    clock = Clock()
    rounds = Rounds(0.1, clock)
    rounds.came()
    rounds.begin()
    rounds.came()
    clock.now += 50
    assert not rounds.due, "the last one has not ended"
    left = rounds.left()
    assert left is not None
    assert left > 0
    rounds.end(cost=3.0)
    assert not rounds.due
    assert rounds.left() == pytest.approx(0.1), "what came meanwhile waits from the end on"
    clock.now += 0.1001
    assert rounds.due


@pytest.mark.parametrize("streams", [1, 10, 100, 400])
def test_rounds_take_their_share_of_a_core(streams: int) -> None:
    """In a simulation of an engine with steps of any length, at 40 us per stream and round."""
    clock, rng = Clock(), random.Random(streams)
    rounds = Rounds(0.25, clock)
    begun, spent, came, longest = clock.now, 0.0, 0.0, 0.0
    step = clock.now
    for _ in range(5000):
        left = rounds.left()
        if left is None or clock.now + left > step:
            clock.now = max(clock.now, step)
            step += rng.uniform(0.001, 0.03)
            came = came or clock.now
            rounds.came()
        else:
            clock.now += left + 1e-9
        if rounds.due:
            longest = max(longest, clock.now - came)
            came = 0.0
            rounds.begin()
            clock.now += 4e-5 * streams
            spent += 4e-5 * streams
            rounds.end(cost=4e-5 * streams)
    assert spent / (clock.now - begun) <= SHARE
    assert longest <= min(0.25, 4e-5 * streams / SHARE) + 1e-6
    if streams == 1:
        assert longest < 0.0005


def all_deltas(
    text_engine: TextEngine, params: SamplingParams, beam: BeamSearchParams | None, seed: int
) -> tuple[dict[int, list[TextDelta]], ...]:
    """For each continuation: the deltas of every step, those of random rounds, and the whole."""
    engine, tokenizer = text_engine.engine, text_engine.tokenizer
    prompt = tokenizer.encode(PROMPT)
    at_once, in_rounds, whole = (Texts(tokenizer) for _ in range(3))
    for texts in (at_once, in_rounds, whole):
        texts.add("a", PROMPT, prompt, params, in_pieces=texts is not whole)
    if beam is None:
        engine.add_request("a", prompt, for_engine(params, tokenizer))
    else:
        engine.add_beam_search("a", prompt, for_engine(beam, tokenizer))
    found: tuple[dict[int, list[TextDelta]], ...] = ({}, {}, {})
    rng = random.Random(seed)

    def add(place: int, delta: TextDelta | None) -> None:
        if delta is not None:
            found[place].setdefault(delta.index, []).append(delta)

    while engine.has_unfinished():
        for output in engine.step():
            delta, stopped = at_once.advance(output)
            add(0, delta)
            row = step_row(output)
            for place, texts, patient in ((1, in_rounds, True), (2, whole, rng.random() < 0.5)):
                if is_short(row) and texts.keep(*row[:5], patient=patient):
                    continue
                delta, again = texts.advance(step_output(row), patient=patient)
                add(place, delta)
                assert again == stopped, "a stop string that waits lets the engine go on"
            if stopped:
                engine.abort("a", output.index)
        if rng.random() < 0.15:
            for line in in_rounds.waiting:
                add(1, in_rounds.release(*line))
            assert not in_rounds.waiting
    for line in in_rounds.waiting:
        assert in_rounds.release(*line) is None, "the end takes all with it"
    return found


@pytest.mark.parametrize(
    ("params", "beam"),
    [
        (SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), None),
        (SamplingParams(temperature=1, max_tokens=90, n=3, seed=5, logprobs=2), None),
        (SamplingParams(temperature=1, max_tokens=90, n=2, seed=6, prompt_logprobs=1), None),
        (SamplingParams(temperature=1, max_tokens=90, n=2, seed=7, stop=["e", "ab"]), None),
        (SamplingParams(max_tokens=60, n=2, seed=8, stop="o", min_tokens=20, logprobs=1), None),
        (SamplingParams(max_tokens=40, n=1, best_of=3, seed=9), None),
        (None, BeamSearchParams(3, max_tokens=30, n=2, logprobs=1, best_so_far=True)),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_what_waits_is_the_same_in_the_end(
    text_engine: TextEngine,
    params: SamplingParams | None,
    beam: BeamSearchParams | None,
    seed: int,
) -> None:
    if params is None:
        assert beam is not None
        params = beam.sampling
    at_once, in_rounds, whole = all_deltas(text_engine, params, beam, seed)
    assert sum(map(len, in_rounds.values())) < sum(map(len, at_once.values()))
    for index, steps in at_once.items():
        rounds = in_rounds[index]
        for name in ("text", "new_token_ids", "logprobs", "text_offsets"):
            parts = [each for step in steps for each in getattr(step, name)]
            assert [each for step in rounds for each in getattr(step, name)] == parts, name
        assert rounds[0] == steps[0] or beam is not None, "the beginning waits for nothing"
        assert rounds[-1].completion == steps[-1].completion
        assert rounds[-1].output == steps[-1].output
    (end,) = [delta for deltas in whole.values() for delta in deltas]
    assert end.output == next(
        delta.output for deltas in at_once.values() for delta in deltas if delta.output is not None
    )


class Held(Rounds):
    """No round is due before the test sets `free`."""

    free = False

    @property
    def due(self) -> bool:
        return self.free and super().due

    def left(self) -> float | None:
        return None if super().left() is None else 0.002


class Client:
    def __init__(self, session: aiohttp.ClientSession, port: int, engine: EngineClient) -> None:
        self.session, self.port, self.engine = session, port, engine
        self.url = f"http://127.0.0.1:{port}"

    async def ok(self, path: str, body: Any) -> Any:
        async with self.session.post(self.url + path, json=BODY | body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, the last of which must be [DONE]."""
        body = BODY | body | {"stream": True}
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            *parts, done, nothing = (await response.text()).split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(part.removeprefix("data: ")) for part in parts]


Start = Callable[..., EngineClient]


@pytest.fixture
async def client(
    text_engine: TextEngine, engine_client: Start, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    """A server whose streams get their first token at once, and all others at the end."""
    monkeypatch.setattr(client_module, "Rounds", Held)
    engine = engine_client(text_engine, longest_delay=1.0)
    async with serving(engine, send_buffer=4096) as (session, port):
        client = Client(session, port, engine)
        yield client
        while client.engine.running or await client.engine.ask("has_unfinished"):
            await asyncio.sleep(0.005)
        assert (await client.engine.ask("cache_report")).pages_held == 0


COUNTED = {"include_usage": True, "continuous_usage_stats": True}


async def test_several_tokens_in_one_chunk_of_a_completion(client: Client) -> None:
    body = {"prompt": [PROMPT, "The key"], "max_tokens": 30, "logprobs": 2, "n": 2}
    whole = await client.ok(COMPLETIONS, body)
    *chunks, last = await client.events(COMPLETIONS, body | {"stream_options": COUNTED})
    assert last["usage"]["completion_tokens"] == 120
    assert chunks[0]["usage"]["completion_tokens"] == 1, "the first token leaves by itself"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 120
    for index, choice in enumerate(whole["choices"]):
        first, second = (
            chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index
        )
        assert first["text"] + second["text"] == choice["text"]
        assert (first["finish_reason"], second["finish_reason"]) == (None, "length")
        for name in ("tokens", "text_offset"):
            values = choice["logprobs"][name]
            assert first["logprobs"][name] == values[:1]
            assert second["logprobs"][name] == values[1:]
        assert len(second["logprobs"]["top_logprobs"]) == 29


async def test_several_tokens_in_one_chunk_of_a_chat(client: Client) -> None:
    body = {"messages": HELLO, "max_tokens": 30, "logprobs": True, "top_logprobs": 1}
    (whole,) = (await client.ok(CHAT, body))["choices"]
    events = await client.events(CHAT, body | {"stream_options": COUNTED})
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 30, 30, 30]
    begin, first, second, end = (event["choices"][0] for event in events[:-1])
    assert begin["delta"] == {"role": "assistant", "content": ""}
    assert first["delta"]["content"] + second["delta"]["content"] == whole["message"]["content"]
    tokens = [each["token"] for each in whole["logprobs"]["content"]]
    assert [each["token"] for each in first["logprobs"]["content"]] == tokens[:1]
    assert [each["token"] for each in second["logprobs"]["content"]] == tokens[1:]
    assert (end["delta"], end["finish_reason"]) == ({}, "length")


async def test_a_round_sends_what_waited(client: Client) -> None:
    """The first token comes while rounds are held; what waited comes with a round."""
    body = BODY | {"prompt": PROMPT, "max_tokens": 400, "stream": True}
    url = client.url + COMPLETIONS
    whole = (await client.ok(COMPLETIONS, body | {"stream": False}))["choices"][0]["text"]
    engine: Any = client.engine._engine
    step, pause = engine._engine.step, [0.01]

    def stepping() -> Any:
        time.sleep(pause[0])
        return step()

    engine._engine.step = stepping
    responses = [await client.session.post(url, json=body) for _ in range(3)]
    pieces = [[await response.content.readany()] for response in responses]
    assert [piece[0].count(b"data: ") for piece in pieces] == [1, 1, 1]
    Held.free = True
    try:
        for piece, response in zip(pieces, responses, strict=True):
            piece.append(await response.content.readany())
        pause[0] = 0.0
        for piece, response in zip(pieces, responses, strict=True):
            piece.append(await response.read())
    finally:
        Held.free = False
    for piece in pieces:
        events = b"".join(piece).decode().split("\n\n")[:-2]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == whole
        assert len(choices) > 3
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)


async def test_streams_that_ended_are_gone(client: Client) -> None:
    """No circle keeps them until a garbage collection, while thousands of others come."""
    gc.collect()
    gc.disable()
    try:
        await client.events(COMPLETIONS, {"prompt": [PROMPT, "The key"], "max_tokens": 9})
        await client.events(CHAT, {"messages": HELLO, "max_tokens": 9})
        await client.ok(CHAT, {"messages": HELLO, "max_tokens": 9})
        kinds = (event_stream.EventStream, Deltas)
        left = [each for each in gc.get_objects() if type(each) in kinds]
    finally:
        gc.enable()
    assert not left


async def test_what_waits_when_the_engine_dies_is_sent(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "FIRST_PAUSE", 0.01)
    body = {"prompt": PROMPT, "max_tokens": 400}
    text = (await client.ok(COMPLETIONS, body))["choices"][0]["text"]
    engine: Any = client.engine._engine
    step, left = engine._engine.step, [9]

    def breaking() -> Any:
        left[0] -= 1
        if not left[0]:
            engine._engine.step = step
            raise LookupError("lost my keys")
        return step()

    engine._engine.step = breaking
    *chunks, error = await client.events(COMPLETIONS, body)
    sent = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    # What came within the first pause may have left with the first token.
    assert len(chunks) in (1, 2)
    assert text.startswith(sent)
    assert len(sent) > 1
    assert "lost my keys" in error["error"]["message"]
    while not client.engine.alive:
        await asyncio.sleep(0.01)


async def test_a_reader_that_stops_at_the_end(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unread end is more than the system buffers, so the stream is given up."""
    monkeypatch.setattr(event_stream, "STALLED_SECONDS", 0.2)
    gone: list[str] = []
    run = event_stream.EventStream.run

    async def watched(self: event_stream.EventStream, deadline: float | None) -> Any:
        try:
            return await run(self, deadline)
        except ConnectionError as error:
            gone.append(str(error))
            raise

    monkeypatch.setattr(event_stream.EventStream, "run", watched)
    many = {"prompt": PROMPT, "n": 4, "max_tokens": 480, "logprobs": 5, "stream": True}
    body = json.dumps(BODY | many).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stuck.connect(("127.0.0.1", client.port))
        stuck.sendall(head.encode() + body)
        stuck.setblocking(False)
        read = b""
        while read.count(b'"text"') < 1:
            read += await loop.sock_recv(stuck, 4096)
        while not gone:
            await asyncio.sleep(0.01)
    assert gone == ["the client has read nothing for 0.2 s"]
    assert client.engine.running == 0
