"""The process that publishes events: it ends with its engine, and another follows if it dies."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from coppice.radix.mirror.copy import TreeCopy
from coppice.radix.mirror.records import EMPTY_TREE, KIND_BITS, STORED_BELOW_ROOT, Records
from coppice.runtime.metrics.events.broadcast import SNAPSHOT
from coppice.runtime.metrics.events.options import Published
from coppice.runtime.metrics.events.publisher import Publisher
from coppice.runtime.metrics.events.stream import KvEvents
from coppice.runtime.metrics.events.wire import read_changes
from coppice.runtime.process.channel import Channel
from coppice.runtime.process.loop import EngineLoop
from coppice.runtime.process.messages import End
from coppice.runtime.process.service import EngineService
from tests.radix.test_fuzz import Fuzz
from tests.runtime.metrics.events.conftest import Listener, ask
from tests.runtime.metrics.events.test_events import held, in_tree, run, sender_of, start

Address = Callable[[], str]

# An engine's process: publishes a little, says whose process that does, and waits.
_ENGINE = """
import struct, sys, time
from coppice.runtime.metrics.events.options import Published
from coppice.runtime.metrics.events.publisher import Publisher
publisher = Publisher(Published(sys.argv[1]))
publisher.put((struct.pack("2q", 1 << 3 | 2, 2), [b"abcd"], [None]), None)
print(publisher.process_id, flush=True)
time.sleep(600)
"""


# Records: none, and a node of a million tokens below a root.
NOTHING: Records = b"", [], []
LARGE: Records = (
    struct.pack("2q", 1 << KIND_BITS | STORED_BELOW_ROOT, 2), [bytes(4 << 20)], [None]
)  # fmt: skip


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        # A process that nobody has waited for is there, but does nothing any more.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def snapshot(context: Any, replay: str) -> tuple[str, TreeCopy]:
    """The instance that answers, and a copy of the tree."""
    ((_, payload),) = ask(context, replay, b"exact", SNAPSHOT)
    _, instance, changes = read_changes(payload)
    copy = TreeCopy()
    for change in changes:
        copy.apply(change)
    return instance, copy


@pytest.mark.slow
def test_another_process_follows_one_that_was_killed(address: Address, context: Any) -> None:
    endpoint, replay = address(), address()
    heard: list[bool] = []
    sender = Publisher(
        Published(endpoint, replay, "kv", "exact", 5), when_broken=lambda: heard.append(True)
    )
    listener = Listener(context, endpoint, b"exact")
    fuzz = Fuzz("lru", 4, seed=3)
    stream = KvEvents(sender, fuzz.tree, None)
    before = None
    for turn in range(3):
        for _ in range(60):
            fuzz.step()
            stream.flush(idle=True)
        until(lambda: not (sender.waiting or sender.behind or sender.broken))
        instance, copy = snapshot(context, replay)
        assert held(copy) == in_tree(fuzz.tree) and instance != before
        before, killed = instance, sender.process_id
        os.kill(killed, signal.SIGKILL)
        for _ in range(20):  # the tree changes meanwhile
            fuzz.step()
            stream.flush(idle=True)
        until(lambda turn=turn: len(heard) > turn)  # type: ignore[misc]
        assert sender.process_id != killed
        stream.flush(idle=True)
        until(lambda: not (sender.waiting or sender.behind or sender.broken))
        assert held(snapshot(context, replay)[1]) == in_tree(fuzz.tree)
    # Whoever listens connects again by itself, and hears of the new instance.
    instance, instances = snapshot(context, replay)[0], set[str]()

    def heard_of() -> bool:
        fuzz.step()
        stream.flush(idle=True)
        instances.update(read_changes(each)[1] for _, each in listener.until_quiet(0.05))
        return instance in instances

    until(heard_of)
    stream.close()


def test_an_idle_engine_publishes_all_again(
    tiny_checkpoint: Callable[..., Path], address: Address, context: Any
) -> None:
    replay = address()
    engine = start(tiny_checkpoint("llama"), address(), replay)
    run(engine, [list(range(3, 33))])
    (ours, theirs), (_answers, their_answers) = Pipe(), Pipe()
    loop = EngineLoop(EngineService(engine), Channel(theirs), Channel(their_answers))
    thread = threading.Thread(target=loop.run)
    thread.start()
    channel = Channel(ours)
    channel.receive()  # it is ready
    sender = sender_of(engine)
    killed = sender.process_id
    os.kill(killed, signal.SIGKILL)
    until(lambda: sender.process_id != killed)
    until(lambda: not (sender.waiting or sender.behind or sender.broken))
    assert held(snapshot(context, replay)[1]) == in_tree(engine.tree) != set()
    channel.send(End())
    thread.join(60)
    assert not thread.is_alive()
    engine.close()


@pytest.mark.slow
def test_a_process_that_takes_nothing_delays_nobody(address: Address, context: Any) -> None:
    endpoint, replay = address(), address()
    sender = Publisher(Published(endpoint, replay, "kv", "exact", 5))
    fuzz = Fuzz("lru", 4, seed=8)
    stream = KvEvents(sender, fuzz.tree, None)
    os.kill(sender.process_id, signal.SIGSTOP)
    sender.put(LARGE, None)  # fills the pipe
    sender.put(EMPTY_TREE, None)
    for _ in range(12_000):
        stream.flush(idle=True)
        sender.put(NOTHING, None)
    assert sender.behind
    for _ in range(100):
        fuzz.step()
        stream.flush(idle=True)
    os.kill(sender.process_id, signal.SIGCONT)
    until(lambda: not sender.behind)
    stream.flush(idle=True)
    until(lambda: not sender.waiting)
    assert held(snapshot(context, replay)[1]) == in_tree(fuzz.tree)
    os.kill(sender.process_id, signal.SIGSTOP)
    stopped = sender.process_id
    sender.put(LARGE, None)
    stream.close()  # ends it all the same
    assert not alive(stopped)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_engine(address: Address, how: signal.Signals) -> None:
    endpoint = address()
    engine = subprocess.Popen(
        [sys.executable, "-P", "-c", _ENGINE, endpoint],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert engine.stdout is not None
    process = int(engine.stdout.readline())
    assert alive(process)
    if how == signal.SIGTERM:  # of the whole group
        os.killpg(engine.pid, how)
    else:
        engine.kill()
    engine.wait()
    until(lambda: not alive(process))
    engine.stdout.close()
    Publisher(Published(endpoint)).close()  # the address is free


def test_close_leaves_nothing(address: Address) -> None:
    endpoint = address()
    sender = Publisher(Published(endpoint))
    process, files = sender.process_id, len(os.listdir("/proc/self/fd"))
    sender.close()
    assert not alive(process)
    assert len(os.listdir("/proc/self/fd")) == files - 1
    with pytest.raises(ValueError, match="kv_events_endpoint is 'tcp://192\\.0"):
        Publisher(Published("tcp://192.0.2.1:1"))
    assert len(os.listdir("/proc/self/fd")) == files - 1


def test_a_process_that_cannot_begin_says_why(
    address: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('no such package')", encoding="ascii")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    with pytest.raises(ValueError, match=r"pip install 'coppice\[events\]' \(no such package\)"):
        Publisher(Published(address()))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="the process that publishes ended with status 1"):
        Publisher(Published(address()))
