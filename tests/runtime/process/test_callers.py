"""Messages over TCP, and an engine that several processes call."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.process import callers
from coppice.runtime.process.channel import Channel
from coppice.runtime.process.loop import EngineLoop
from coppice.runtime.process.messages import PING, End, Pulse, Ready, Told
from coppice.runtime.process.service import EngineService
from coppice.runtime.process.sockets import Listener, MessageSocket, connect
from coppice.runtime.requests.sampling_params import SamplingParams

PROMPT = list(range(40, 77))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# Drafts of what is drawn so freely are not accepted: each token takes a step.
ENDLESS = SamplingParams(temperature=2, max_tokens=400, ignore_eos=True)


@pytest.fixture
def ends() -> Iterator[tuple[MessageSocket, MessageSocket, Listener]]:
    """Both ends of a connection, and what listens."""
    accepted: list[MessageSocket] = []
    come = threading.Event()

    def accept(connection: MessageSocket) -> None:
        accepted.append(connection)
        come.set()

    listener = Listener("127.0.0.1", accept)
    ours = connect(("127.0.0.1", listener.port), listener.key)
    assert come.wait(10)
    yield ours, accepted[0], listener
    for each in (ours, *accepted):
        each.close()
    listener.close()


def test_messages_of_any_size_come_whole_and_in_order(ends: Any) -> None:
    ours, theirs, _ = ends
    sizes = [0, 1, 100, 1 << 20, (1 << 20) - 1, 5 << 20, 7]
    messages = [os.urandom(size) for size in sizes]
    sender = threading.Thread(target=lambda: [ours.send_bytes(each) for each in messages])
    sender.start()
    found = [theirs.recv_bytes() for _ in range(3)]
    while len(found) < len(messages):
        assert theirs.poll(10)
        found += theirs.come()
    sender.join()
    assert found == messages
    assert theirs.come() == [], "without waiting"
    assert not theirs.poll(0.01)
    ours.close()
    with pytest.raises(EOFError):
        theirs.recv_bytes()


def test_who_does_not_know_the_key_is_refused(ends: Any) -> None:
    _, _, listener = ends
    with pytest.raises(ConnectionRefusedError, match=r"127.0.0.1:\d+ refuses the key"):
        connect(("127.0.0.1", listener.port), b"another key")
    with socket.create_connection(("127.0.0.1", listener.port)) as silent:
        silent.settimeout(5)
        assert len(silent.recv(100)) == 32, "a challenge, each time another one"
        # Whoever says nothing does not keep others waiting.
        connect(("127.0.0.1", listener.port), listener.key).close()
    listener.close()
    with pytest.raises(OSError, match=r"refused|reset"):
        connect(("127.0.0.1", listener.port), listener.key)


class Calls:
    """A caller: sends calls, and sorts what comes back."""

    def __init__(self, channel: Channel, answers: Channel | None = None) -> None:
        self.channel = channel
        self.rows: dict[str, list[int]] = {}
        self.answers: dict[int, tuple[bool, Any]] = {}
        self.other: list[Any] = []
        for each in filter(None, (channel, answers)):
            threading.Thread(target=self._read, args=(each,), daemon=True).start()

    def _read(self, channel: Channel) -> None:
        try:
            while True:
                for item in channel.receive():
                    if isinstance(item, list):
                        for row in item:
                            self.rows.setdefault(row[0], []).extend(row[2])
                    elif isinstance(item, tuple):
                        self.answers[item[0]] = item[1:]
                    else:
                        self.other.append(item)
        except EOFError:
            self.other.append("end")

    def call(self, number: int, method: str, *args: Any) -> Any:
        self.channel.send((number, method, args, {}))
        until(lambda: number in self.answers)
        return self.answers[number]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def called(
    tiny_checkpoint: Callable[..., Path],
) -> Iterator[tuple[Engine, Calls, Callable[[], Calls]]]:
    """An engine in its loop, the caller that has started it, and a maker of further ones."""
    engine = Engine(EngineConfig(str(tiny_checkpoint("llama")), kv_cache_tokens=1024))
    (ours, theirs), (answers, their_answers) = Pipe(), Pipe()
    loop = EngineLoop(EngineService(engine), Channel(theirs), Channel(their_answers), "127.0.0.1")
    thread = threading.Thread(target=loop.run)
    thread.start()
    parent = Calls(Channel(ours), Channel(answers))
    until(lambda: bool(parent.other))
    (ready,) = parent.other
    assert isinstance(ready, Ready)
    assert ready.door is not None
    assert str(ready.door.key) not in repr(ready), "the key is in no log"
    door = ready.door

    def another() -> Calls:
        made = Calls(Channel(connect(("127.0.0.1", door.port), door.key)))
        until(lambda: bool(made.other))
        assert isinstance(made.other[0], Ready)
        assert made.other[0].door is None
        return made

    yield engine, parent, another
    parent.channel.send(End())
    thread.join(20)
    assert not thread.is_alive()


def test_each_caller_gets_what_is_its(called: Any) -> None:
    _engine, parent, another = called
    one, two = another(), another()
    for caller in (parent, one, two):  # the same name in all
        assert caller.call(1, "add_request", "request", PROMPT, GREEDY) == (False, None)
    until(lambda: all(len(each.rows.get("request", ())) == 6 for each in (parent, one, two)))
    assert parent.rows == one.rows == two.rows
    failed, error = one.call(2, "add_request", "bad", [10**6], GREEDY)
    assert failed
    assert "token ids" in str(error)
    one.channel.send(PING)
    until(lambda: any(isinstance(each, Pulse) for each in one.other))
    one.call(3, "introduce", "an ingress")
    assert parent.call(4, "callers") == (False, ["an ingress"])
    failed, error = one.call(5, "no_such_call")
    assert failed
    assert "method must be one of" in str(error)


def test_who_is_gone_leaves_nothing_running(called: Any) -> None:
    engine, parent, another = called
    one = another()
    parent.call(1, "add_request", "kept", PROMPT, ENDLESS)
    for number in range(5):
        one.call(number, "add_request", f"{number}", PROMPT, ENDLESS)
    one.channel.close()
    until(lambda: engine.unfinished in (["kept"], []))
    until(lambda: len(parent.rows["kept"]) == 400)
    parent.call(2, "check")


def test_who_subscribes_is_told(called: Any) -> None:
    _engine, parent, another = called
    parent.call(1, "add_request", "a", PROMPT, GREEDY)
    until(lambda: len(parent.rows.get("a", ())) == 6)
    one = another()
    one.call(1, "subscribe")
    until(lambda: any(isinstance(each, Told) and each.changes for each in one.other))
    told = next(each for each in one.other if isinstance(each, Told) and each.changes)
    assert pickle.loads(pickle.dumps(told)) == told
    stored = b"".join(getattr(each, "tokens", b"") for each in told.changes)
    assert len(stored) == 4 * (len(PROMPT) + 5)


def test_calls_of_who_is_gone_leave_nothing(called: Any) -> None:
    """They may be taken in the same turn in which the engine learns that it has gone."""
    engine, parent, another = called
    parent.call(1, "add_request", "kept", PROMPT, ENDLESS)
    for _ in range(10):
        one = another()
        one.channel.send((1, "add_request", ("a", PROMPT, ENDLESS), {}))
        one.channel.send((2, "subscribe", (), {}))
        one.channel.close()
    until(lambda: engine.unfinished in (["kept"], []))
    tellers = [stream.sink for stream in engine.events._streams]
    until(lambda: not any(each._queue or each._new or each._listeners for each in tellers))
    parent.call(2, "check")


def test_who_subscribes_and_does_not_read_is_cut_off(
    called: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, parent, another = called
    one = another()
    one.call(1, "subscribe")
    monkeypatch.setattr(callers, "_MOST_WAITING", -1)  # as if much waited already
    with caplog.at_level(logging.ERROR):
        engine.events._streams[-1].sink._queue.append(((b"", [], []), Load(1, 2, 3, 4, 5.0, 6.0)))
        until(lambda: "end" in one.other)
    assert caplog.text.count("does not read what the engine sends it") == 1
    monkeypatch.undo()
    assert parent.call(1, "callers") == (False, [])


def test_who_does_not_read_is_cut_off(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _parent, another = called
    monkeypatch.setattr(callers, "_MOST_WAITING", -1)  # as if much waited already
    one = another()
    # It may be cut off before the answer: nobody waits for one.
    one.channel.send((1, "add_request", ("a", PROMPT, ENDLESS), {}))
    until(lambda: "end" in one.other)
    until(lambda: not engine.unfinished)
